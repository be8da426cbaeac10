"""An agent takes the model once, in its files, and at most 256 MiB beside them, however it comes by a version."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.rollout_agent.training import Training
from weight_store.local import LocalStore

ROOT = Path(__file__).parents[2]
MIB = 2**20
SHAPE = (4096, 4096)
SPECS = tuple((f"model.layers.{n}.w", "BF16", SHAPE, "rows" if n % 2 else "cols") for n in range(8))
MODEL_BYTES = len(SPECS) * 32 * MIB


class Watch:
    """The most that a process has had of its own, and of mapped files in memory."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self.own_bytes = self.mapped_bytes = 0

    def now(self) -> tuple[int, int]:
        fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        own, mapped = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return own, mapped

    @contextmanager
    def sampling(self) -> Iterator[None]:
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            own, mapped = self.now()
            self.own_bytes, self.mapped_bytes = max(self.own_bytes, own), max(self.mapped_bytes, mapped)


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def test_neither_a_full_nor_a_delta_takes_a_second_copy_of_the_model(tmp_path: Path, memory_dir: Path) -> None:
    if shutil.disk_usage(memory_dir).free < 2 * MODEL_BYTES:
        pytest.skip("/dev/shm is too small here")
    values = np.random.default_rng(1).standard_normal(SHAPE, dtype=np.float32)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    flips = (block % 61 == 0).astype(np.uint16)
    weights = {name: np.roll(block, number, axis=0) for number, (name, *_) in enumerate(SPECS)}
    training = Training(LocalStore(tmp_path / "bucket"), specs=SPECS, weights=weights, aliases={}, assets={})
    log, up = tmp_path / "agent.log", tmp_path / "metrics"
    options = ["--model-dir", memory_dir / "model", "--state-dir", tmp_path / "state", "--poll", "0.05"]
    options += ["--run", "tiny", "--region", "eu-west", "--store", f"file://{tmp_path}/bucket", "--metrics-file", up]
    with log.open("w") as output:
        command = [sys.executable, "-m", "weightcast", "rollout", *map(str, options)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        until(up.exists, log)
        watch = Watch(process.pid)
        before_bytes, _ = watch.now()
        with watch.sampling():
            for version in (1, 2):
                asyncio.run(training.publish())
                until(lambda v=version: f"version {v} (step {v - 1}) staged" in log.read_text(), log)  # type: ignore[misc]
                training.weights = {name: bits ^ flips for name, bits in training.weights.items()}
    finally:
        process.kill()
        process.wait()
    assert watch.own_bytes - before_bytes <= 256 * MIB
    assert watch.mapped_bytes <= MODEL_BYTES + MIB
    assert watch.mapped_bytes > MODEL_BYTES / 2, "the files are in memory, and their pages count there"
