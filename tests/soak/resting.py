"""The end of a soak: no more faults, everything comes to rest at the newest version, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

from tests.soak.cast import OTHERS, RUN, Cast
from tests.soak.processes import zombies

_LIMIT_S = 240.0
_KEPT = 150
"""Objects of two versions, and of the deltas and the full that they need; of launches, and of numbers given up."""
_DEFECTS = re.compile(r"Traceback|never retrieved|never awaited|ResourceWarning|Fatal Python")


async def come_to_rest(cast: Cast) -> None:
    """Tells ``cast.find`` whatever does not."""
    _heal(cast)
    sealed = len(cast.truth.sealed)
    await _until(cast, "versions go on", lambda: len(cast.truth.sealed) > sealed + 2)
    cast.finishing = True
    (cast.work / "finish").touch()
    await _until(cast, "the job finishes", lambda: not cast.former and not any(place.popen for place in cast.job))
    cast.truth.look()
    newest = max(cast.truth.sealed, default=0)

    def loaded() -> bool:
        return all(cast.truth.newest.get(region, 0) >= newest for region in cast.regions)

    await _until(cast, f"every engine loads version {newest}", loaded)
    for pid in zombies([pid for place in cast.everybody() for pid in place.tree]):
        cast.find(f"nobody reaped process {pid}")
    await _ask_tools(cast)
    cast.restarting = False
    for place in cast.places.values():
        place.end(signal.SIGTERM)
    await _until(cast, "all end", lambda: not any(place.popen for place in cast.places.values()))
    for what in _left(cast):
        cast.find(what)


def _heal(cast: Cast) -> None:
    os.kill(cast.server.pid, signal.SIGCONT)
    for link in cast.links.values():
        link.change("fair")
    if cast.small is not None:
        (cast.small / OTHERS).unlink(missing_ok=True)
    for place in cast.everybody():
        place.signal_tree(signal.SIGCONT)


async def _until(cast: Cast, what: str, ready: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _LIMIT_S
    while not ready():
        if time.monotonic() > until_s:
            cast.find(f"{what}: not within {_LIMIT_S:g} s")
            return
        await asyncio.sleep(0.2)


async def _ask_tools(cast: Cast) -> None:
    store = ["--store", cast.store()]
    collect = ["gc", *store, "--run", RUN, "--keep-versions", "2", "--min-age", "1s"]
    await asyncio.gather(
        *(cast.tool("verify", str(model)) for model in cast.models.values()),
        cast.tool("doctor", *store, "--size", "11", "--rounds", "2"),
        cast.tool(*collect),
    )
    verified, dry = cast.tool("verify", *store, "--run", RUN), cast.tool(*collect, "--dry-run")
    _, said = await asyncio.gather(verified, dry)
    kept = re.search(r"^kept (\d+) objects", said, re.MULTILINE)
    if "would delete 0 objects" not in said or kept is None or int(kept[1]) > _KEPT:
        cast.find(f"a second collection finds something, or the first one left much: {said}")
    cast.note(f"left after a collection: {said}")


def _left(cast: Cast) -> Iterator[str]:
    """What stays behind that should not."""
    for path in (cast.root / "tmp").iterdir():
        yield f"left in TMPDIR: {path}"
    for path in cast.shm.iterdir():
        if path.name not in cast.regions:
            yield f"left in shared memory: {path}"
    for directory in [*cast.models.values(), *(cast.state(region) for region in cast.regions)]:
        for path in directory.rglob("*.tmp"):
            yield f"left beside the weights: {path}"
    for log in cast.root.glob("*.log"):
        if found := _DEFECTS.search(log.read_text(errors="replace")):
            yield f"{found[0]} in {log}"
