"""Starts and ends the processes of the demo. Each ends with the demo, however that ends, and leaves no file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

import httpx

from trainer_agent.arena import DEFAULT_ROOT, remove_abandoned
from weightcast.demo.errors import DemoError
from weightcast.demo.settings import RUN, JobSettings
from weightcast.devserver import SeaweedServer, ServerProcess, free_port

_BUCKET = "weightcast-demo"
_START_TIMEOUT_S = 60.0
_TRAINER_GRACE_S = 8.0
_AGENT_GRACE_S = 4.0
_POLL_S = 0.05


class Cast:
    """All processes, as a context manager: work directory and S3 server at once, the others when asked for."""

    def __init__(self, regions: Sequence[str]) -> None:
        self._regions = tuple(regions)
        self._stack = contextlib.ExitStack()
        self._processes: dict[str, ServerProcess] = {}
        self._ranks: list[ServerProcess] = []
        self._commands: dict[str, list[str]] = {}
        self._port = free_port()
        self._starts = 0
        self.work = Path()
        self.model_dirs: dict[str, Path] = {}
        self.store = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.work = _directory(stack, None)
            # Working weights belong in memory: nearly every page of them is dirty after every version.
            models = _directory(stack, DEFAULT_ROOT if DEFAULT_ROOT.is_dir() else None)
            self.model_dirs = {region: models / region for region in self._regions}
            self._start_janitor(stack, [self.work, models])
            self._server = stack.enter_context(SeaweedServer(self.work / "s3"))
            self._server.create_bucket(_BUCKET)
            self.store = f"s3://{_BUCKET}/?endpoint={quote(self._server.endpoint_url, safe=':/')}&region=us-east-1"
            stack.callback(self._end_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def coordinator(self) -> str:
        """Address of the coordinator; the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    def start_coordinator(self) -> None:
        """Start it (again) and return once it answers."""
        command = ["coordinator", "--store", self.store, "--host", "127.0.0.1", "--port", str(self._port)]
        self._start_command("coordinator", command)
        self._processes["coordinator"].wait_until(self._coordinator_answers, _START_TIMEOUT_S)

    def start_agent(self, region: str, engine: str) -> None:
        """Start the rollout agent of ``region``, which tells the engine at address ``engine``."""
        # fmt: off
        self._start_command(f"agent {region}", [
            "rollout", "--run", RUN, "--region", region, "--model-dir", str(self.model_dirs[region]),
            "--state-dir", str(self.work / f"state-{region}"), "--store", self.store,
            "--coordinator", self.coordinator, "--notify", engine,
        ])
        # fmt: on

    def restart(self, name: str) -> None:
        """Kill a process with SIGKILL and start it again with the same command line."""
        _kill(self._processes[name])
        self._start_command(name, self._commands[name])

    def start_job(self, job: JobSettings) -> None:
        """Start all ranks of the training job."""
        job.save()
        for rank in range(job.world_size):
            arguments = ["-m", "weightcast.demo.trainer", str(job.path), str(rank)]
            self._ranks.append(self._start(f"rank {rank}", arguments))

    def kill_job(self) -> None:
        """End all ranks with SIGKILL, sidecars included, and what they left in shared memory."""
        for rank in self._ranks:
            _kill(rank)
        self._ranks.clear()
        remove_abandoned(DEFAULT_ROOT)

    def kill_sidecar(self) -> int:
        """End the sidecar of one rank with SIGKILL; returns its process id. ``DemoError`` if none runs."""
        for rank in self._ranks:
            for pid in _sidecars(rank.pid):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise DemoError("no sidecar of the training job runs")

    def check(self, *, job_done: bool) -> None:
        """``DemoError`` with the end of its log if a process ended that should run."""
        watched = dict(self._processes)
        if not job_done:
            watched |= {f"rank {number}": process for number, process in enumerate(self._ranks)}
        for name, process in watched.items():
            if not process.running:
                raise DemoError(f"{name} ended early; the end of its log: {process.log_tail()}")

    def log_tails(self) -> Mapping[str, str]:
        """The end of every process's log, for a failed demo."""
        everyone = {**self._processes, **{f"rank {n}": process for n, process in enumerate(self._ranks)}}
        return {name: process.log_tail() for name, process in everyone.items()}

    def _start_command(self, name: str, arguments: list[str]) -> None:
        self._commands[name] = arguments
        self._processes[name] = self._start(name, ["-m", "weightcast", *arguments])

    def _start(self, name: str, arguments: Sequence[str]) -> ServerProcess:
        self._starts += 1
        return ServerProcess(
            [sys.executable, *arguments],
            cwd=self.work,
            log_path=self.work / f"{self._starts:03d}-{name.replace(' ', '-')}.log",
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.work),
            "TMPDIR": str(self.work),
            # The ranks are the parallelism of the demo; a pool of threads each would only make them wait.
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": _loopback(),
            **self._server.environment(),
        }

    def _coordinator_answers(self) -> bool:
        try:
            return httpx.get(f"{self.coordinator}/readyz", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def _start_janitor(self, stack: contextlib.ExitStack, directories: list[Path]) -> None:
        """Start a process whose only task is to remove the directories if this one is killed with SIGKILL."""
        janitor = ServerProcess(
            ["sleep", "1000000"],
            cwd=self.work,
            log_path=self.work / "janitor.log",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            remove_after=directories,
        )
        stack.callback(janitor.stop)

    def _end_all(self) -> None:
        """End trainers first, so that each can close its Publisher, then agents and coordinator."""
        _end(self._ranks, _TRAINER_GRACE_S)
        _end(list(self._processes.values()), _AGENT_GRACE_S)
        self._ranks.clear()
        self._processes.clear()
        remove_abandoned(DEFAULT_ROOT)


def _end(processes: Sequence[ServerProcess], grace_s: float) -> None:
    for process in processes:
        if process.running:
            os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(process.running for process in processes):
        time.sleep(_POLL_S)
    for process in processes:
        _kill(process)


def _kill(process: ServerProcess) -> None:
    """End a process, its group and, were it a rank, its sidecars, which are in groups of their own."""
    sidecars = _sidecars(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in sidecars:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.stop()


def _directory(stack: contextlib.ExitStack, parent: Path | None) -> Path:
    path = Path(tempfile.mkdtemp(prefix="weightcast-demo-", dir=parent))
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path


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
