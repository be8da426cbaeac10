"""On real S3 servers: objects, and the parts of uploads whose writer died."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
import pytest_asyncio

from tests.gc.conftest import RUN, Bucket
from weight_store.gc import Collector, Wish
from weight_store.keys import control_key, shard_key
from weight_store.local import LocalStore
from weight_store.opening import open_store, parse_s3_url
from weight_store.retry import RetryingStore
from weight_store.store import MultipartStore, Store


@pytest_asyncio.fixture(params=["seaweed", "ministack"])
async def on_server(
    request: pytest.FixtureRequest, tmp_path: Path, make_bucket: Callable[[Store], Bucket]
) -> AsyncIterator[tuple[Bucket, str]]:
    prefix = f"gc-{tmp_path.name}"
    if request.param == "seaweed":
        url = request.getfixturevalue("s3_url")("collected", prefix)
    else:
        url = request.getfixturevalue("ministack").url("collected", prefix)
    store: RetryingStore = open_store(url)
    yield make_bucket(store), url
    await store.close()


def begin_upload(url: str, key: str) -> None:
    """Send one part and vanish."""
    location = parse_s3_url(url)
    client: Any = boto3.client("s3", endpoint_url=location.endpoint_url, region_name="us-east-1")
    address = {"Bucket": location.bucket, "Key": location.full_key(key)}
    upload = client.create_multipart_upload(**address)["UploadId"]
    client.upload_part(**address, UploadId=upload, PartNumber=1, Body=b"x" * 100)
    client.close()


async def test_versions_attempts_and_unfinished_uploads_go(on_server: tuple[Bucket, str]) -> None:
    bucket, url = on_server
    await bucket.publish(4)
    await bucket.training.extra_full(4)
    await bucket.publish(2)
    aborted = await bucket.open(7)
    await bucket.abort(aborted)
    await bucket.shard(7)
    await bucket.shard(6, rank=1)
    begun = {number: shard_key(RUN, number, 0, "d" * 16) for number in (1, 6, 7, 8)}
    for key in begun.values():
        begin_upload(url, key)
    begin_upload(url, shard_key("tiny-2", 1, 0, "d" * 16))
    store = bucket.store
    assert isinstance(store, MultipartStore)

    report = await Collector(store, RUN, min_age_s=0.0).collect(Wish(keep_versions=2))
    assert report.floor.after == 4
    assert report.floor.limited_by == "the newest full is version 4"
    assert await bucket.versions() == {4, 5, 6, 7}
    assert {key.rpartition("/")[2] for key in await bucket.keys(f"{RUN}/v/000000000007/")} == {
        "open.json",
        "manifest.json",
    }
    # Version 8 may be on its way, and the other run is not ours to touch.
    left = {upload.key async for upload in store.list_uploads("")}
    assert {key for key in left if key.startswith("tiny")} == {begun[8], shard_key("tiny-2", 1, 0, "d" * 16)}
    await bucket.check_reachable(floor=4)


# ---- the command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightcast", "gc", "--run", RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest_asyncio.fixture
async def url(tmp_path: Path, make_bucket: Callable[[Store], Bucket]) -> str:
    bucket = make_bucket(LocalStore(tmp_path / "store"))
    await bucket.publish(4)
    await bucket.training.extra_full(4)
    await bucket.publish(2)
    await bucket.shard(5, rank=1)
    return f"file://{tmp_path}/store"


def test_a_dry_run_says_what_and_why_and_changes_nothing(url: str, tmp_path: Path) -> None:
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    found = run("--store", url, "--keep-versions", "1", "--min-age", "0s", "--dry-run")
    assert found.returncode == 0, found.stderr
    assert "floor would rise to version 4" in found.stdout
    assert "no further, because the newest full is version 4" in found.stdout
    assert "below the floor 4" in found.stdout
    assert "the receipt of rank 1 names shard" in found.stdout
    said = json.loads(run("--store", url, "--keep-versions", "1", "--min-age", "0s", "--dry-run", "--json").stdout)
    assert said["dry_run"] is True
    assert not [name for name in said if name.startswith("deleted")]
    assert sum(item["bytes"] for item in said["would_delete"]) == said["would_delete_bytes"] > 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_the_command_deletes_and_says_so_in_json(url: str, tmp_path: Path) -> None:
    found = run("--store", url, "--floor", "3", "--min-age", "0s", "--json")
    said = json.loads(found.stdout)
    assert (said["floor"]["after"], said["head_version"], said["pending"]) == (3, 6, False)
    assert all({"key", "bytes", "why", "upload"} == set(item) for item in said["deleted"])
    assert said["deleted_bytes"] > 0
    kept = {path.name for path in (tmp_path / "store" / RUN / "v").iterdir() if any(path.iterdir())}
    assert kept == {f"{version:012d}" for version in (3, 4, 5, 6)}
    assert (tmp_path / "store" / control_key(RUN)).exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--floor", "1", "--keep-versions", "2"), "not both"),
        (("--min-age", "soon"), "not a time"),
        (("--run", "nobody"), "no object nobody/head.json"),
        (("--run", "../x"), "is not a run name"),
    ],
)
def test_bad_input_gets_a_sentence(url: str, arguments: tuple[str, ...], sentence: str) -> None:
    found = run("--store", url, *arguments)
    assert found.returncode != 0
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr
