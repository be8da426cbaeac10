"""``weightcast doctor`` against real servers, and against a real one behind a proxy that takes its safety away."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
import pytest_asyncio
from moto.server import ThreadedMotoServer

from tests.weight_store.standins import (
    Mode,
    Remembering,
    answer,
    create_only,
    ignoring,
    proxied,
    racy,
    racy_replacing,
    refusing,
    replace_refused,
    throttling,
    unquoted,
    without_ranges,
    zeroed,
)
from weight_store.doctor import Diagnosis, Examination, diagnose, require_conditional_writes
from weight_store.doctor.observing import observe_multipart
from weight_store.doctor.s3_observing import observe_plain
from weight_store.errors import FormatError, PreconditionFailed, StoreRefused, StoreThrottled, StoreUnavailable
from weight_store.local import LocalStore
from weight_store.memory import MemoryStore
from weight_store.opening import open_store, parse_s3_url
from weight_store.retry import ONCE
from weight_store.s3_settings import MIB, S3Options

_NUMBERS = itertools.count()


async def examined(url: str, *, size_mib: int = 11) -> Diagnosis:
    examination = Examination(url, f"{next(_NUMBERS):016x}", writers=4, rounds=3, size_bytes=size_mib * MIB)
    return diagnose(await examination.run())


async def left_behind(url: str) -> list[str]:
    store = open_store(url)
    try:
        return [entry.key async for entry in store.list("_doctor/")]
    finally:
        await store.close()


def states(found: Diagnosis) -> dict[str, str]:
    return {check.name: check.state for check in found.checks}


# ---- real servers


async def test_seaweedfs_is_safe(s3_store_url: Callable[[str], str]) -> None:
    url = s3_store_url("seaweed")
    found = await examined(url)
    assert (found.kind, found.safe) == ("full", True)
    assert set(states(found).values()) == {"ok"}
    assert found.verdict.startswith("safe: ")
    assert await left_behind(url) == []


async def test_ministack_is_safe_although_it_checks_less(s3_store_url: Callable[[str], str]) -> None:
    url = s3_store_url("ministack")
    found = await examined(url)
    assert (found.kind, found.safe) == ("full", True)
    assert states(found)["CRC32"] == "warning"
    assert await left_behind(url) == []


@pytest.fixture(scope="module")
def moto_url(aws_environment: None) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="doctored")
    client.close()
    yield f"s3://doctored/p?endpoint={quote(endpoint, safe=':/')}&region=us-east-1"
    server.stop()
    assert threading.active_count() >= 1


async def test_moto_believes_every_checksum(moto_url: str) -> None:
    found = await examined(moto_url)
    # Its races are those of a test double: whether one is caught is a matter of luck.
    assert found.kind in {"full", "racy"}
    assert (states(found)["Content-MD5"], states(found)["CRC32"]) == ("warning", "warning")
    assert await left_behind(moto_url) == []


async def test_rclone_ignores_conditions(rclone: Any) -> None:
    url = rclone.url("doctored", "p")
    found = await examined(url)
    assert (found.kind, found.safe) == ("ignored", False)
    assert found.verdict.startswith("not safe: the conditions of conditional writes are ignored")
    assert "one coordinator with --single-writer" in found.verdict
    assert states(found) | {"upload": "ok", "download": "ok"} == {
        "conditional writes": "failed",
        "replacing what is gone": "warning",
        "read after write": "ok",
        "ranges": "ok",
        "listing": "ok",
        "multipart uploads": "warning",
        "Content-MD5": "ok",
        "CRC32": "warning",
        "clock": "ok",
        "upload": "ok",
        "download": "ok",
    }
    assert await left_behind(url) == []


async def test_a_local_directory_is_safe(tmp_path: Path) -> None:
    found = await examined(f"file://{tmp_path}/store")
    assert (found.kind, found.safe) == ("full", True)
    assert await left_behind(f"file://{tmp_path}/store") == []


async def test_a_directory_that_cannot_be_made_is_named() -> None:
    with pytest.raises(StoreRefused, match=r"the store's directory /proc/x cannot be made or written, No such file"):
        await examined("file:///proc/x")


# ---- a real server that lost something


@pytest_asyncio.fixture
async def worsened(ministack: object, s3_store_url: Callable[[str], str]) -> AsyncIterator[Callable[[Mode], str]]:
    """``worsened(mode)``: the URL of an empty place on MiniStack that only shows what ``mode`` leaves of it."""
    address = urlsplit(ministack.endpoint_url)  # type: ignore[attr-defined]
    async with proxied((str(address.hostname), int(address.port or 0))) as (proxy, port):

        def url(mode: Mode) -> str:
            proxy.mode = mode
            return s3_store_url("ministack").replace(f"{address.hostname}:{address.port}", f"127.0.0.1:{port}")

        yield url


@pytest.mark.parametrize(
    ("mode", "kind", "begins", "single"),
    [
        (ignoring, "ignored", "not safe", True),
        (create_only, "create-only", "not safe", True),
        (replace_refused, "create-only", "unusable", False),
        (refusing, "refused", "unusable", False),
        (unquoted, "unquoted-etag", "unusable", False),
        (racy, "racy", "not safe", True),
        (racy_replacing, "racy", "not safe", True),
    ],
)
async def test_each_kind_is_told_and_refused(
    mode: Mode, kind: str, begins: str, single: bool, worsened: Callable[[Mode], str]
) -> None:
    url = worsened(mode)
    found = await examined(url)
    assert (found.kind, found.safe) == (kind, False)
    assert found.verdict.startswith(begins)
    assert ("--single-writer" in found.verdict) == single
    assert await left_behind(url) == []
    store = open_store(url)
    try:
        with pytest.raises(StoreRefused, match="weightcast doctor") as refused:
            await require_conditional_writes(store, "0" * 16)
        assert ("--single-writer" in str(refused.value)) == single
        assert await left_behind(url) == []
    finally:
        await store.close()


async def test_a_store_without_ranges_is_unusable(worsened: Callable[[Mode], str]) -> None:
    found = await examined(worsened(without_ranges))
    assert (found.kind, found.safe) == ("full", False)
    assert states(found)["ranges"] == "failed"
    assert found.verdict.startswith("unusable: ranges")


@pytest.mark.parametrize(("start", "end"), [(5 * MIB, 6 * MIB), (11 * MIB - 1, 11 * MIB)])
async def test_damage_anywhere_in_what_was_uploaded_in_parts_is_found(
    start: int, end: int, worsened: Callable[[Mode], str]
) -> None:
    found = await examined(worsened(zeroed(start, end)))
    assert (found.kind, found.safe) == ("full", False)
    assert states(found)["multipart uploads"] == "failed"
    assert "does not read back the same" in next(c.sentence for c in found.checks if c.name == "multipart uploads")


class Cutting(MemoryStore):
    """Keeps more or less of what is uploaded in parts than it was given."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        blob = await self.get(key, max_bytes=1 << 30)
        data = blob.data + bytes(self.more) if self.more > 0 else blob.data[: len(blob.data) + self.more]
        if offset + len(buffer) > len(data):
            raise FormatError(f"object {key} ends at byte {len(data)}")
        buffer[:] = data[offset : offset + len(buffer)]


