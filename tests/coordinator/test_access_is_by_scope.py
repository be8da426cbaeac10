"""Every route takes a scope, tokens are kept as hashes and rotate without a restart, and clients show theirs."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from fastapi import FastAPI

from coordinator import tokens
from coordinator.access import OPEN, ROUTES, Scope, check, check_local, needed
from coordinator.app import create_app
from coordinator.client import CoordinatorClient, Credentials
from coordinator.errors import (
    BadRequest,
    MethodNotAllowed,
    ScopeMissing,
    TokenFileRefused,
    TokenRequired,
    UnknownRoute,
    WrongHost,
)
from coordinator.routes import fleets, health, page, readers, trainers
from coordinator.tokens import TokenFile, issue
from coordinator.wire import TermRequest
from tests.coordinator.conftest import Clock
from weight_store.memory import MemoryStore
from weightcast.commands.token import command


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTCAST_TOKEN", "WEIGHTCAST_TOKEN_FILE", "WEIGHTCAST_CA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.jsonl"


def admit(path: Path, *scopes: Scope) -> str:
    issued = issue(scopes)
    tokens.add(path, issued.stored)
    return issued.token


@pytest.fixture
def by_scope(path: Path) -> dict[Scope, str]:
    """A token of each scope, admitted by the file at ``path``."""
    return {scope: admit(path, scope) for scope in Scope}


@pytest.fixture
def app(path: Path, by_scope: dict[Scope, str]) -> FastAPI:
    return create_app(MemoryStore(), tokens=TokenFile(path))


@asynccontextmanager
async def browser(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
        yield client


def served_routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    own = [route for route in app.router.routes if hasattr(route, "path")]
    included = [route for module in (trainers, readers, fleets, health, page) for route in module.router.routes]
    for route in (*own, *included):
        for method in route.methods - {"HEAD"}:
            yield method, route.path


def test_every_route_has_a_row_and_every_row_a_route(app: FastAPI) -> None:
    assert sorted(served_routes(app)) == sorted(ROUTES)
    described = {(m.upper(), path) for path, methods in app.openapi()["paths"].items() for m in methods}
    assert described <= set(ROUTES)


def test_only_what_tells_nothing_about_a_run_is_open() -> None:
    assert {path for (_, path), scope in ROUTES.items() if scope is OPEN and path.startswith("/v1")} == set()


def an_address(template: str) -> str:
    values = {"run": "demo", "region": "eu", "agent": "a"}
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], "1"), template)


def test_no_address_fits_two_rows() -> None:
    for method, template in ROUTES:
        address = an_address(template)
        assert needed(method, address) == ROUTES[method, template]
        others = [other for verb, other in ROUTES if verb == method and other != template]
        patterns = [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(other)) for other in others]
        assert not [pattern for pattern in patterns if re.fullmatch(pattern, address)]


MAY = {
    Scope.TRAINER: {Scope.TRAINER, Scope.ADMIN},
    Scope.ROLLOUT: {Scope.ROLLOUT, Scope.ADMIN},
    Scope.VIEWER: set(Scope),
    Scope.ADMIN: {Scope.ADMIN},
}


@pytest.mark.parametrize(("method", "template"), [key for key, scope in ROUTES.items() if scope is not OPEN])
async def test_each_route_takes_its_scope(method: str, template: str, app: FastAPI, by_scope: dict[Scope, str]) -> None:
    scope = ROUTES[method, template]
    assert scope is not None
    address = an_address(template)
    async with browser(app) as http:
        answer = await http.request(method, address)
        assert (answer.status_code, answer.json()["code"]) == (401, "token-required")
        assert f"scope {scope}" in answer.json()["detail"]
        assert answer.headers["www-authenticate"].startswith("Bearer")
        for held, token in by_scope.items():
            answer = await http.request(method, address, headers={"Authorization": f"Bearer {token}"})
            if held in MAY[scope]:
                assert answer.status_code in (404, 422, 200), answer.text  # unknown run, missing body, all runs
            else:
                assert (answer.status_code, answer.json()["code"]) == (403, "scope-missing")
                assert f"takes a token with the scope {scope}" in answer.json()["detail"]


def test_a_token_with_several_scopes_may_be_used_for_each_of_them() -> None:
    held = [Scope.ROLLOUT, Scope.TRAINER]
    for scope in (*held, Scope.VIEWER):
        check(scope, held)
    with pytest.raises(ScopeMissing, match="this one has rollout, trainer"):
        check(Scope.ADMIN, held)


@pytest.mark.parametrize(("method", "template"), [key for key, scope in ROUTES.items() if scope is OPEN])
async def test_what_is_open_takes_no_token(method: str, template: str, app: FastAPI) -> None:
    async with browser(app) as http:
        assert (await http.request(method, template)).status_code == 200


async def test_a_route_that_the_table_forgot_is_closed_to_everybody(app: FastAPI, by_scope: dict[Scope, str]) -> None:
    @app.get("/v1/forgotten")
    async def forgotten() -> str:
        return "secret"

    async with browser(app) as http:
        for address in ("/v1/forgotten", "/v1/forgotten/", "//v1/forgotten"):
            answer = await http.get(address, headers={"Authorization": f"Bearer {by_scope[Scope.ADMIN]}"})
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown-route")
    with pytest.raises(UnknownRoute):
        needed("GET", "/v1/runs/demo/head/")
    with pytest.raises(MethodNotAllowed):
        needed("DELETE", "/v1/runs/demo")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wct_000000000000_" + "A" * 43},
        {"Authorization": "Basic {admin}"},
        {"Authorization": "Bearer {admin}x"},
        {"Authorization": "Bearer {admin} {admin}"},
        {"Authorization": "Bearer \xe9\xff"},
        {"X-Authorization": "Bearer {admin}"},
        {"Cookie": "token={admin}"},
    ],
)
async def test_what_is_no_token(headers: dict[str, str], app: FastAPI, by_scope: dict[Scope, str]) -> None:
    sent = {name: value.format(admin=by_scope[Scope.ADMIN]).encode("latin-1") for name, value in headers.items()}
    async with browser(app) as http:
        assert (await http.get("/v1/runs", headers=sent)).status_code == 401
        admin = ("Authorization", f"Bearer {by_scope[Scope.ADMIN]}")
        assert (await http.get("/v1/runs", headers=[admin, admin])).status_code == 401
        assert (await http.get("/v1/runs", headers=[admin])).status_code == 200
        assert (await http.get(f"/v1/runs?token={by_scope[Scope.ADMIN]}")).status_code == 401


async def test_the_token_is_asked_for_before_the_body_is_looked_at(app: FastAPI) -> None:
    async with browser(app) as http:
        answer = await http.post("/v1/runs/demo/terms", content=b"{")
        assert answer.status_code == 401


def test_secrets_are_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = admit(path, Scope.VIEWER)
    compared: list[bool] = []

    def spy(a: str, b: str) -> bool:
        compared.append(hmac.compare_digest(a, b))
        return compared[-1]

    monkeypatch.setattr(tokens, "hmac", type("hmac", (), {"compare_digest": staticmethod(spy)}))
    known = TokenFile(path)
    assert known.held(token) == {Scope.VIEWER}
    assert known.held(token[:-1] + ("A" if token[-1] != "A" else "B")) is None
    assert compared == [True, False]


def test_the_file_holds_hashes_alone_and_is_its_owners(path: Path) -> None:
    first, second = issue([Scope.ADMIN]), issue([Scope.ADMIN])
    for issued in (first, second):
        tokens.add(path, issued.stored)
        secret = issued.token.split("_", 2)[2]
        assert secret not in path.read_text() + repr(issued)
    assert first.stored.salt != second.stored.salt
    assert path.stat().st_mode & 0o777 == 0o600


def test_tokens_rotate_without_a_restart(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = admit(path, Scope.TRAINER)
    known = TokenFile(path)
    new = admit(path, Scope.TRAINER)
    assert known.held(old) == known.held(new) == {Scope.TRAINER}
    before = path.read_text()
    path.write_text(before.splitlines()[1] + "\n")
    assert (known.held(old), known.held(new)) == (None, {Scope.TRAINER})
    path.write_text("what\n")
    assert known.held(new) == {Scope.TRAINER}
    assert "the tokens read before stay valid, those deleted since too: line 1" in caplog.text
    path.unlink()
    assert known.held(new) == {Scope.TRAINER}
    path.write_text(before)
    assert known.held(old) == {Scope.TRAINER}


def test_a_file_that_cannot_be_read_is_told_of_every_minute(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock, token = Clock(), admit(path, Scope.VIEWER)
    known = TokenFile(path, clock=clock)
    path.write_text("what\n" + path.read_text())
    told = []
    for _ in range(181):
        assert known.held(token) == {Scope.VIEWER}
        clock.advance(1)
        told.append(caplog.text.count("stay valid"))
    assert (told[0], told[59], told[60], told[180]) == (1, 1, 2, 4)
    path.write_text("")
    assert known.held(token) is None
    clock.advance(600)
    assert known.held(token) is None
    assert caplog.text.count("stay valid") == 4
    assert caplog.text.count("was read again") == 1  # and not again, for nothing changed


def test_permissions_that_were_put_right_count(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = admit(path, Scope.VIEWER)
    known = TokenFile(path, clock=lambda: 0.0)
    written = path.stat().st_mtime_ns
    path.write_text("")
    path.chmod(0o666)
    os.utime(path, ns=(written, written))
    assert known.held(token) == {Scope.VIEWER}
    assert "everybody may write" in caplog.text
    path.chmod(0o600)
    assert known.held(token) is None


def test_a_file_that_is_none_is_not_waited_for(path: Path, refusal: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(path)
    store = f"file://{tmp_path}/store"
    for no_file in (path, Path("/dev/null")):
        assert f"{no_file} is no regular file" in refusal("--store", store, "--token-file", str(no_file))
    path.unlink()
    token = admit(path, Scope.VIEWER)
    known = TokenFile(path)
    path.unlink()
    os.mkfifo(path)
    assert known.held(token) == {Scope.VIEWER}
    path.unlink()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no token"),
        ("# nobody\n\n", "holds no token"),
        ("wct_000000000000_secret-secret\n", "line 1"),
        ("{}", "line 1"),
        ('{"id":"000000000000","scopes":[],"salt":"' + "0" * 32 + '","sha256":"' + "0" * 64 + '"}', "line 1"),
        ('{"id":"000000000000","scopes":["root"],"salt":"' + "0" * 32 + '","sha256":"' + "0" * 64 + '"}', "line 1"),
        ("[" * 100_000, "line 1"),
        ("#" * (tokens.MAX_FILE_BYTES + 1), "more than"),
    ],
    ids=["empty", "comments", "a token", "no fields", "no scope", "unknown scope", "deep", "large"],
)
def test_files_that_cannot_be(path: Path, text: str, sentence: str) -> None:
    path.write_text(text)
    with pytest.raises(TokenFileRefused, match=sentence) as caught:
        TokenFile(path)
    assert "secret-secret" not in str(caught.value)


def test_files_that_others_may_write_or_nobody_can_read(path: Path) -> None:
    with pytest.raises(TokenFileRefused, match="cannot be read"):
        TokenFile(path)
    admit(path, Scope.VIEWER)
    twice = path.read_text()
    path.write_text(twice * 2)
    with pytest.raises(TokenFileRefused, match="a second time"):
        TokenFile(path)
    path.write_text(twice)
    path.chmod(0o666)
    with pytest.raises(TokenFileRefused, match="everybody may write"):
        TokenFile(path)


def test_the_command_prints_a_token_once(path: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(command, ["new", "--scope", "trainer", "--file", str(path), "--note", "the job"])
    token = made.stdout.strip()
    assert TokenFile(path).held(token) == {Scope.TRAINER}
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    secret = tmp_path / "secret"
    arguments = ["new", "--scope", "rollout", "--scope", "viewer", "--file", str(path), "--secret-file", str(secret)]
    assert CliRunner().invoke(command, arguments).stdout == ""
    assert TokenFile(path).held(secret.read_text().strip()) == {Scope.ROLLOUT, Scope.VIEWER}
    assert secret.stat().st_mode & 0o777 == 0o600
    again = CliRunner().invoke(command, arguments)
    assert isinstance(again.exception, TokenFileRefused)
    listed = CliRunner().invoke(command, ["list", "--file", str(path)]).stdout
    assert re.fullmatch(r"[0-9a-f]{12}  trainer  the job\n[0-9a-f]{12}  rollout,viewer\n", listed)


def test_a_token_that_nobody_will_admit_is_not_left_behind(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    arguments = ["--scope", "viewer", "--file", str(tmp_path / "no" / "where"), "--secret-file", str(secret)]
    assert isinstance(CliRunner().invoke(command, ["new", *arguments]).exception, TokenFileRefused)
    assert not secret.exists()


def test_what_is_given_goes_before_the_environment() -> None:
    """A file that is given also goes before a token of the environment, which may be another one's."""
    variables = {"WEIGHTCAST_TOKEN": "token", "WEIGHTCAST_TOKEN_FILE": "file", "WEIGHTCAST_CA": "ca"}
    found, file, ca = Credentials.from_environment(variables), Path("file"), Path("ca")
    assert found.overridden() == found == Credentials("token", file, ca)
    assert found.overridden(token_file=Path("given")) == Credentials(None, Path("given"), ca)
    assert found.overridden(ca=Path("given")) == Credentials("token", file, Path("given"))
    assert Credentials.from_environment(dict.fromkeys(variables, "")) == Credentials()


