"""Fixtures of the rollout side's tests; the miniature trainer is in training.py, the simulated disk in simdisk.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rollout_agent.training import Training, read_model
from weight_store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def training(store: MemoryStore) -> Training:
    return Training(store)


@pytest.fixture
def read_dir() -> Callable[[Path], dict[str, bytes]]:
    """Every tensor in a model directory, as raw bytes."""
    return lambda path: read_model({p.name: p.read_bytes() for p in sorted(path.glob("*.safetensors"))})
