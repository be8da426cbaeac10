"""A sidecar takes its part of the weights twice, in memory that it shares with the trainer, and 256 MiB of its own."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_agent import Publisher

MIB = 2**20
SHARD_BYTES = 256 * MIB


def resident(pid: int) -> tuple[int, int]:
    """Bytes of its own and of shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    own, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return own, shared


def test_neither_a_full_nor_a_delta_takes_a_third_copy_of_the_shard(service: Any, shm_dir: Path) -> None:
    if shutil.disk_usage(shm_dir).free < 3 * SHARD_BYTES:
        pytest.skip("/dev/shm is too small here")
    block = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    state = {f"model.layers.{number}.w": block.roll(number, 0) for number in range(SHARD_BYTES // (32 * MIB))}
    peak, ended = [0, 0], threading.Event()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        handle = publisher.publish(state, 0)
        pid = publisher.sidecar_pid
        assert pid is not None

        def sample() -> None:
            while not ended.wait(0.001):
                peak[:] = map(max, peak, resident(pid))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            assert handle.sealed(60) == 1
            for tensor in state.values():
                tensor.view(torch.int16)[::61] ^= 1
            assert publisher.publish(state, 1).sealed(60) == 2
        finally:
            ended.set()
            thread.join()
    own_bytes, shared_bytes = peak
    assert own_bytes <= 256 * MIB
    assert 2 * SHARD_BYTES <= shared_bytes <= 2 * SHARD_BYTES + MIB
