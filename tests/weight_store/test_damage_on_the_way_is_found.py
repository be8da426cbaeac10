"""A part of an upload that is altered on its way is sent again before anything is stored: by Content-MD5, or by TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme

from weight_store.opening import parse_s3_url
from weight_store.retry import Retrier, RetryPolicy
from weight_store.s3 import S3Store
from weight_store.s3_settings import S3Location, S3Options

MIB = 2**20
OPTIONS = S3Options(part_bytes=5 * MIB, upload_workers=1)


@pytest_asyncio.fixture
async def https(proxy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """SeaweedFS by TLS, below the proxy that damages: what it alters is ciphertext."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    plain = proxy.upstream

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*plain)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    proxy.upstream = ("127.0.0.1", server.sockets[0].getsockname()[1])
    yield f"https://127.0.0.1:{proxy.port}"
    server.close()


async def damaged_once(store: S3Store, proxy: Any, data: bytes) -> None:
    async with store.upload("v/x.shard") as upload:
        await upload.write(data[: 6 * MIB])
        proxy.to_damage = 1
        await upload.write(data[6 * MIB :])
        await upload.commit()
    buffer = bytearray(len(data))
    await store.read_into("v/x.shard", 0, memoryview(buffer))
    await store.close()
    assert proxy.to_damage == 0
    assert buffer == data


@pytest.fixture
def make_store() -> Callable[[S3Location], S3Store]:
    return lambda location: S3Store(location, OPTIONS, retrier=Retrier(RetryPolicy(first_delay_s=0.01)))


async def test_without_tls_content_md5_finds_it(
    make_store: Callable[[S3Location], S3Store], proxied_url: str, proxy: Any, payload: Callable[[int], bytes]
) -> None:
    location = parse_s3_url(proxied_url)
    assert location.sends_md5
    await damaged_once(make_store(location), proxy, payload(12 * MIB))


async def test_with_tls_no_digest_of_ours_is_needed(
    make_store: Callable[[S3Location], S3Store],
    proxied_url: str,
    https: str,
    proxy: Any,
    payload: Callable[[int], bytes],
) -> None:
    location = replace(parse_s3_url(proxied_url), endpoint_url=https)
    assert not location.sends_md5
    await damaged_once(make_store(location), proxy, payload(12 * MIB))


def test_who_sends_md5(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    assert not S3Location("b").sends_md5
    assert not S3Location("b", endpoint_url="https://host").sends_md5
    assert S3Location("b", endpoint_url="https://host", content_md5=True).sends_md5
    assert S3Location("b", endpoint_url="http://host").sends_md5
    assert not S3Location("b", endpoint_url="http://host", content_md5=False).sends_md5
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host")
    assert S3Location("b").sends_md5
