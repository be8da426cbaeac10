"""What processes hold, measured from /proc again and again, and which of it grows without levelling off."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ALLOWED: Mapping[str, float] = {
    "memory_mb": 6.0,
    "shared_mb": 4.0,
    "files": 8,
    "threads": 4,
    "maps": 40,
    "children": 2,
    "entries": 20,
    "bytes_mb": 3.0,
    "objects": 60,
    "uploads": 4,
}
"""How much more of each the last fifth of a series may have, in the median, than the second. Heaps fragment, pools of
connections and threads fill up; descriptors and maps that are left open are one or more for each version or link."""
MEASURED_N = 30
"""Samples below which nothing is said of a series."""
_STILL = 0.1
"""Of the allowance: what grows by less from the fourth fifth to the last has levelled off. Something that grows at the
same pace all the time and has used up its allowance grows by a third of it."""


class Holding:
    """Series of numbers by whose they are and what they count."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], list[float]] = {}

    def add(self, whose: str, amounts: Mapping[str, float]) -> None:
        """One more sample."""
        for what, amount in amounts.items():
            self.series.setdefault((whose, what), []).append(amount)

    def add_process(self, whose: str, pid: int) -> None:
        """The same of a process; of one that ends meanwhile nothing."""
        with contextlib.suppress(OSError, KeyError):
            self.add(f"{whose} {pid}", process(pid))

    def grown(self) -> Iterator[str]:
        """One line for each series that grows and does not level off."""
        for (whose, what), values in sorted(self.series.items()):
            if len(values) >= MEASURED_N and grows(values, ALLOWED[what]):
                yield f"{whose}: {what} grow, by fifths of {len(values)} samples {fifths(values)}"

    def told(self) -> Iterator[str]:
        """One line for each series that is long enough to say something."""
        for (whose, what), values in sorted(self.series.items()):
            if len(values) >= MEASURED_N:
                yield f"{whose}: {what} {fifths(values)}, at most {max(values):.4g}"


def fifths(values: Sequence[float]) -> list[float]:
    """Medians of the five fifths of a series."""
    cuts = [len(values) * part // 5 for part in range(6)]
    return [round(statistics.median(values[cuts[part] : cuts[part + 1]]), 1) for part in range(5)]


def grows(values: Sequence[float], allowed: float) -> bool:
    """Whether a series has grown by more than is allowed since its second fifth, and does so still."""
    _, early, _, late, last = fifths(values)
    return last - early > allowed and last - late > allowed * _STILL


def process(pid: int) -> dict[str, float]:
    """What a process holds: memory of its own and shared (MB), open files, threads, maps, children."""
    proc = Path(f"/proc/{pid}")
    lines = (proc / "status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {
        "memory_mb": int(status["RssAnon"].split()[0]) / 1024,
        "shared_mb": int(status["RssShmem"].split()[0]) / 1024,
        "files": len(os.listdir(proc / "fd")),
        "threads": int(status["Threads"]),
        "maps": (proc / "maps").read_text().count("\n"),
        "children": len(children(pid)),
    }


def directory(path: Path) -> dict[str, float]:
    """How many entries a directory has, and how large all files in it are (MB)."""
    entries, size = 0, 0
    for entry in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            entries, size = entries + 1, size + entry.lstat().st_size
    return {"entries": entries, "bytes_mb": size / 1e6}


def children(parent: int) -> list[int]:
    """Process ids of those that ``parent`` started and has not reaped."""
    with contextlib.suppress(OSError):
        found = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
        return [int(word) for text in found for word in text.split()]
    return []
