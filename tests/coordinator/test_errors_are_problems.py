"""Every error is a problem body with a stable code and a sentence, and the client raises the class it names."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from coordinator import errors
from coordinator.client import CoordinatorClient
from coordinator.errors import CoordinatorError, error_for
from coordinator.problems import MAX_BODY_BYTES, from_store_error, problem_response
from weight_store import errors as store_errors
from weight_store.errors import StoreRefused, StoreUnavailable, WeightStoreError
from weight_store.keys import head_key
from weight_store.memory import MemoryStore

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CoordinatorError)]
STORE_KINDS = [k for _, k in inspect.getmembers(store_errors, inspect.isclass) if issubclass(k, WeightStoreError)]


@pytest.fixture
async def http(node: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(node.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
        yield client


def check_problem(response: httpx.Response, status: int, code: str) -> str:
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (response.status_code, body["status"], body["code"], body["type"]) == (status, status, code, "about:blank")
    assert body["title"]
    detail = body["detail"]
    assert isinstance(detail, str)
    assert detail
    return detail


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown-route"),
        ("GET", "/v1/runs/", 404, "unknown-route"),
        ("DELETE", "/v1/runs", 405, "method-not-allowed"),
        ("GET", "/v1/runs/nothing", 404, "unknown-run"),
        ("GET", "/v1/runs/Not%20A%20Name", 422, "bad-request"),
        ("GET", "/v1/runs/a..b/head", 422, "bad-request"),
        ("GET", f"/v1/runs/{'x' * 64}/head", 422, "bad-request"),
        ("GET", "/v1/runs/a%00b/head", 422, "bad-request"),
        ("GET", "/v1/runs/demo/versions/0", 422, "bad-request"),
        ("GET", f"/v1/runs/demo/versions/{2**63}", 422, "bad-request"),
        ("GET", "/v1/runs/demo/head?wait=61", 422, "bad-request"),
        ("GET", "/v1/runs/demo/head?wait=nan", 422, "bad-request"),
        ("GET", "/v1/runs/demo/head?after=-1", 422, "bad-request"),
        ("GET", "/v1/runs/demo/wait?version=1&quorum=2", 422, "bad-request"),
        ("GET", "/v1/runs/demo/wait?version=1&state=gone", 422, "bad-request"),
        ("GET", "/v1/runs/demo/events?after=x", 422, "bad-request"),
        ("GET", "/v1/runs/demo/terms/1/layout?world_size=1000000000", 422, "bad-request"),
    ],
)
async def test_requests_that_cannot_be(http: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    check_problem(await http.request(method, path), status, code)


@pytest.mark.parametrize(("path", "methods"), [("/v1/runs", "GET"), ("/v1/runs/demo/versions", "GET, POST")])
async def test_a_wrong_method_is_told_the_right_ones(http: httpx.AsyncClient, path: str, methods: str) -> None:
    assert (await http.patch(path)).headers["allow"] == methods


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        b'{"launch": "a", "takover": true}',
        b'{"launch": "a b"}',
        b'{"launch": "' + b"x" * 129 + b'"}',
        b'{"launch": "a", "wait_s": 1e400}',
        b'{"launch": "a", "wait_s": NaN}',
    ],
)
async def test_bodies_that_cannot_be(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/runs/demo/terms", content=body, headers={"Content-Type": "application/json"})
    detail = check_problem(response, 422, "bad-request")
    assert len(detail) < 1000
    assert "xxx" not in detail  # the input is never repeated


async def test_large_bodies_are_refused_announced_or_not(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1000 + 2):
            yield b" " * 1000

    for content in (b" " * (MAX_BODY_BYTES + 1), endless()):
        response = await http.post("/v1/runs/demo/terms", content=content, headers={"Content-Type": "application/json"})
        check_problem(response, 413, "body-too-large")


async def test_trouble_with_the_store_is_told_apart(place: Any, http: httpx.AsyncClient, node: Any) -> None:
    class Down(MemoryStore):
        error: WeightStoreError = StoreUnavailable("no connection to the store")

        async def get(self, key: str, *, max_bytes: int) -> Any:
            raise self.error

    down = Down()
    there = await place.node(down)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(there.app), base_url="http://coordinator") as client:
        for path, told in (("/readyz", "log says why"), ("/v1/runs/demo/head", "no connection to the store")):
            response = await client.get(path)
            assert told in check_problem(response, 503, "store-unavailable")
            assert response.headers["retry-after"] == "1"
        down.error = StoreRefused("no such bucket")
        check_problem(await client.get("/readyz"), 500, "store-refused")
        assert (await client.get("/healthz")).status_code == 200
    await place.store.create(head_key("demo"), b"{}")
    assert "demo/head.json" in check_problem(await http.get("/v1/runs/demo"), 500, "bucket-damaged")


async def test_a_defect_shows_nothing_of_itself(http: httpx.AsyncClient, node: Any, caplog: Any) -> None:
    async def broken() -> None:
        raise RuntimeError("secret detail")

    node.service.runs = broken
    detail = check_problem(await http.get("/v1/runs"), 500, "internal")
    assert "secret" not in detail
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_client_raises_what_the_server_raised(kind: type[CoordinatorError]) -> None:
    body = json.loads(bytes(problem_response(kind("a sentence")).body))
    error = error_for(body["code"], body["status"], body["detail"])
    assert type(error) is kind
    assert str(error) == "a sentence"


def test_codes_are_unique_and_the_drawn_tree_is_the_real_one() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip(" │├└─").split(" ")[0]
        if name and hasattr(errors, name):
            drawn.append(((len(line) - len(line.lstrip(" │├└─"))) // 4, name))
    assert {name for _, name in drawn} == {kind.__name__ for kind in KINDS}
    parents: dict[int, str] = {}
    for depth, name in drawn:
        parents[depth] = name
        if depth > 1:
            assert getattr(errors, name).__base__.__name__ == parents[depth - 1], name


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_every_error_of_the_bucket_has_an_answer(kind: type[WeightStoreError]) -> None:
    error = from_store_error(kind("a sentence"))
    assert str(error) == "a sentence"
    assert 400 <= error.status < 600


@pytest.mark.parametrize(("status", "expected"), [(503, errors.TryAgain), (418, errors.Refused), (500, errors.Broken)])
def test_codes_of_a_newer_coordinator_go_by_their_status(status: int, expected: type[CoordinatorError]) -> None:
    assert type(error_for("from-the-future", status, "x")) is expected


async def test_what_is_no_coordinator_is_unreachable() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/healthz":
            raise httpx.ConnectError("refused")
        return httpx.Response(502 if request.url.path == "/readyz" else 200, text="<html>")

    async with CoordinatorClient("http://coordinator", transport=httpx.MockTransport(answer)) as client:
        for call in (client.health, client.ready, client.runs):
            with pytest.raises(errors.CoordinatorUnreachable, match="http://coordinator"):
                await call()


@pytest.mark.parametrize("url", ["", "coordinator:8470", "ftp://x", "http://user:secret@x", "http://x?token=secret"])
def test_addresses_that_cannot_be(url: str) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        CoordinatorClient(url)
    assert "secret" not in str(caught.value)


async def test_the_api_is_described(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            assert route["summary"], (method, path)
            assert len(route["description"]) > 20, (method, path)
    assert (await http.get("/docs")).status_code == 200
