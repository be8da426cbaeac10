"""One soak, from a seed."""

from __future__ import annotations

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
) -> list[str]:
    """Faults for ``seconds``, then rest; what was found. ``root`` is a new directory for logs and everything else."""
    findings: list[str] = []

    def find(what: str) -> None:
        say(f"found: {what}")
        findings.append(what)

    cast = Cast(root, regions, seed, find, environment=environment)
    async with cast.running():
        cast.start_job()
        await Faults(cast).go_on(seconds, pace_s=pace_s)
        await come_to_rest(cast)
    for line in cast.holding.told():
        cast.note(line)
    say(f"seed {seed}: {dict(cast.done)}; {cast.truth}; {len(findings)} found")
    return findings
