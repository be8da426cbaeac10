"""Starts and ends the processes of the demo. Each ends with the demo, however that ends, and leaves no file."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

import httpx

from trainer_agent.arena import DEFAULT_ROOT
from weightcast.demo.errors import DemoError
from weightcast.demo.ranks import Ranks, end, environment, kill
from weightcast.demo.settings import RUN
from weightcast.devserver import SeaweedServer, ServerProcess, free_port

_BUCKET = "weightcast-demo"
_START_TIMEOUT_S = 60.0
_AGENT_GRACE_S = 4.0


class Cast:
    """All processes, as a context manager: work directory and S3 server at once, the others when asked for."""

    def __init__(self, regions: Sequence[str]) -> None:
        self._regions = tuple(regions)
        self._stack = contextlib.ExitStack()
        self._processes: dict[str, ServerProcess] = {}
        self._commands: dict[str, list[str]] = {}
        self._port = free_port()
        self._starts = 0
        self.work = self.memory = Path()
        self.model_dirs: dict[str, Path] = {}
        self.store = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.work = _directory(stack, None)
            # Working weights belong in memory: nearly every page of them is dirty after every version.
            self.memory = _directory(stack, DEFAULT_ROOT if DEFAULT_ROOT.is_dir() else None)
            self.model_dirs = {region: self.memory / region for region in self._regions}
            self._start_janitor(stack, [self.work, self.memory])
            self._server = stack.enter_context(SeaweedServer(self.work / "s3"))
            self._server.create_bucket(_BUCKET)
            self.store = f"s3://{_BUCKET}/?endpoint={quote(self._server.endpoint_url, safe=':/')}&region=us-east-1"
            self._environment = environment(self.work, self._server.environment())
            self.ranks = Ranks(self._environment)
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
        kill(self._processes[name])
        self._start_command(name, self._commands[name])

    def check(self) -> None:
        """``DemoError`` with the end of its log if coordinator or an agent has ended."""
        for name, process in self._processes.items():
            if not process.running:
                raise DemoError(f"{name} ended early; the end of its log: {process.log_tail()}")

    def log_tails(self) -> Mapping[str, str]:
        """The end of every process's log, for a failed demo."""
        return {name: process.log_tail() for name, process in self._processes.items()} | self.ranks.log_tails()

    def _start_command(self, name: str, arguments: list[str]) -> None:
        self._commands[name] = arguments
        self._starts += 1
        self._processes[name] = ServerProcess(
            [sys.executable, "-m", "weightcast", *arguments],
            cwd=self.work,
            log_path=self.work / f"{self._starts:03d}-{name.replace(' ', '-')}.log",
            env=self._environment,
        )

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
        """End trainers first, then agents and coordinator."""
        self.ranks.end()
        end(list(self._processes.values()), _AGENT_GRACE_S)
        self._processes.clear()


def _directory(stack: contextlib.ExitStack, parent: Path | None) -> Path:
    path = Path(tempfile.mkdtemp(prefix="weightcast-demo-", dir=parent))
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path
