"""A rank that can never send its shard tells so, and why; what is only late or away for a while is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import boto3
import pytest
import torch

from coordinator.client import CoordinatorClient
from coordinator.wire import VersionAnswer
from tests.weight_store.standins import Forward, Headers, answer, proxied
from trainer_agent import desk
from trainer_agent.errors import PiecesChanged, PublicationFailed, VersionAborted
from weight_store.keys import manifest_key
from weight_store.opening import open_store
from weight_store.records import MAX_RECORD_BYTES
from weight_store.version import Abort

EXPIRE_AFTER_S = 3600.0
"""Longer than any test runs: whatever is given up here was given up by a rank."""
BUCKET = "withdrawn"


def halves(seed: int, nbytes: int = 100_000) -> list[dict[str, torch.Tensor]]:
    """What two ranks publish: one tensor each, of bits that no codec makes smaller, the second rank's the larger."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (1000, nbytes)
    return [
        {f"w{rank}": torch.randint(0, 256, (sizes[rank],), dtype=torch.uint8, generator=generator)} for rank in (0, 1)
    ]


async def versions(url: str) -> list[VersionAnswer]:
    async with CoordinatorClient(url) as client:
        return await client.versions("r")


def found(service) -> list[str]:
    return [version.state for version in asyncio.run(versions(service.url))]


def publish(ranks, step: int, **sizes: int) -> list:
    weights = halves(step, **sizes)
    return ranks.together(lambda publisher, rank: publisher.publish(weights[rank], step))


def ended(handles: list) -> list:
    """The version of each rank's handle, or its error."""

    def end(handle) -> object:
        try:
            return handle.sealed(60)
        except PublicationFailed as error:
            return error

    return [end(handle) for handle in handles]


def second_is_opened(service) -> None:
    """Return once the second version is: by who publishes it, before the others go on."""
    while found(service) != ["undecided", "sealed"]:
        time.sleep(0.02)


@pytest.fixture
def bucket(s3_url) -> Iterator[Callable[[bool], str]]:
    """``bucket(refuses)``: the store's URL, after its policy was set to refuse the shards of rank 1, or nothing."""
    prefix = secrets.token_hex(4)
    url = s3_url(BUCKET, prefix)
    client = boto3.client("s3", endpoint_url=url.partition("endpoint=")[2].partition("&")[0], region_name="us-east-1")

    def set_policy(refuses: bool) -> str:
        deny = {
            "Effect": "Deny",
            "Principal": "*",
            "Action": ["s3:PutObject"],
            "Resource": f"arn:aws:s3:::{BUCKET}/{prefix}/{'r/v/*/00001-' if refuses else 'nothing'}*",
        }
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
        return url

    yield set_policy
    client.close()


def endpoint_of(url: str) -> tuple[str, int]:
    endpoint = urlsplit(url.partition("endpoint=")[2].partition("&")[0])
    return str(endpoint.hostname), int(endpoint.port or 0)


def test_a_policy_that_refuses_one_rank(make_service, bucket, launch_ranks, check_same) -> None:
    service = make_service(bucket(False), expire_after_s=EXPIRE_AFTER_S)
    ranks = launch_ranks(service, 2)
    assert ended(publish(ranks, 0)) == [1, 1]
    bucket(True)
    for step, version in ((1, 2), (2, 3)):
        other, refused = ended(publish(ranks, step))
        assert type(refused) is PublicationFailed
        assert "access to bucket 'withdrawn'" in str(refused)
        assert isinstance(other, VersionAborted)
        assert f"version {version} was given up: withdrawn: rank 1 cannot send its shard" in str(other)
        assert "store-refused: access to bucket 'withdrawn'" in str(other)
        assert "is denied" in str(other)
    bucket(False)
    assert ended(publish(ranks, 3)) == [4, 4]
    assert found(service) == ["sealed", "aborted", "aborted", "sealed"]
    check_same(service.read("r").state(), halves(3)[0] | halves(3)[1])


