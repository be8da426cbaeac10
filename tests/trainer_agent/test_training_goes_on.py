"""Whatever ends or goes away, training is not stopped, and what was copied still becomes a version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tests.weight_store.standins import Forward, Headers, proxied
from trainer_agent import Publisher
from trainer_agent.errors import Fenced, PublicationFailed, StillUndecided, VersionAborted
from weight_store.receipt import SHARD_MAGIC


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def uploading(bucket: Path) -> bool:
    """True while a shard is being written: some of its bytes are there, and no object yet."""
    sizes: dict[Path, int] = {}
    for path in bucket.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return not any(path.suffix == ".shard" for path in sizes) and max(sizes.values(), default=0) > 1 << 20


def test_a_sidecar_killed_in_the_middle_of_uploads_is_replaced_and_the_version_seals(
    service, tmp_path, check_same
) -> None:
    state = {f"layers.{i}.w": torch.randn(2048, 1024) for i in range(16)}
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        handle = publisher.publish(state, 0)
        for _ in range(2):
            wait_until(lambda: uploading(tmp_path / "bucket") or handle.done)
            assert not handle.done
            pid = publisher.sidecar_pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: publisher.sidecar_pid not in (None, pid))
            for path in (tmp_path / "bucket").rglob("*"):  # what the dead one left is no upload of the next
                if path.is_file() and path.stat().st_size > len(SHARD_MAGIC) and path.stat().st_size > 1 << 20:
                    path.unlink()
        assert handle.sealed(60) == 1
        check_same(service.read("r").tensors, state)


def test_a_sidecar_killed_between_versions_still_has_its_base(service, make_state, moved, check_same) -> None:
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(state, 0).sealed(30)
        os.kill(publisher.sidecar_pid, signal.SIGKILL)
        state = moved(state)
        handle = publisher.publish(state, 1)
        assert handle.sealed(30) == 2
        found = service.read("r")
        check_same(found.tensors, state)
        assert len(found.receipts[0].full) < len(found.receipts[0].sizes)


def test_a_sidecar_killed_after_its_receipt_sends_nothing_twice(service, launch_ranks, tmp_path, check_same) -> None:
    ranks = launch_ranks(service, 2)
    state = [{"a": torch.ones(4)}, {"b": torch.ones(4)}]
    for handle in ranks.together(lambda p, rank: p.publish(state[rank], 0)):
        handle.sealed(30)
    state = [{name: tensor + 1 for name, tensor in part.items()} for part in state]
    first = ranks.publishers[0].publish(state[0], 1)
    directory = tmp_path / "bucket" / "r" / "v" / f"{2:012d}"
    wait_until(lambda: (directory / f"{0:05d}.json").exists())
    os.kill(ranks.publishers[0].sidecar_pid, signal.SIGKILL)
    second = ranks.publishers[1].publish(state[1], 1)
    assert first.sealed(30) == second.sealed(30) == 2
    check_same(service.read("r").tensors, state[0] | state[1])
    assert len(list(directory.glob(f"{0:05d}-*.shard"))) == 1
    state = [{name: tensor + 1 for name, tensor in part.items()} for part in state]
    for handle in ranks.together(lambda p, rank: p.publish(state[rank], 2)):
        handle.sealed(30)
    check_same(service.read("r").tensors, state[0] | state[1])


def test_a_flipped_bit_in_the_base_is_found_and_that_group_is_sent_whole(service, shm_dir, check_same) -> None:
    state = {"layers.0.w": torch.randn(64, 64), "layers.1.w": torch.randn(64, 64)}
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(state, 0).sealed(30)
        (arena,) = shm_dir.iterdir()
        with (arena / "slot0").open("r+b") as slot:
            slot.seek(100)
            byte = slot.read(1)[0]
            slot.seek(100)
            slot.write(bytes([byte ^ 16]))
        state = {name: tensor + 1e-4 for name, tensor in state.items()}
        publisher.publish(state, 1).sealed(30)
        found = service.read("r")
        check_same(found.tensors, state)
        assert found.receipts[0].full == (0,)


def test_the_coordinator_goes_away_and_comes_back(make_service, make_state, moved, check_same) -> None:
    service = make_service()
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url, max_wait_s=0.2) as publisher:
        publisher.publish(state, 0).sealed(30)
        service.stop()
        state = moved(state)
        waiting = publisher.publish(state, 1)
        assert waiting.copied
        dropped = publisher.publish(moved(state), 2)
        assert isinstance(dropped.error, StillUndecided)
        assert not waiting.done
        service.start()
        assert waiting.sealed(30) == 2
        check_same(service.read("r").tensors, state)


def test_no_coordinator_at_the_first_publication_is_an_error_on_the_handle(make_service, make_state) -> None:
    service = make_service()
    service.stop()
    with Publisher(run="r", store=service.store_url, coordinator=service.url, start_timeout_s=0.2) as publisher:
        handle = publisher.publish(make_state(), 0)
        assert handle.error is not None
        assert handle.error.code == "unreachable"
        service.start()
        wait_until(lambda: publisher.publish(make_state(), 1).error is None)


def test_a_rank_that_never_reports_costs_one_version(make_service, launch_ranks, tmp_path, check_same) -> None:
    service = make_service(expire_after_s=120)
    ranks = launch_ranks(service, 2)
    state = [{"a": torch.ones(4)}, {"b": torch.ones(4)}]
    assert [h.sealed(30) for h in ranks.together(lambda p, rank: p.publish(state[rank], 0))] == [1, 1]
    lonely = ranks.publishers[0].publish(state[0], 1)
    receipt = tmp_path / "bucket" / "r" / "v" / f"{2:012d}" / f"{0:05d}.json"
    wait_until(receipt.exists)
    # A clock that jumped before the receipt was taken note of has to jump once more.
    wait_until(lambda: lonely.done or service.pass_time(120) or time.sleep(0.2))
    with pytest.raises(VersionAborted, match="no receipt of rank 1"):
        lonely.sealed(30)
    state = [{name: tensor + 1 for name, tensor in part.items()} for part in state]
    # Rank 1 missed a publication. Its own attempt at it comes too late; then all count alike again.
    late = ranks.publishers[1].publish(state[1], 1)
    other = ranks.publishers[0].publish(state[0], 2)
    with pytest.raises(PublicationFailed):
        late.sealed(30)
    handle = ranks.publishers[1].publish(state[1], 2)
    assert handle.sealed(30) == other.sealed(30)
    found = service.read("r")
    check_same(found.tensors, state[0] | state[1])
    assert found.manifest.parent.version == 1


def test_a_newer_launch_fences_the_older_for_good(service, make_state) -> None:
    options = {"run": "r", "store": service.store_url, "coordinator": service.url}
    with Publisher(**options, launch="old") as old:
        assert old.publish(make_state(), 0).sealed(30) == 1
        with Publisher(**options, launch="new") as new:
            assert new.publish(make_state(), 0).sealed(30) == 2
            handle = old.publish(make_state(), 1)
            with pytest.raises(Fenced, match="launch new took the run over"):
                handle.sealed(30)
            assert isinstance(old.publish(make_state(), 2).error, Fenced)
            assert new.publish(make_state(), 1).sealed(30) == 3


TRAINER = """
    import sys, time, torch
    from trainer_agent import Publisher
    publisher = Publisher(run="r", store=sys.argv[1], coordinator=sys.argv[2])
    publisher.publish({"w": torch.ones(8)}, 0).sealed(60)
    print(publisher.sidecar_pid, flush=True)
    if sys.argv[3] == "wait":
        time.sleep(600)
    if sys.argv[3] == "go on":
        input()
        publisher.publish({"w": torch.zeros(8)}, 17)