@pytest.mark.parametrize(("more", "intact"), [(0, True), (1, False), (-1, False)])
async def test_a_byte_too_many_or_too_few_is_found(more: int, intact: bool) -> None:
    multipart, _, _ = await observe_multipart(Cutting(more), "_doctor/x", 11 * MIB, lambda: 0.0)
    assert multipart.intact == intact


async def test_a_second_upload_that_is_refused_leaves_the_first_as_it_was() -> None:
    class Overwriting(MemoryStore):
        async def create(self, key: str, data: bytes) -> str:
            try:
                return await super().create(key, data)
            except PreconditionFailed:
                await self.replace(key, data, etag=(await self.get(key, max_bytes=len(data))).etag)
                raise

    multipart, _, _ = await observe_multipart(Overwriting(), "_doctor/x", 11 * MIB, lambda: 0.0)
    assert (multipart.completed, multipart.again, multipart.intact) == (True, "precondition", False)


async def test_a_store_that_is_busy_has_checked_nothing(worsened: Callable[[Mode], str]) -> None:
    # MiniStack believes a wrong CRC32, whatever it was busy with when it was first asked.
    found = await examined(worsened(throttling(b"x-amz-checksum-crc32", 1)))
    assert (found.kind, states(found)["CRC32"]) == ("full", "warning")
    for header in (b"x-amz-checksum-crc32", b"content-md5"):
        url = worsened(throttling(header, math.inf))
        with pytest.raises(StoreThrottled, match="fewer requests"):
            await observe_plain(parse_s3_url(url), S3Options(), "_doctor/x", policy=ONCE)