def test_a_disk_that_is_full_for_one_rank(make_service, small_tmpfs, launch_ranks, check_same) -> None:
    small_disk = small_tmpfs("12m")
    service = make_service(f"file://{small_disk}", expire_after_s=EXPIRE_AFTER_S)
    ranks = launch_ranks(service, 2)
    assert ended(publish(ranks, 0, nbytes=8_000_000)) == [1, 1]
    other, full = ended(publish(ranks, 1, nbytes=8_000_000))
    assert type(full) is PublicationFailed
    assert "No space left on device: free space" in str(full)
    assert "withdrawn: rank 1 cannot send its shard of version 2 (step 1): store-unwritable:" in str(other)
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    assert ended(publish(ranks, 2, nbytes=8_000_000)) == [3, 3]
    weights = halves(2, nbytes=8_000_000)
    check_same(service.read("r").state(), weights[0] | weights[1])


def test_a_full_shared_memory_stops_no_publication(make_service, small_tmpfs, launch_ranks, check_same) -> None:
    """What the sidecar would keep there makes its restart quicker, and nothing else."""
    service = make_service(expire_after_s=EXPIRE_AFTER_S)
    small_disk = small_tmpfs("20m")
    (publisher,) = launch_ranks(service, 1, shm_dir=small_disk).publishers
    assert publisher.publish(halves(0)[1], 0).sealed(60) == 1
    with (small_disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * (1 << 20))
    assert os.statvfs(small_disk).f_bavail == 0
    for step in (1, 2, 3):
        if step == 3:
            os.kill(publisher.sidecar_pid, signal.SIGKILL)
        assert publisher.publish(halves(step)[1], step).sealed(60) == step + 1
    check_same(service.read("r").state(), halves(3)[1])


class Ending:
    """An S3 server's front that ends the coordinator when rank 1 begins to send its shard."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self.armed = False

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        if self.armed and b"/00001-" in line and b".shard" in line:
            self.armed = False
            await asyncio.to_thread(self._end)
        return await forward(line, headers, body)


async def test_without_a_coordinator_it_is_said_in_the_bucket(make_service, bucket, launch_ranks) -> None:
    url = bucket(False)
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    host, port = endpoint_of(url)
    store = open_store(url)
    async with proxied((host, port)) as (proxy, front):
        ending = proxy.mode = Ending(service.stop)
        ranks = await asyncio.to_thread(launch_ranks, service, 2, store=url.replace(f":{port}", f":{front}"))
        handles = await asyncio.to_thread(publish, ranks, 0)
        assert await asyncio.to_thread(ended, handles) == [1, 1]
        await asyncio.to_thread(bucket, True)
        ending.armed = True
        handles = await asyncio.to_thread(publish, ranks, 1)
        (refused,) = await asyncio.to_thread(ended, handles[1:])
        assert "is denied" in str(refused)
        stored = await store.get(manifest_key("r", 2), max_bytes=MAX_RECORD_BYTES)
        abort = Abort.parse(stored.data)
        assert (abort.reason, abort.missing) == ("withdrawn", (1,))
        assert not handles[0].done, "nobody tells rank 0 while the coordinator is away"
        await asyncio.to_thread(bucket, False)
        await asyncio.to_thread(service.start)
        (other,) = await asyncio.to_thread(ended, handles[:1])
        assert abort.detail in str(other)
        handles = await asyncio.to_thread(publish, ranks, 2)
        assert await asyncio.to_thread(ended, handles) == [3, 3]
        for publisher in ranks.publishers:
            await asyncio.to_thread(publisher.close)
    await store.close()


class Failing:
    """An S3 server's front that is not well for a while, in ways that pass."""

    def __init__(self) -> None:
        # More than the retries of one upload.
        self.answers = [answer(500, "InternalError"), answer(400, "RequestTimeout")] * 5

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        if line.startswith(b"PUT ") and b"/00001-" in line and b".shard" in line and self.answers:
            return self.answers.pop()
        return await forward(line, headers, body)