"""


def start_trainer(service: object, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), service.store_url, service.url, then]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe if then == "go on" else None, text=True)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_no_sidecar_and_no_memory_outlive_a_killed_trainer(service, shm_dir) -> None:
    with start_trainer(service, "wait") as trainer:
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        assert list(shm_dir.iterdir())
        trainer.kill()
    wait_until(lambda: not is_running(pid))
    wait_until(lambda: not list(shm_dir.iterdir()))


def test_a_trainer_that_ends_without_close_leaves_nothing(service, shm_dir) -> None:
    with start_trainer(service, "end") as trainer:
        pid = int(trainer.stdout.readline())
        assert trainer.wait(60) == 0
    assert not is_running(pid)
    assert not list(shm_dir.iterdir())


def test_a_trainer_that_waits_at_its_end_says_for_what_and_ctrl_c_ends_that(service, shm_dir) -> None:
    with start_trainer(service, "go on") as trainer:
        pid = int(trainer.stdout.readline())
        service.stop()
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        said = ""
        while "Ctrl-C" not in said:
            said = trainer.stderr.readline()
            assert said
        assert "until step 17 is decided" in said
        trainer.send_signal(signal.SIGINT)
        assert "Traceback" not in trainer.stderr.read()
        assert trainer.wait(60) == 0
    assert not is_running(pid)
    assert not list(shm_dir.iterdir())


UPLOADER = """
    import sys, time, torch
    from trainer_agent import Publisher
    publisher = Publisher(run="r", store=sys.argv[1], coordinator=sys.argv[2])
    publisher.publish({"w": torch.randn(8_000_000)}, 0)
    print(publisher.sidecar_pid, flush=True)
    time.sleep(600)
"""


class Swallowing:
    """An S3 server's front that takes what belongs to a shard, and never answers."""

    def __init__(self) -> None:
        self.swallowed = asyncio.Event()
        self.over = asyncio.Event()

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        if line.startswith(b"PUT ") and b".shard" in line:
            self.swallowed.set()
            await self.over.wait()
            raise ConnectionError("whoever asked is gone")
        return await forward(line, headers, body)


async def test_a_sidecar_whose_trainer_was_killed_in_the_middle_of_an_upload_ends_at_once(
    make_service, s3_url, shm_dir
) -> None:
    url = s3_url("killed", secrets.token_hex(4))
    service = make_service(url)
    endpoint = urlsplit(url.partition("endpoint=")[2].partition("&")[0])
    async with proxied((str(endpoint.hostname), int(endpoint.port or 0))) as (proxy, port):
        swallowing = proxy.mode = Swallowing()
        command = [sys.executable, "-c", textwrap.dedent(UPLOADER), url.replace(f":{endpoint.port}", f":{port}")]
        trainer = await asyncio.create_subprocess_exec(
            *command, service.url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            pid = int(await trainer.stdout.readline())
            await asyncio.wait_for(swallowing.swallowed.wait(), 60)
        finally:
            trainer.kill()
        said = (await trainer.communicate())[1].decode()  # of the sidecar too: it ends with its process
        swallowing.over.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=30)  # the proxy's connections
    assert not is_running(pid)
    assert "is gone" in said
    assert "Unclosed" not in said
    assert "ERROR" not in said
    assert "Traceback" not in said
