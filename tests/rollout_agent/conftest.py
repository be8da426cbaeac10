"""Fixtures of the rollout side's tests; the miniature trainer is in training.py, the simulated disk in simdisk.py."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_agent.disk import LocalDisk
from tests.conftest import SHM_PREFIX
from tests.rollout_agent.training import Training, read_model
from weight_store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def training(store: MemoryStore) -> Training:
    return Training(store)


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory on tmpfs, as /dev/shm is everywhere."""
    path = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir="/dev/shm"))
    try:
        if not LocalDisk().is_volatile(path):
            pytest.skip("/dev/shm is no tmpfs here")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def read_dir() -> Callable[[Path], dict[str, bytes]]:
    """Every tensor in a model directory, as raw bytes."""
    return lambda path: read_model({p.name: p.read_bytes() for p in sorted(path.glob("*.safetensors"))})