async def test_what_passes_is_waited_for(make_service, bucket, launch_ranks) -> None:
    url = bucket(False)
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    host, port = endpoint_of(url)
    async with proxied((host, port)) as (proxy, front):
        failing = proxy.mode = Failing()
        ranks = await asyncio.to_thread(launch_ranks, service, 2, store=url.replace(f":{port}", f":{front}"))
        handles = await asyncio.to_thread(publish, ranks, 0)
        assert await asyncio.to_thread(ended, handles) == [1, 1]
        assert not failing.answers
        assert [version.state for version in await versions(service.url)] == ["sealed"]
        for publisher in ranks.publishers:
            await asyncio.to_thread(publisher.close)


def test_a_step_that_one_rank_left_out_holds_up_nobody(make_service, launch_ranks) -> None:
    service = make_service(expire_after_s=EXPIRE_AFTER_S)
    ranks = launch_ranks(service, 2)
    assert ended(publish(ranks, 0)) == [1, 1]
    weights = halves(1)
    left_out = ranks.publishers[1].publish({"other": weights[1]["w1"]}, 1)
    assert isinstance(left_out.error, PiecesChanged)
    waiting = ranks.publishers[0].publish(weights[0], 1)
    second_is_opened(service)
    assert ended(publish(ranks, 2)) == [3, 3]
    assert "withdrawn: rank 1 cannot send its shard of version 2 (step 1)" in str(waiting.error)
    assert "it gave step 1 up and has gone on to step 2" in str(waiting.error)


def test_ranks_that_left_out_different_steps_find_together_again(make_service, launch_ranks, monkeypatch) -> None:
    """However long a step of training takes: by then what was left out is undecided for longer than is waited."""
    service = make_service(expire_after_s=EXPIRE_AFTER_S)
    ranks = launch_ranks(service, 2, max_wait_s=30.0)
    assert ended(publish(ranks, 0)) == [1, 1]
    weights = halves(1)
    assert isinstance(ranks.publishers[1].publish({"other": weights[1]["w1"]}, 1).error, PiecesChanged)
    left_alone = ranks.publishers[0].publish(weights[0], 1)
    second_is_opened(service)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
    monkeypatch.setattr(desk, "time", later)
    assert ended(publish(ranks, 2)) == [3, 3]
    assert isinstance(left_alone.error, VersionAborted)


def test_they_do_however_short_training_waits(make_service, launch_ranks) -> None:
    """What each published alone is given up by the other sooner or later, but never before it leaves out the next."""
    service = make_service(expire_after_s=EXPIRE_AFTER_S)
    ranks = launch_ranks(service, 2, max_wait_s=0.0)
    assert ended(publish(ranks, 0)) == [1, 1]
    weights = halves(1)
    assert isinstance(ranks.publishers[1].publish({"other": weights[1]["w1"]}, 1).error, PiecesChanged)
    ranks.publishers[0].publish(weights[0], 1)
    for step in range(2, 42):
        handles = publish(ranks, step)
        if all(handle.error is None for handle in handles):
            break
        time.sleep(0.2)  # a step of training
    assert len(set(ended(handles))) == 1
    assert found(service)[0] == "sealed"


def test_a_step_that_the_others_left_out_holds_up_nobody(make_service, launch_ranks) -> None:
    """Whoever publishes it late does not wait for the next one, which waits for the same rank."""
    service = make_service(expire_after_s=EXPIRE_AFTER_S)
    ranks = launch_ranks(service, 2)
    assert ended(publish(ranks, 0)) == [1, 1]
    weights = halves(1)
    assert isinstance(ranks.publishers[0].publish({"other": weights[0]["w0"]}, 1).error, PiecesChanged)
    ahead = ranks.publishers[0].publish(halves(2)[0], 2)
    second_is_opened(service)
    late = ranks.publishers[1].publish(weights[1], 1)
    (error,) = ended([late])
    assert "it came too late: the other ranks already publish step 2 as version 2" in str(error)
    assert ended([ahead, ranks.publishers[1].publish(halves(2)[1], 2)]) == [2, 2]
