"""One process of the soak after the other in the same place: started, stopped, killed, measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SIGNALLED = (-signal.SIGKILL, -signal.SIGTERM, 0, 128 + signal.SIGTERM)
"""Exit statuses after a signal that was sent on purpose."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process held at a moment."""

    files: int
    threads: int
    rss_mb: float


@dataclass
class Place:
    """``fine``: exit statuses that need no signal."""

    name: str
    argv: Sequence[str]
    env: dict[str, str]
    log: Path
    fine: Collection[int] = ()
    asked: bool = False
    """Whether its end was asked for."""
    restart_at_s: float = 0.0
    started_s: float = 0.0
    popen: subprocess.Popen[bytes] | None = None
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    @property
    def tree(self) -> list[int]:
        """Process ids of what runs here: its children first."""
        return [*children(self.popen.pid), self.popen.pid] if self.popen is not None and self.running else []

    def start(self) -> None:
        self.started_s, self.restart_at_s, self.asked = time.monotonic(), 0.0, False
        with self.log.open("ab") as log:
            log.write(f"---- started at {self.started_s:.1f}\n".encode())
            self.popen = subprocess.Popen(
                self.argv, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, number: int) -> None:
        """Send a signal that is to end it."""
        if self.popen is not None and self.running:
            self.asked = True
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(number)
            if number == signal.SIGKILL:
                self.popen.wait()

    def signal_tree(self, number: int) -> None:
        for pid in self.tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ended(self) -> int | None:
        """The exit status, once."""
        if self.popen is None or self.popen.poll() is None:
            return None
        status, self.popen = self.popen.returncode, None
        return status

    def sample(self) -> None:
        for pid in self.tree:
            with contextlib.suppress(OSError, KeyError):  # it ends
                self.samples.setdefault(pid, []).append(_sample(pid))

    def grown(self) -> Iterator[str]:
        """One line for each process that was seen for some time: how what it holds has changed."""
        for pid, samples in self.samples.items():
            if len(samples) > 3:
                first, last = samples[2], samples[-1]
                files, threads = f"files {first.files} to {last.files}", f"threads {first.threads} to {last.threads}"
                memory = f"RSS {first.rss_mb:.0f} to {last.rss_mb:.0f} MB"
                yield f"{self.name} {pid}: {files}, {threads}, {memory} in {len(samples)} samples"


def _sample(pid: int) -> Sample:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(files, int(values["Threads"]), int(values["VmRSS"].split()[0]) / 1024)


def children(parent: int) -> list[int]:
    """Process ids of those that ``parent`` started and has not reaped."""
    with contextlib.suppress(OSError):
        found = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
        return [int(word) for text in found for word in text.split()]
    return []


def zombies(parents: Collection[int]) -> list[int]:
    """Those of their children that have ended and were not reaped."""
    found = []
    for pid in [pid for parent in parents for pid in children(parent)]:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(pid)
    return found
