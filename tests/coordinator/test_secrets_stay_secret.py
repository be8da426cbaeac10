"""Real TLS, real processes: a token is in no log, error, process list, address or ``repr``; a pinned CA is pinned."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from coordinator import tokens
from coordinator.access import Scope
from coordinator.client import CoordinatorClient, Credentials
from coordinator.errors import CoordinatorError, CoordinatorUnreachable, ScopeMissing, TokenRequired
from coordinator.wire import TermRequest
from weight_store.opening import open_store

WEIGHTCAST = str(Path(sys.executable).with_name("weightcast"))


@dataclass
class Place:
    """A coordinator that serves HTTPS and takes tokens."""

    server: Any
    url: str
    ca: Path
    trainer: str
    viewer: str

    def client(self, token: str, ca: Path | None = None) -> CoordinatorClient:
        return CoordinatorClient(self.url, credentials=Credentials(token=token, ca=ca or self.ca))


@pytest.fixture
def authority(tmp_path: Path) -> tuple[trustme.CA, Path]:
    made, path = trustme.CA(), tmp_path / "ca.pem"
    made.cert_pem.write_to_path(str(path))
    return made, path


@pytest.fixture
def secured(serve: Callable[..., Any], tmp_path: Path, authority: tuple[trustme.CA, Path]) -> Place:
    made, ca = authority
    certificate = made.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    (tmp_path / "chain.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    file = tmp_path / "tokens.jsonl"
    trainer, viewer = tokens.issue([Scope.TRAINER]), tokens.issue([Scope.VIEWER])
    for issued in (trainer, viewer):
        tokens.add(file, issued.stored)
    arguments = ["--host", "0.0.0.0", "--port", "0", "--token-file", str(file), "--access-log", "--verbose"]
    tls = ["--tls-cert", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem")]
    server = serve("--store", f"file://{tmp_path}/store", *arguments, *tls)
    return Place(server, server.url().replace("0.0.0.0", "127.0.0.1"), ca, trainer.token, viewer.token)


def processes() -> str:
    """Command lines and titles of every process that we may look at."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "comm"):
            try:
                found.append((directory / name).read_bytes())
            except OSError:
                continue
    return b"\n".join(found).decode("utf-8", "replace")


def status(at: Place, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [WEIGHTCAST, "status", "--coordinator", at.url, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


async def test_a_run_over_tls_with_tokens(secured: Place, place: Any, tmp_path: Path) -> None:
    place.store = open_store(f"file://{tmp_path}/store")
    async with secured.client(secured.trainer) as client, secured.client(secured.viewer) as viewer:
        job = await place.job(type("Node", (), {"client": client})).start()
        sealed = await job.publish(step=1)
        assert (await viewer.head("demo")).position == sealed.position
        event = await anext(viewer.events("demo"))
        assert event.name == "sealed"
        with pytest.raises(ScopeMissing):
            await viewer.takeover("demo", TermRequest(launch="thief"))
    await place.store.close()


async def test_only_the_pinned_authority_is_trusted(secured: Place, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    async with secured.client(secured.trainer, other) as fooled:
        with pytest.raises(CoordinatorUnreachable, match="certificate verify failed"):
            await fooled.runs()
    async with CoordinatorClient(secured.url, credentials=Credentials(token=secured.trainer)) as unpinned:
        with pytest.raises(CoordinatorUnreachable, match="certificate verify failed"):
            await unpinned.runs()
    plain = secured.url.replace("https:", "http:")
    async with CoordinatorClient(plain, credentials=Credentials()) as client:
        with pytest.raises(CoordinatorUnreachable):
            await client.runs()


async def test_secrets_are_nowhere_to_be_read(
    secured: Place, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    unknown = secured.trainer[:-6] + "unknow"
    told: list[str] = []
    for token in (secured.trainer, secured.viewer, unknown):
        credentials = Credentials(token=token, ca=secured.ca)
        client = CoordinatorClient(secured.url, credentials=credentials)
        told += [repr(client), repr(credentials), repr(client._http.auth)]
        try:
            await client.takeover("demo", TermRequest(launch=f"launch-{len(told)}"))
        except CoordinatorError as error:
            told.append(f"{error} {error!r}")
        finally:
            await client.close()
    verify = Credentials(ca=secured.ca).verify()
    async with httpx.AsyncClient(base_url=secured.url, verify=verify, trust_env=False) as http:
        for value in (f"Basic {secured.trainer}", f"Bearer {unknown}", f"Bearer {secured.viewer}"):
            answer = await http.post("/v1/runs/demo/terms", json={"launch": "x"}, headers={"Authorization": value})
            told.append(answer.text + str(answer.headers))
    shown = await asyncio.to_thread(status, secured, WEIGHTCAST_TOKEN=secured.viewer, WEIGHTCAST_CA=str(secured.ca))
    refused = await asyncio.to_thread(status, secured, "--ca", str(secured.ca), WEIGHTCAST_TOKEN=unknown)
    assert (shown.returncode, refused.returncode) == (0, 1)
    assert "scope viewer" in refused.stderr
    told += [shown.stdout, shown.stderr, refused.stdout, refused.stderr, processes(), secured.server.log, caplog.text]
    told += capfd.readouterr()
    assert "/v1/runs/demo/terms" in secured.server.log  # requests are logged, so there was something to find
    for token in (secured.trainer, secured.viewer, unknown):
        secret = token.split("_", 2)[2]
        assert not [text for text in told if secret in text]


async def test_a_token_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with CoordinatorClient("http://coordinator.example", credentials=Credentials(token="secret")):
        assert "readable for everybody on the way" in caplog.text
        assert "secret" not in caplog.text
    caplog.clear()
    async with CoordinatorClient("http://127.0.0.1:1", credentials=Credentials(token="secret")) as local:
        with pytest.raises(CoordinatorUnreachable):
            await local.runs()
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_tokens_are_revoked_in_a_running_server(secured: Place, tmp_path: Path) -> None:
    file = tmp_path / "tokens.jsonl"
    async with secured.client(secured.viewer) as client:
        assert await client.runs() == []
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if json.loads(line)["scopes"] != ["viewer"]))
        with pytest.raises(TokenRequired):
            await client.runs()
