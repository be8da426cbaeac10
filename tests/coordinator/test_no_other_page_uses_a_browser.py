"""A page of another origin cannot have a browser change anything, whatever it may make the browser send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from coordinator.access import Scope
from coordinator.app import create_app
from coordinator.tokens import TokenFile, add, issue
from weight_store.memory import MemoryStore

JSON = {"Content-Type": "application/json"}
TAKEOVER = b'{"launch": "a"}'


@pytest.fixture
def http(listen: Callable[..., str]) -> Iterator[httpx.Client]:
    """A client of a coordinator on this machine's loopback, over real HTTP."""
    with httpx.Client(base_url=listen(create_app(MemoryStore(), local_only=True)), trust_env=False) as client:
        yield client


def check_refused(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["status"], answer.json()["code"]) == (status, status, code)


FOREIGN = [
    [("Origin", "https://evil.example")],
    [("Origin", "null")],
    [("Origin", "http://127.0.0.1:1")],  # another server of this machine
    [("Origin", "http://localhost.evil.example")],
    [("Origin", "HOST")],
    [("Sec-Fetch-Site", "cross-site")],
    [("Sec-Fetch-Site", "same-site")],
    [("Sec-Fetch-Site", "of the future")],
    [("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Site", "cross-site")],
    [("Origin", "http://HOST"), ("Sec-Fetch-Site", "cross-site")],
    [("Origin", "http://HOST"), ("Origin", "https://evil.example")],
]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/runs/r/terms"),
        ("PUT", "/v1/runs/r/regions/eu/agents/a"),
        ("GET", "/v1/runs/r/terms/1/layout?world_size=1"),  # writes the layout
    ],
)
def test_what_may_change_something_is_refused(http: httpx.Client, method: str, path: str) -> None:
    for headers in FOREIGN:
        sent = [(name, value.replace("HOST", http.base_url.netloc.decode())) for name, value in headers]
        answer = http.request(method, path, content=TAKEOVER, headers=[*sent, *JSON.items()])
        check_refused(answer, 403, "foreign-page")
    assert http.get("/v1/runs").json() == []


def test_a_browser_that_asks_first_is_told_no(http: httpx.Client) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = http.options("/v1/runs/r/terms", headers=asked)
    check_refused(answer, 405, "method-not-allowed")
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_does_not_say_it_is_json_is_refused(http: httpx.Client, chunked: bool) -> None:
    """These are what a page may have sent without asking first."""
    for told in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"):
        body = iter([TAKEOVER]) if chunked else TAKEOVER
        answer = http.post("/v1/runs/r/terms", content=body, headers={"Content-Type": told})
        check_refused(answer, 415, "wrong-media-type")
        assert "Content-Type: application/json" in answer.json()["detail"]
    check_refused(http.post("/v1/runs/r/terms", content=TAKEOVER), 415, "wrong-media-type")
    assert http.get("/v1/runs").json() == []


def test_programs_and_our_own_page_go_on(http: httpx.Client) -> None:
    own = f"http://{http.base_url.netloc.decode()}"
    for headers in (
        {},
        {"Content-Type": "Application/JSON; charset=utf-8"},
        {"Content-Type": "application/of-ours+json"},
        {"Origin": own, "Sec-Fetch-Site": "same-origin"},
        {"Origin": own},
        {"Sec-Fetch-Site": "none"},
    ):
        assert http.post("/v1/runs/r/terms", content=TAKEOVER, headers=JSON | headers).status_code == 200


def test_links_from_elsewhere_lead_to_the_pages(http: httpx.Client) -> None:
    foreign = {"Origin": "null", "Sec-Fetch-Site": "cross-site"}
    for path in ("/", "/docs", "/openapi.json", "/v1/runs", "/healthz"):
        answer = http.get(path, headers=foreign)
        assert answer.status_code == 200
        # The description is the same everywhere; nothing else is for another origin to read.
        assert ("access-control-allow-origin" in answer.headers) == (path == "/openapi.json")
    check_refused(http.get("/nothing", headers=foreign), 404, "unknown-route")


def test_it_is_refused_with_a_token_too(listen: Callable[..., str], tmp_path: Path) -> None:
    issued, file = issue([Scope.ADMIN]), tmp_path / "tokens.jsonl"
    add(file, issued.stored)
    app: FastAPI = create_app(MemoryStore(), tokens=TokenFile(file))
    bearer = {"Authorization": f"Bearer {issued.token}"}
    with httpx.Client(base_url=listen(app), trust_env=False, headers=bearer) as client:
        foreign = JSON | {"Origin": "https://evil.example"}
        check_refused(client.post("/v1/runs/r/terms", content=TAKEOVER, headers=foreign), 403, "foreign-page")
        check_refused(client.post("/v1/runs/r/terms", content=TAKEOVER), 415, "wrong-media-type")
