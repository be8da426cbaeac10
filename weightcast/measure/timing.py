"""CPU seconds of a call, the best of several: other processes can only make it slower."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

State = TypeVar("State")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a call is repeated: at least ``least`` times, then until ``cpu_s`` are spent or ``most`` is reached."""

    least: int = 3
    most: int = 30
    cpu_s: float = 0.4


@dataclass(frozen=True, slots=True)
class Timed(Generic[Result]):
    """The shortest time, in CPU seconds of all threads, and the best result."""

    cpu_s: float
    result: Result


def best_of(
    run: Callable[[State], Result],
    prepare: Callable[[], State],
    better: Callable[[Result, Result], bool],
    budget: Budget,
    clock: Callable[[], float] = time.process_time,
) -> Timed[Result]:
    """Call ``run`` on a fresh ``prepare()`` again and again; the clock runs during ``run`` alone.

    Keeps the first result, and then each that is ``better(candidate, kept)``.
    """
    spent = 0.0
    best_s = float("inf")
    kept: list[Result] = []
    for count in range(budget.most):
        if count >= budget.least and spent >= budget.cpu_s:
            break
        state = prepare()
        start = clock()
        result = run(state)
        took = clock() - start
        spent += took
        best_s = min(best_s, took)
        if not kept or better(result, kept[0]):
            kept[:] = [result]
    return Timed(best_s, kept[0])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: its others spin while they wait, which counts as CPU time and slows small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
