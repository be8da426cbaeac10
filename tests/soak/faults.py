"""What happens to the cast. Each fault is a task: it does something, waits, and puts it right if nobody else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.soak.cast import OTHERS, RUN, STRAIGHT, Cast
from tests.soak.holding import children
from tests.soak.links import WEATHERS
from tests.soak.processes import Place

_WEIGHTS = {
    "weather": 12.0,
    "kill": 6.0,
    "stop": 5.0,
    "sidecar": 3.0,
    "garble": 2.5,
    "harm": 2.5,
    "engine": 2.0,
    "rank": 2.0,
    "term": 2.0,
    "outage": 1.5,
    "fill": 1.5,
    "collect": 1.0,
    "zombie": 1.5,
    "everybody": 0.3,
}
"""Kinds of faults, and how often each is drawn where it is."""
_END_S = 25.0


class Faults:
    """Draws some kinds and a pace from the seed, and then one fault after the other."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._chance = random.Random(f"{cast.seed} faults")
        self._tasks: set[asyncio.Task[None]] = set()

    async def go_on(self, seconds: float, *, pace_s: float | None = None) -> None:
        """For ``seconds``; ends whatever is still under way, as it is."""
        until_s = time.monotonic() + seconds
        kinds = {kind: weight for kind, weight in _WEIGHTS.items() if self._chance.random() < 0.6}
        pace_s = pace_s or self._chance.choice([2.0, 3.0, 5.0])
        self._cast.note(f"begin every {pace_s:g} s one of {sorted(kinds)}")
        try:
            while not self._cast.truth.sealed and time.monotonic() < until_s:  # noqa: ASYNC110 - what others write down
                await asyncio.sleep(0.5)
            while kinds and time.monotonic() < until_s:
                kind = self._chance.choices(list(kinds), list(kinds.values()))[0]
                self._spawn(getattr(self, f"_{kind}")())
                await asyncio.sleep(self._chance.random() * 2 * pace_s)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._cast.find(f"the soak itself: {task.exception()!r}")

    def _some(self, *kinds: str) -> Place:
        return self._chance.choice([place for name, place in self._cast.places.items() if name.startswith(kinds)])

    def _end(self, place: Place, number: int) -> bool:
        """Unless it has hardly started, most of the time."""
        if time.monotonic() - place.started_s < 5 and self._chance.random() < 0.7:
            return False
        self._cast.note(f"{signal.Signals(number).name} {place.name}")
        place.restart_at_s = time.monotonic() + self._chance.choice([0.0, 0.5, 4.0])
        place.end(number)
        return True

    # ---- links and store

    async def _weather(self) -> None:
        link = self._chance.choice(list(self._cast.links.values()))
        weather = self._chance.choice(WEATHERS)
        length_s = self._chance.choice([1, 4, 12]) * (0.5 + self._chance.random())
        self._cast.note(f"{weather} {link.name} for {length_s:.1f} s")
        link.change(weather)
        await asyncio.sleep(length_s)
        link.change("fair")

    async def _garble(self) -> None:
        """Bits flip in what all agents fetch."""
        seconds = self._chance.choice([4, 10])
        self._cast.note(f"garble for {seconds} s")
        links = [self._cast.links[f"{region}-store"] for region in self._cast.regions]
        for link in links:
            link.change("rotten")
        await asyncio.sleep(seconds)
        for link in links:
            link.change("fair")

    async def _outage(self) -> None:
        """The store stands still, or nobody reaches it."""
        how, seconds = self._chance.choice(["still", "still", "cut", "hole"]), self._chance.choice([1, 4, 10])
        self._cast.note(f"outage, {how} for {seconds} s")
        if how == "still":
            os.kill(self._cast.server.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(self._cast.server.pid, signal.SIGCONT)
            return
        links = [link for name, link in self._cast.links.items() if name.endswith("-store")]
        for link in links:
            link.change(how)
        await asyncio.sleep(seconds)
        for link in links:
            link.change("fair")

    async def _collect(self) -> None:
        keep = str(self._chance.choice([1, 3, 10]))
        self._cast.note(f"collect, keep {keep}")
        words = ["--store", self._cast.store(), "--run", RUN, "--keep-versions", keep, "--min-age", "15s"]
        await self._cast.tool("gc", *words, fine=(0, 1))

    # ---- signals

    async def _kill(self) -> None:
        self._end(self._some("agent", "coordinator"), signal.SIGKILL)

    async def _engine(self) -> None:
        self._end(self._some("engine"), signal.SIGKILL)

    async def _everybody(self) -> None:
        for place in [*self._cast.places.values(), *self._cast.job]:
            self._end(place, signal.SIGKILL)

    async def _term(self) -> None:
        if self._chance.random() < 0.2:
            for place in self._cast.job:
                self._end(place, signal.SIGTERM)
            return
        place = self._some("agent", "coordinator")
        process = place.popen
        if process is None or not self._end(place, signal.SIGTERM):
            return
        try:
            await asyncio.to_thread(process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._cast.find(f"{place.name} goes on {_END_S:g} s after SIGTERM: see {place.log}")
            process.send_signal(signal.SIGABRT)  # its stacks go to the log

    async def _stop(self) -> None:
        await self._sleep(self._some("agent", "coordinator", "engine"), self._chance.choice([1, 5, 15]))

    async def _sleep(self, place: Place, seconds: float) -> None:
        process = place.popen
        if process is None or not place.running:
            return
        self._cast.note(f"stop {place.name} for {seconds} s")
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    async def _rank(self) -> None:
        place = self._chance.choice(self._cast.job)
        if self._chance.random() < 0.5:
            self._end(place, signal.SIGKILL)
        else:
            await self._sleep(place, self._chance.choice([1, 5, 25]))

    async def _sidecar(self) -> None:
        sidecars = [pid for place in self._cast.job if place.running for pid in children(place.tree[-1])]
        if not sidecars:
            return
        pid, stops = self._chance.choice(sidecars), self._chance.random() < 0.4
        self._cast.note(f"sidecar {'stopped' if stops else 'killed'}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                await asyncio.sleep(self._chance.choice([1, 5, 15]))
                os.kill(pid, signal.SIGCONT)

    async def _zombie(self) -> None:
        """The job sleeps, another one takes over, the old one wakes."""
        old = self._cast.job
        self._cast.note("zombie")
        for place in old:
            place.signal_tree(signal.SIGSTOP)
        self._cast.former += old
        self._cast.start_job()
        await asyncio.sleep(self._chance.choice([1, 8, 20]))
        for place in old:
            place.signal_tree(signal.SIGCONT)

    # ---- disks

    async def _fill(self) -> None:
        """The small tmpfs is full for a while, or nearly."""
        if self._cast.small is None or (path := self._cast.small / OTHERS).exists():
            return
        self._cast.note("fill")
        with path.open("wb") as file, contextlib.suppress(OSError):
            left = self._chance.choice([0, 0, 100_000, 1_000_000])
            free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
            os.posix_fallocate(file.fileno(), 0, max(1, free - left))
        await asyncio.sleep(self._chance.choice([2, 8]))
        path.unlink(missing_ok=True)

    async def _harm(self) -> None:
        """Hands in the files while the agent is down, and its engine with it."""
        region = self._chance.choice([region for region in self._cast.regions if region != STRAIGHT])
        agent, engine = self._cast.places[f"agent-{region}"], self._cast.places[f"engine-{region}"]
        if not (agent.running and engine.running):
            return
        for place in (agent, engine):
            place.end(signal.SIGKILL)
            place.restart_at_s = time.monotonic() + 0.2 + self._chance.random() * 3
        self._cast.truth.forget(region)
        model, state = self._cast.models[region], self._cast.state(region)
        files = [path for path in [*model.rglob("*"), *state.rglob("*")] if path.is_file() and path.stat().st_size]
        how = self._chance.choice(["flip", "flip", "flip", "cut", "remove", "memory", "state"])
        if how in ("memory", "state"):
            shutil.rmtree(model if how == "memory" else state, ignore_errors=True)
        elif files:
            path = self._chance.choice(files)
            how = f"{how} {path}"
            _harm_file(path, how, self._chance)
        self._cast.note(f"harm, {how}")


def _harm_file(path: Path, how: str, chance: random.Random) -> None:
    at = chance.randrange(path.stat().st_size)
    if how.startswith("remove"):
        path.unlink()
    elif how.startswith("cut"):
        os.truncate(path, at)
    else:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