async def test_clients_take_their_token_from_the_environment(
    app: FastAPI, by_scope: dict[Scope, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def client() -> CoordinatorClient:
        return CoordinatorClient("http://coordinator", transport=httpx.ASGITransport(app))

    async with client() as nobody:
        with pytest.raises(TokenRequired, match="WEIGHTCAST_TOKEN"):
            await nobody.runs()
        assert (await nobody.health()).status == "ok"
    monkeypatch.setenv("WEIGHTCAST_TOKEN", by_scope[Scope.VIEWER])
    async with client() as viewer:
        assert await viewer.runs() == []
        with pytest.raises(ScopeMissing, match="scope trainer; this one has viewer"):
            await viewer.takeover("demo", TermRequest(launch="a"))
    monkeypatch.delenv("WEIGHTCAST_TOKEN")
    file = tmp_path / "token"
    file.write_text(f"{by_scope[Scope.TRAINER]}\n")
    monkeypatch.setenv("WEIGHTCAST_TOKEN_FILE", str(file))
    async with client() as trainer:
        assert (await trainer.takeover("demo", TermRequest(launch="a"))).term == 1


async def test_a_rotated_token_is_picked_up(app: FastAPI, path: Path, tmp_path: Path) -> None:
    old, file = admit(path, Scope.VIEWER), tmp_path / "token"
    file.write_text(old)
    credentials = Credentials(token_file=file)
    transport = httpx.ASGITransport(app)
    async with CoordinatorClient("http://coordinator", transport=transport, credentials=credentials) as client:
        assert await client.runs() == []
        file.write_text(admit(path, Scope.VIEWER))
        revoke(path, old)
        assert await client.runs() == []
        revoke(path, file.read_text())
        with pytest.raises(TokenRequired):
            await client.runs()


def revoke(path: Path, token: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if token.split("_")[1] not in line))


@pytest.mark.parametrize("text", ["", "two words", "line\nline", "é", "x" * 9000])
def test_token_files_of_clients_that_cannot_be(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(BadRequest, match="holds no token") as caught:
        CoordinatorClient("http://coordinator", credentials=Credentials(token_file=file))
    assert str(file) in str(caught.value)
    with pytest.raises(TokenFileRefused, match="cannot be read"):
        CoordinatorClient("http://coordinator", credentials=Credentials(token_file=tmp_path / "none"))
    with pytest.raises(BadRequest, match="/dev/zero holds no token"):  # of which only a few KB are read
        CoordinatorClient("http://coordinator", credentials=Credentials(token_file=Path("/dev/zero")))
    os.truncate(file, 0)
    with pytest.raises(TokenFileRefused, match="no certificate authority"):
        CoordinatorClient("https://coordinator", credentials=Credentials(ca=file))


@pytest.mark.parametrize("host", ["localhost", "localhost:8470", "127.0.0.1:1", "127.8.8.8", "[::1]:8470"])
def test_without_tokens_this_machine_is_served(host: str) -> None:
    check_local(host)


@pytest.mark.parametrize("host", ["", "evil.example:8470", "localhost.evil.example", "10.0.0.1", "[::2]", "[", "::1"])
async def test_without_tokens_nobody_else_is(host: str) -> None:
    with pytest.raises(WrongHost, match="--token-file"):
        check_local(host)
    async with browser(create_app(MemoryStore(), local_only=True)) as http:
        answer = await http.get("/v1/runs", headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (421, "wrong-host")
        assert (await http.get("/v1/runs", headers={"Host": "localhost"})).status_code == 200


def test_it_does_not_serve_others_without_tokens(refusal: Callable[..., str], tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        assert "without tokens" in refusal("--store", store, "--host", host)
    missing = str(tmp_path / "none")
    assert missing in refusal("--store", store, "--host", "0.0.0.0", "--token-file", missing)


def test_tokens_that_anybody_on_the_way_can_read_are_warned_of(
    refusal: Callable[..., str], path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admit(path, Scope.VIEWER)
    not_ours = ("--host", "192.0.2.1", "--token-file", str(path))  # an address for documents
    assert "cannot listen on 192.0.2.1" in refusal("--store", f"file://{tmp_path}/store", *not_ours)
    assert "tokens go over the network readable" in caplog.text


def test_certificates_that_cannot_be(refusal: Callable[..., str], tmp_path: Path) -> None:
    store, nothing = f"file://{tmp_path}/store", tmp_path / "nothing.pem"
    assert "both --tls-cert and --tls-key" in refusal("--store", store, "--tls-cert", str(nothing))
    both = ("--tls-cert", str(nothing), "--tls-key", str(nothing))
    assert "cannot be used" in refusal("--store", store, *both)
    nothing.write_text("no certificate")
    assert "cannot be used" in refusal("--store", store, *both)


def test_the_table_is_for_people_too() -> None:
    """docs/threat-model.md shows it; a change there or here is noticed."""
    text = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text()
    shown = set(re.findall(r"^\| `(\w+) (/\S*)` \| (\w+) \|$", text, re.M))
    assert shown == {(method, path, scope or "open") for (method, path), scope in ROUTES.items()}
