"""The processes of the soak: started, and started again when they end, until the soak does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from tests.soak.holding import Holding
from tests.soak.links import Address, Link
from tests.soak.processes import SIGNALLED, WITHOUT, Place
from tests.soak.truth import Truth
from weightcast.devserver import SeaweedServer, free_ports

RUN, MOST_RANKS = "soak", 3
SMALL, STRAIGHT = "c", "b"
"""Regions: whose model directory is on a small tmpfs; whose engine reads what it is told of without the gate."""
OTHERS = "others"
"""The file that fills that tmpfs."""
READERS = "readers"
"""The link of those who only ask."""
_MOUNT = ("mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs")
_RANK_ENDS = (3, 4, 5, 6)
_PATIENCE_S = 12.0
"""After one rank has ended the others are, as a launcher does."""
_TICK_S = 0.2
_SAMPLE_TICKS = 25


class Cast:
    """``root``: for logs and everything else that may be kept. ``regions``: at most three letters from a on.

    ``steady``: one job of two ranks without a pause between steps, engines without one either, and no process ends.
    ``environment``: of the processes, beside what they need.
    """

    def __init__(
        self,
        root: Path,
        regions: str,
        seed: int,
        find: Callable[[str], None],
        *,
        steady: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root, self.work = root, root / "work"
        self.regions, self.seed, self.find, self.steady = regions, seed, find, steady
        self._environment = environment or {}
        self.chance = random.Random(seed)
        self.links: dict[str, Link] = {}
        self.places: dict[str, Place] = {}
        self.job: list[Place] = []
        self.former: list[Place] = []
        """Ranks of jobs that another one took the place of, while they slept."""
        self.models: dict[str, Path] = {}
        self.small: Path | None = None
        """The small tmpfs, where mounting one is permitted."""
        self.truth = Truth(self.work / "published.jsonl", root / "loads.jsonl", find)
        self.holding = Holding()
        self.done: Counter[str] = Counter()
        self.finishing = self.restarting = False
        self._attempt = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything runs inside; nothing is left afterwards."""
        async with AsyncExitStack() as stack:
            self.shm = Path(tempfile.mkdtemp(prefix="weightcast-soak-", dir="/dev/shm"))
            stack.callback(shutil.rmtree, self.shm, ignore_errors=True)
            for path in (self.work / "assets", self.root / "tmp", self.root / "home"):
                path.mkdir(parents=True)
            (self.work / "assets" / "config.json").write_text('{"model_type": "llama"}')
            await self._build(stack)
            self.restarting = True
            watch = asyncio.create_task(self._supervise())
            watch.add_done_callback(self._not_watched)
            try:
                yield
            finally:
                watch.cancel()
                for place in self.everybody():
                    place.end(signal.SIGKILL)

    async def _build(self, stack: AsyncExitStack) -> None:
        self.server = stack.enter_context(SeaweedServer(self.root / "s3"))
        self.server.create_bucket(RUN)
        store = ("127.0.0.1", int(self.server.endpoint_url.rpartition(":")[2]))
        ports = free_ports(2 + len(self.regions))
        coordinators = [("127.0.0.1", port) for port in ports[:2]]
        for number in range(2):
            await self._link(stack, f"coordinator{number}-store", store)
        for name in [*(f"rank{rank}" for rank in range(MOST_RANKS)), *self.regions]:
            await self._link(stack, f"{name}-store", store)
            await self._link(stack, f"{name}-coordinator", *coordinators)
        if self.steady:
            await self._link(stack, READERS, *coordinators)
        self.env = {
            **{name: value for name, value in self.server.environment().items() if name != "AWS_ENDPOINT_URL_S3"},
            "AWS_EC2_METADATA_DISABLED": "true",
            "PATH": os.environ["PATH"],
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONWARNINGS": "default::ResourceWarning",
            **self._environment,
        }
        for number, (_, port) in enumerate(coordinators):
            name = f"coordinator{number}"
            words = [
                "--store",
                self.store(f"{name}-store"),
                "--port",
                str(port),
                "--expire-after",
                "8",
                "--poll",
                "0.5",
            ]
            self._place(name, "weightcast", "coordinator", *words)
        for region, port in zip(self.regions, ports[2:], strict=True):
            self._region(stack, region, port)

    async def _link(self, stack: AsyncExitStack, name: str, *upstreams: Address) -> None:
        link = self.links[name] = Link(name, upstreams, random.Random(f"{self.seed} {name}"))
        await stack.enter_async_context(link.listening())

    def _region(self, stack: AsyncExitStack, region: str, port: int) -> None:
        home = self.shm / region
        home.mkdir()
        if region == SMALL and not subprocess.run([*_MOUNT, home], capture_output=True).returncode:
            stack.callback(subprocess.run, ["umount", "--lazy", home], check=True)
            self.small = home
        model = self.models[region] = home / "model"
        about = {
            "model": str(model),
            "region": region,
            "straight": region == STRAIGHT,
            "hurried": self.steady,
            "log": str(self.root / "loads.jsonl"),
            "port": port,
        }
        path = self.root / f"engine-{region}.json"
        path.write_text(json.dumps(about))
        hook = ["--notify", f"http://127.0.0.1:{port}/"]
        if self.seed % 2 and region == STRAIGHT:
            # Starting Python anew for each version would take the better part of a core. It goes by no gate.
            engine = ["env", "-u", WITHOUT, sys.executable, "-m", "tests.soak.engine", str(path)]
            hook = ["--on-version", shlex.join([*(["true"] if self.steady else engine), "{version}"])]
        state = [] if region == STRAIGHT else ["--state-dir", str(self.state(region))]
        words = ["--run", RUN, "--region", region, "--model-dir", str(model), "--store", self.store(f"{region}-store")]
        words += [
            "--coordinator",
            self._address(f"{region}-coordinator"),
            "--engine-timeout",
            "8",
            "--scrub-every",
            "20",
        ]
        self._place(f"agent-{region}", "weightcast", "rollout", *words, *hook, *state)
        self._place(f"engine-{region}", "tests.soak.engine", str(path))

    def _place(self, name: str, *words: str) -> None:
        self.places[name] = Place(name, self.command(*words), self.env, self.root / f"{name}.log")
        self.places[name].start()

    @staticmethod
    def command(*words: str) -> list[str]:
        return ["nice", "-n", "5", sys.executable, "-m", *words]

    def _address(self, link: str) -> str:
        return f"http://127.0.0.1:{self.links[link].port}"

    def store(self, link: str | None = None) -> str:
        """URL of the store, through a link if one is named."""
        endpoint = self._address(link) if link else self.server.endpoint_url
        return f"s3://{RUN}/?endpoint={quote(endpoint, safe=':/')}&region=us-east-1"

    def state(self, region: str) -> Path:
        """Where the region's agent keeps logs and checkpoint, unless beside the weights."""
        return self.root / f"state-{region}"

    def everybody(self) -> list[Place]:
        return [*self.places.values(), *self.job, *self.former]

    def note(self, what: str) -> None:
        """Something was done: counted by its first word."""
        self.done[what.split()[0]] += 1
        with (self.root / "driver.txt").open("a") as log:
            log.write(f"{time.monotonic():.1f} {what}\n")

    def start_job(self) -> None:
        """Another attempt of the training job takes the place of the last."""
        self._attempt += 1
        world = 2 if self.steady else self.chance.choice([1, 2, 2, 2, MOST_RANKS])
        about = {
            "work": str(self.work),
            "attempt": self._attempt,
            "world": world,
            "seed": self.seed,
            "peer_s": 60 if self.steady else self.chance.choice([15, 60]),
            "max_wait_s": 30.0 if self.steady else self.chance.choice([3.0, 8.0, 30.0]),
            "pauses_s": [0.0] if self.steady else [0.0, 0.1, 0.4, 1.0],
            "store": [self.store(f"rank{rank}-store") for rank in range(world)],
            "coordinator": [self._address(f"rank{rank}-coordinator") for rank in range(world)],
            "shm": str(self.shm),
        }
        path = self.work / f"job-{self._attempt}.json"
        path.write_text(json.dumps(about))
        self.job = []
        for rank in range(world):
            name = f"rank{rank}-{self._attempt:03d}"
            command = self.command("tests.soak.rank", str(path), str(rank))
            self.job.append(Place(name, command, self.env, self.root / f"{name}.log", _RANK_ENDS))
            self.job[-1].start()
        self.note(f"job {self._attempt} of {world}")

    # ---- supervision

    def _not_watched(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is not None:
            self.find(f"the soak itself: {watch.exception()!r}")

    async def _supervise(self) -> None:
        for tick in range(1 << 62):
            for place in self.everybody():
                self._see(place)
                for pid in place.tree if tick % _SAMPLE_TICKS == 0 else ():
                    self.holding.add_process(place.name, pid)
            now_s = time.monotonic()
            for place in self.places.values():
                if self.restarting and place.popen is None and now_s >= place.restart_at_s:
                    place.start()
            self.former = [place for place in self.former if place.popen is not None]
            if self.job and not self.finishing:
                self._keep_job(now_s)
            self.truth.look()
            await asyncio.sleep(_TICK_S)

    def _see(self, place: Place) -> None:
        asked, status = place.asked, place.ended()
        if status is None:
            return
        place.restart_at_s = max(place.restart_at_s, time.monotonic() + 1.0)
        finished = status == 0 and self.finishing and place.name not in self.places
        if (asked and status in SIGNALLED) or finished:
            return
        if status == 1 and place.name == f"agent-{SMALL}" and "No space left" in place.log.read_text()[-500:]:
            self.note("full at the start of an agent")
        elif status in place.fine and not self.steady:
            self.note(f"end {status} of {place.name}")
        else:
            self.find(f"{place.name} ended with {status}: see {place.log}")

    def _keep_job(self, now_s: float) -> None:
        gone = [place.restart_at_s for place in self.job if place.popen is None]
        left = [place for place in self.job if place.popen is not None]
        if gone and not left and now_s >= max(gone):
            self.start_job()
        elif gone and now_s > max(gone) + _PATIENCE_S:
            for place in left:
                place.end(signal.SIGKILL)

    async def tool(self, *words: str, fine: tuple[int, ...] = (0,), limit_s: float = 300.0) -> str:
        """Run a command of ``weightcast``; what it said."""
        command = self.command("weightcast", *words)
        child = await asyncio.create_subprocess_exec(
            *command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said = b""
        try:
            async with asyncio.timeout(limit_s):
                said, _ = await child.communicate()
        except TimeoutError:
            self.find(f"weightcast {words} did not end in {limit_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        if child.returncode not in fine or b"Traceback" in said:
            self.find(f"weightcast {' '.join(words)} ended with {child.returncode}: {said.decode()[-1500:]}")
        return said.decode()
