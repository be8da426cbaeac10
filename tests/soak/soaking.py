"""One soak, from a seed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.soak.cast import Cast
from tests.soak.faults import Faults
from tests.soak.resting import come_to_rest


async def soak(
    seed: int,
    seconds: float,
    root: Path,
    *,
    regions: str = "abc",
    pace_s: float | None = None,
    say: Callable[[str], None] = print,
    environment: Mapping[str, str] | None = None,
    hasty: bool = False,
) -> list[str]:
    """Faults for ``seconds``, then rest; what was found. ``root`` is a new directory for logs and everything else.

    ``hasty``: all ends at the first finding. ``environment``: of the processes, beside what they need.
    """
    findings: list[str] = []
    start_s, enough = time.monotonic(), asyncio.Event()

    def find(what: str) -> None:
        say(f"found after {time.monotonic() - start_s:.0f} s: {what}")
        findings.append(what)
        if hasty:
            enough.set()

    async def all_of_it() -> None:
        cast.start_job()
        await Faults(cast).go_on(seconds, pace_s=pace_s)
        await come_to_rest(cast)

    cast = Cast(root, regions, seed, find, environment=environment)
    async with cast.running():
        tasks = [asyncio.create_task(all_of_it()), asyncio.create_task(enough.wait())]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in done:
            task.result()
    for line in cast.holding.told():
        cast.note(line)
    say(f"seed {seed}: {dict(cast.done)}; {cast.truth}; {len(findings)} found")
    return findings
