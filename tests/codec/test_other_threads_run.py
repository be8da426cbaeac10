"""Promise: while a kernel works on much data, other Python threads run: every heavy loop releases the GIL."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from codec import _native, kernels, ulp

N = 1 << 22
BASE = np.random.default_rng(0).integers(0, 1 << 16, N, dtype=np.uint16)
NEW = BASE + (np.arange(N) % 97 == 0).astype(np.uint16)
BODY = ulp.encode_counted(BASE, NEW, "BF16").body
INDEX = np.arange(0, N, 2, dtype=np.uint32)
BITS = NEW[: INDEX.size]
BUFFER = BASE.copy()
DIGESTS = _native.Digests(base=True, result=True)

# Nothing here but the kernel may release the GIL, as numpy does where it copies.
CALLS: dict[str, Callable[[], object]] = {
    "ulp_encode": lambda: ulp.encode_counted(BASE, NEW, "BF16"),
    "ulp_decode": lambda: ulp.decode(BASE, BODY, "BF16", N),
    "count_changed": lambda: kernels.count_changed(BASE, NEW),
    "scatter": lambda: kernels.scatter(BUFFER, INDEX, BITS),
    "Digests.add": lambda: kernels.hash_both(DIGESTS, BASE, NEW),
    "Digests.add_patched": lambda: kernels.hash_patched(DIGESTS, BASE, INDEX, BITS),
}


@pytest.fixture
def lets_others_run() -> Iterator[Callable[..., bool]]:
    """``lets_others_run(call, times=1000)``: whether another thread ran Python during one of many calls.

    Nobody is asked to give up the GIL here: it passes on only where its holder releases it. So a call that keeps it
    can never be seen to let others run, however long it takes; and one that releases it is seen as soon as the system
    wakes the other thread in time, which one of a thousand calls will meet on the busiest machine.
    """
    ticks = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.0005):
            ticks += 1

    def meter(call: Callable[[], object], times: int = 1000) -> bool:
        for _ in range(times):
            before = ticks
            call()
            if ticks != before:
                return True
            ended.wait(0.0005)  # the other thread must not wait for the GIL all the time
        return False

    usual = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    other = threading.Thread(target=tick)
    other.start()
    try:
        yield meter
    finally:
        ended.set()
        other.join()
        sys.setswitchinterval(usual)


@pytest.mark.parametrize("kernel", CALLS)
def test_kernels_release_the_gil(kernel: str, lets_others_run: Callable[..., bool]) -> None:
    assert lets_others_run(CALLS[kernel])


def test_a_call_that_keeps_the_gil_is_noticed(lets_others_run: Callable[..., bool]) -> None:
    numbers = range(100_000)
    assert not lets_others_run(lambda: sum(numbers), times=100)


def test_every_kernel_is_here() -> None:
    short = {"ulp_changes", "Digests.base", "Digests.result"}  # read a header, finish a digest
    native = {name for name in dir(_native) if not name.startswith("_") and callable(getattr(_native, name))}
    methods = {f"Digests.{name}" for name in dir(_native.Digests) if not name.startswith("_")}
    assert native - {"Digests"} | methods == CALLS.keys() | short
