"""What the codec's tests share: drawn pairs of tensors, as raw bits, and programs around the kernels."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from codec.dtypes import BY_NAME, DTYPES

# No deadline, because a test never asserts a time. Profiles are global; nothing in this one is about the codec.
settings.register_profile("weightcast", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weightcast")


@dataclass(frozen=True)
class Pair:
    """A base and what follows it: raw bits of ``dtype``."""

    dtype: str
    base: np.ndarray[Any, Any]
    new: np.ndarray[Any, Any]


@st.composite
def _pairs(draw: st.DrawFn, names: tuple[str, ...] = tuple(d.name for d in DTYPES), max_n: int = 300) -> Pair:
    """Any bits whatever, so NaN payloads, infinities, -0 and subnormals too; changes from none to all elements."""
    info = BY_NAME[draw(st.sampled_from(names))]
    n = draw(st.integers(0, max_n))
    top = 2 ** (8 * info.item_bytes) - 1
    edge = 1 << info.mantissa_bits
    element = st.one_of(
        st.integers(0, top),
        st.sampled_from([0, 1, top, top // 2, top // 2 + 1, edge, max(edge - 1, 0), edge | top // 2 + 1]),
    )
    fill = draw(element)
    base = draw(hnp.arrays(info.bits, n, elements=element, fill=st.just(fill)))
    kind = draw(st.sampled_from(["same", "steps", "sparse", "dense"]))
    if kind == "dense":
        return Pair(info.name, base, draw(hnp.arrays(info.bits, n, elements=element)))
    new = base.copy()
    if kind != "same" and n:
        where = np.array(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
        step = st.sampled_from([1, 2, 3, edge, top, top - 1, top // 2 + 1]) if kind == "steps" else st.integers(1, top)
        new[where] += np.array([draw(step) for _ in where], dtype=info.bits)
    return Pair(info.name, base, new)


def _build(folder: Path, *compiler: str, **environment: str) -> Path:
    script = Path(__file__).parent / "native" / "build_hostile.sh"
    more = {"PROGRAMS": "hostile kernels"} | environment
    subprocess.run([script, folder, *compiler], env=os.environ | more, check=True, timeout=280)
    return folder


@pytest.fixture(scope="session")
def native_programs() -> Callable[..., Path]:
    """``native_programs(folder, *compiler, **environment)`` builds programs of ``native/`` into the folder."""
    return _build


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all programs, for this processor and under AddressSanitizer and UBSan."""
    return _build(tmp_path_factory.mktemp("sanitized"), PROGRAMS="hostile kernels fuzz_ulp")


@pytest.fixture(scope="session")
def pairs() -> Any:
    """The strategy of :class:`Pair`: ``data.draw(pairs())``; ``names`` restricts the dtypes, ``max_n`` the size."""
    return _pairs


@pytest.fixture(scope="session")
def bf16_pair() -> Pair:
    """Large enough for every method to pay: 4,000 weights, 60 of them changed, in every kind of way."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, 4000).astype(np.float32)
    base = (weights.view(np.uint32) >> 16).astype(np.uint16)
    new = base.copy()
    where = rng.choice(4000, 60, replace=False)
    new[where[:40]] += 1
    new[where[40:50]] -= 3
    new[where[50:]] ^= 0x8000
    return Pair("BF16", base, new)
