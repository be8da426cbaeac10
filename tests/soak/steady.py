"""A fleet that nobody kills, for as long as you like: does it hold no more after a thousand versions than after a few?

Versions are published as fast as they go, readers of the coordinators come and go, links fail now and then, garbage
is collected. What every process, every directory and the bucket hold is measured all the while.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from coordinator.client import CoordinatorClient
from coordinator.credentials import Credentials
from coordinator.errors import CoordinatorError
from coordinator.wire import AgentReport
from tests.soak.cast import READERS, RUN, Cast
from tests.soak.holding import directory
from tests.soak.links import WEATHERS
from tests.soak.resting import come_to_rest

REGIONS = "ab"
_STREAMS, _ASKING = 4, 2
_MEASURE_S = 5.0
_COLLECT_S = 20.0


async def steady(seed: int, seconds: float, root: Path, *, say: Callable[[str], None] = print) -> list[str]:
    """Run it for ``seconds``; what was found. ``root`` is a new directory for logs and everything else."""
    findings: list[str] = []

    def find(what: str) -> None:
        say(f"found: {what}")
        findings.append(what)

    # An odd seed: one engine is told over HTTP, the other one by a command for each version.
    cast = Cast(root, REGIONS, seed | 1, find, steady=True)
    async with cast.running():
        cast.start_job()
        await _until_sealed(cast)
        await _go_on(cast, seconds)
        for line in cast.holding.told():
            cast.note(line)
        for what in cast.holding.grown():
            find(what)
        await come_to_rest(cast)
    say(f"seed {seed}: {dict(cast.done)}; {cast.truth}; {len(findings)} found")
    return findings


async def _until_sealed(cast: Cast) -> None:
    while not cast.truth.sealed:  # noqa: ASYNC110 - what others write down
        await asyncio.sleep(0.2)


async def _go_on(cast: Cast, seconds: float) -> None:
    url = f"http://127.0.0.1:{cast.links[READERS].port}"
    chance = random.Random(f"{cast.seed} steady")
    work = [_measure(cast), _weather(cast, chance), _collect(cast)]
    work += [_stream(url, chance, cast) for _ in range(_STREAMS)]
    work += [_ask(url, chance, cast) for _ in range(_ASKING)]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            cast.find(f"the soak itself: {task.exception()!r}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in cast.links.values():
            link.change("fair")


async def _measure(cast: Cast) -> None:
    while True:
        await asyncio.sleep(_MEASURE_S)
        for region, model in cast.models.items():
            cast.holding.add(f"model of {region}", directory(model))
            cast.holding.add(f"state of {region}", directory(cast.state(region)))
        for path in (cast.shm, cast.root / "tmp", cast.root / "home"):
            cast.holding.add(str(path.name), directory(path))


async def _weather(cast: Cast, chance: random.Random) -> None:
    """A link fails for a moment, and then another one."""
    while True:
        await asyncio.sleep(chance.random() * 6)
        link = chance.choice(list(cast.links.values()))
        cast.done["weather"] += 1
        link.change(chance.choice(WEATHERS))
        await asyncio.sleep(chance.random() * 2)
        link.change("fair")


async def _collect(cast: Cast) -> None:
    while True:
        await asyncio.sleep(_COLLECT_S)
        cast.done["collect"] += 1
        words = ["--store", cast.store(), "--run", RUN, "--keep-versions", "20", "--min-age", "15s"]
        await cast.tool("gc", *words)


# ---- readers


async def _stream(url: str, chance: random.Random, cast: Cast) -> None:
    """Follow events for a moment, leave without a word, come back."""
    while True:
        async with CoordinatorClient(url, credentials=Credentials()) as client:
            for _ in range(chance.randrange(1, 5)):
                with contextlib.suppress(CoordinatorError, TimeoutError):
                    async with asyncio.timeout(chance.random() * 3):
                        async for _event in client.events(RUN):
                            cast.done["event"] += 1


async def _ask(url: str, chance: random.Random, cast: Cast) -> None:
    """Ask everything that people and tools ask, and report agents that are never heard of again."""
    async with CoordinatorClient(url, credentials=Credentials(), timeout_s=5.0) as client:
        while True:
            with contextlib.suppress(CoordinatorError):
                run_id = (await client.run(RUN)).run_id
                for question in _questions(client, run_id):
                    await asyncio.sleep(chance.random() * 0.2)
                    cast.done["question"] += 1
                    with contextlib.suppress(CoordinatorError):
                        await question()
            await asyncio.sleep(chance.random())


def _questions(client: CoordinatorClient, run_id: str) -> list[Callable[[], Awaitable[object]]]:
    async def of_newest() -> None:
        head = await client.head(RUN)
        version = head.position.version
        await client.version(RUN, version)
        await client.manifest(RUN, version)
        await client.wait(RUN, version + 1, state="sealed", timeout_s=2)

    report = AgentReport(run_id=run_id, state="starting", ttl_s=5)
    return [
        of_newest,
        lambda: client.runs(),
        lambda: client.regions(RUN),
        lambda: client.versions(RUN, limit=100),
        lambda: client.run(f"none-{secrets.token_hex(8)}"),
        lambda: client.heartbeat(RUN, "elsewhere", secrets.token_hex(8), report),
        lambda: client.head(RUN, after=10**9, wait_s=1),
        lambda: client.ready(),
    ]