async def test_a_store_that_refuses_right_checksums_has_not_shown_that_it_checks(
    worsened: Callable[[Mode], str],
) -> None:
    async def choking(line: bytes, headers: dict[bytes, bytes], body: bytes, forward: Any) -> bytes:
        return (
            answer(403, "SignatureDoesNotMatch")
            if b"x-amz-checksum-crc32" in headers
            else await forward(line, headers, body)
        )

    assert "CRC32" not in states(await examined(worsened(choking)))


async def test_a_cache_in_between_is_found(worsened: Callable[[Mode], str]) -> None:
    found = await examined(worsened(Remembering()))
    assert not found.safe
    assert states(found)["read after write"] == "failed"


# ---- the quick version


@pytest.mark.parametrize("server", ["seaweed", "ministack"])
async def test_good_servers_pass_the_quick_version(server: str, s3_store_url: Callable[[str], str]) -> None:
    store = open_store(s3_store_url(server))
    try:
        await require_conditional_writes(store, "1" * 16)
        assert [entry.key async for entry in store.list("")] == []
    finally:
        await store.close()


async def test_our_own_stores_pass_the_quick_version(tmp_path: Path) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path / "store")):
        await require_conditional_writes(store, "1" * 16)
        assert [entry.key async for entry in store.list("")] == []


async def test_a_store_that_does_not_answer_proves_nothing(aws_environment: None) -> None:
    store = open_store("s3://bucket/p?endpoint=http://127.0.0.1:9&region=us-east-1", policy=ONCE)
    try:
        with pytest.raises(StoreUnavailable):
            await require_conditional_writes(store, "1" * 16)
    finally:
        await store.close()


# ---- the command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "weightcast",
        "doctor",
        "--rounds",
        "2",
        "--writers",
        "3",
        "--size",
        "11",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_ends_with_0_only_on_a_safe_store(tmp_path: Path) -> None:
    found = run("--store", f"file://{tmp_path}/store")
    assert (found.returncode, found.stdout.splitlines()[-1].startswith("full: safe")) == (0, True), found.stderr


async def test_the_command_speaks_json(worsened: Callable[[Mode], str]) -> None:
    found = await asyncio.to_thread(run, "--store", worsened(ignoring), "--json")
    assert found.returncode == 1
    said = json.loads(found.stdout)
    assert (said["kind"], said["safe"], said["observations"]["conditional"]["create_again"]) == (
        "ignored",
        False,
        "done",
    )
    assert found.stderr == ""


def test_the_command_says_what_is_wrong_with_the_keys(
    s3_store_url: Callable[[str], str], read_only_keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3_store_url("seaweed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", read_only_keys[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", read_only_keys[1])
    found = run("--store", url)
    assert found.returncode == 1
    assert "access to bucket" in found.stderr
    assert "Traceback" not in found.stderr
