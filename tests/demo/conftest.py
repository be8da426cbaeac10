"""The demo as a person starts it, watched for what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

SHARED_MEMORY = Path("/dev/shm")


class Demo:
    """A running `weightcast demo`; everything it makes on disk is below ``directory``."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory = directory
        self._before = in_shared_memory()
        self.output = directory / "output.txt"
        temporary = directory / "tmp"
        temporary.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "TMPDIR": str(temporary), "COLUMNS": "200"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weightcast", "demo", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for_text(self, pattern: str, timeout_s: float = 200) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def wait(self, timeout_s: float = 280) -> int:
        return self.process.wait(timeout_s)

    def processes(self) -> dict[int, str]:
        """Processes that know the directory from their environment, which all of the demo's inherit."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if str(self._directory).encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def leftovers(self) -> list[str]:
        """Processes and files that are still there."""
        files = [str(path) for path in (self._directory / "tmp").iterdir()]
        return [*self.processes().values(), *files, *sorted(in_shared_memory() - self._before)]


def in_shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("weightcast-demo-*")}


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def start(*arguments: str) -> Demo:
        started.append(Demo(tmp_path, *arguments))
        return started[-1]

    yield start
    for demo in started:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A small Hugging Face directory with every awkward kind of tensor."""
    model = tmp_path / "model"
    model.mkdir()
    torch.manual_seed(0)
    first = {
        "model.embed.weight": torch.randn(101, 64, dtype=torch.float32) * 0.02,
        "model.layers.0.mlp.weight": (torch.randn(300, 257) * 0.02).bfloat16(),
        "model.layers.0.norm.weight": torch.ones(7, dtype=torch.float16),
        "model.layers.0.experts.weight": (torch.randn(5, 16, 24) * 0.02).bfloat16(),
    }
    second = {
        "model.layers.1.ids": torch.arange(11, dtype=torch.int64),
        "model.layers.1.scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "model.layers.1.narrow.weight": (torch.randn(2, 4096) * 0.02).bfloat16(),
        "model.layers.1.empty": torch.empty(0, 8, dtype=torch.bfloat16),
    }
    save_file(first, str(model / "model-00001-of-00002.safetensors"))
    save_file(second, str(model / "model-00002-of-00002.safetensors"))
    (model / "config.json").write_text('{"model_type": "llama"}')
    return model
