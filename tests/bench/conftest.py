"""Small deltas, and checkpoints of two steps on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weightcast.measure.pairs import Pair
from weightcast.measure.timing import one_thread


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Torch's threads only wait for each other on models as small as these."""
    with one_thread():
        yield


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    """``make_pair(name, shape, changes, dtype="BF16", seed=0)``: a pair in which ``changes`` elements differ."""

    def make(name: str, shape: tuple[int, ...], changes: int, dtype: str = "BF16", seed: int = 0) -> Pair:
        random = np.random.default_rng(seed)
        bits = np.dtype({"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "I32": np.uint32}[dtype])
        count = int(np.prod(shape))
        base = random.integers(0, np.iinfo(bits).max, count, dtype=bits, endpoint=True)
        new = base.copy()
        where = random.choice(count, changes, replace=False)
        new[where] ^= random.integers(1, 1 << 12, changes).astype(bits)
        return Pair(name, dtype, shape, base, new)

    return make


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """Two safetensors files: in one BF16 tensor weights went up by 1, 1 and 3 ulps and down by 1, one stays."""
    a = torch.ones(8, 100, dtype=torch.bfloat16)
    b = torch.arange(16, dtype=torch.int64)
    changed = a.clone()
    for at, step in ((0, 1), (150, 1), (151, 3), (799, -1)):
        changed.view(torch.int16).view(-1)[at] += step
    base, new = tmp_path / "base.safetensors", tmp_path / "new.safetensors"
    save_file({"layers.0.a": a, "b": b}, base)
    save_file({"layers.0.a": changed, "b": b}, new)
    return base, new
