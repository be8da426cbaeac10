"""One process of the soak after the other in the same place: started, stopped, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.soak.holding import children

SIGNALLED = (-signal.SIGKILL, -signal.SIGTERM, 0, 128 + signal.SIGTERM)
"""Exit statuses after a signal that was sent on purpose."""
WITHOUT = "WEIGHTCAST_SOAK_WITHOUT"
"""The variable that names the mechanism to switch off in a process: see without.py."""


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


def zombies(parents: Collection[int]) -> list[int]:
    """Those of their children that have ended and were not reaped."""
    found = []
    for pid in [pid for parent in parents for pid in children(parent)]:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(pid)
    return found
