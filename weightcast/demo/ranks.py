"""The processes of one training job: a rank each, ended together with their sidecars."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from weightcast.demo.errors import DemoError
from weightcast.demo.events import Event, EventTail
from weightcast.demo.settings import JobSettings
from weightcast.devserver import ServerProcess

_GRACE_S = 8.0
_POLL_S = 0.05


class Ranks:
    """All ranks of the start that was last asked for; none before :meth:`start`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._processes: list[ServerProcess] = []
        self._tails: list[EventTail] = []

    def start(self, job: JobSettings) -> None:
        """Start every rank of ``job``."""
        job.save()
        self._tails = [EventTail(job.events(rank)) for rank in range(job.world_size)]
        for rank in range(job.world_size):
            process = ServerProcess(
                [sys.executable, "-m", "weightcast.demo.trainer", str(job.path), str(rank)],
                cwd=job.work,
                log_path=job.work / f"rank-{job.attempt}-{rank}.log",
                env=self._environment,
            )
            self._processes.append(process)

    def events(self) -> Iterator[Event]:
        """Yield what the ranks have told since the last call."""
        for tail in self._tails:
            yield from tail.new()

    def ended(self) -> set[int]:
        """The ranks whose processes have ended; what they told before that can be read by now."""
        return {rank for rank, process in enumerate(self._processes) if not process.running}

    def check(self, finished: set[int]) -> None:
        """``DemoError`` with the end of its log if a rank has ended that is not among ``finished``."""
        for rank in sorted(self.ended() - finished):
            raise DemoError(f"rank {rank} ended early; the end of its log: {self._processes[rank].log_tail()}")

    def kill_sidecar(self) -> int:
        """End the sidecar of one rank with SIGKILL; returns its process id. ``DemoError`` if none runs."""
        for process in self._processes:
            for pid in _sidecars(process.pid):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise DemoError("no sidecar of the training job runs")

    def kill(self) -> None:
        """End all ranks with SIGKILL, sidecars included. The next start removes what they left in shared memory."""
        for process in self._processes:
            kill(process)
        self._processes.clear()

    def end(self) -> None:
        """Ask the ranks to end, so that each can close its Publisher; those that do not are killed."""
        end(self._processes, _GRACE_S)
        self.kill()

    def log_tails(self) -> dict[str, str]:
        """The end of every rank's log."""
        return {f"rank {rank}": process.log_tail() for rank, process in enumerate(self._processes)}


def environment(work: Path, credentials: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process of the demo: nothing of the user's but where programs are."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(work),
        "TMPDIR": str(work),
        # The ranks are the parallelism of the demo; a pool of threads each would only make them wait.
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": _loopback(),
        **credentials,
    }


def end(processes: Sequence[ServerProcess], grace_s: float) -> None:
    """Send SIGTERM to all, wait for all, then kill what is left."""
    for process in processes:
        if process.running:
            os.kill(process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while time.monotonic() < deadline_s and any(process.running for process in processes):
        time.sleep(_POLL_S)
    for process in processes:
        kill(process)


def kill(process: ServerProcess) -> None:
    """End a process, its group and, were it a rank, its sidecars, which are in groups of their own."""
    sidecars = _sidecars(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in sidecars:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.stop()


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"


def _sidecars(parent: int) -> list[int]:
    """Process ids of the children of ``parent`` that are sidecars (Linux; elsewhere they end by themselves)."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and b"trainer_agent.sidecar" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
