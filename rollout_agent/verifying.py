"""Checking from outside: a model directory against what was recorded or the bucket, and versions of the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_agent import gate, presence
from rollout_agent.disk import LocalDisk
from rollout_agent.errors import NotWhole, WrongRun
from rollout_agent.places import Places
from rollout_agent.source import LoadedHop, Source
from rollout_agent.state import State, Whole, kept_names, load, table_of
from rollout_agent.statedir import Held, StateDir
from rollout_agent.weights import Damage, Weights, find_damage
from weight_store.chain import Hop, plan_chain
from weight_store.keys import shard_key
from weight_store.position import Position
from weight_store.receipt import BLOCK_BYTES, Receipt
from weight_store.records import sha256_hex
from weight_store.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAIT_S = 30.0
_PARALLEL_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of hashing a directory: ``damage`` lists groups, ``misplaced`` names index or assets that differ."""

    whole: Whole
    groups: int
    nbytes: int
    damage: tuple[Damage, ...]
    misplaced: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether everything is as it should be."""
        return not self.damage and not self.misplaced


@contextmanager
def _still(model_dir: Path, state_dir: Path | None) -> Iterator[tuple[Places, Whole, State, Held]]:
    """Hold a whole directory still and say what it should hold."""
    places = Places.of(model_dir, state_dir)
    disk = LocalDisk()
    with gate.shared(model_dir, timeout_s=_WAIT_S) as whole:
        records = StateDir(disk, places)
        for path in (places.pending, places.checkpoint):
            state = load(disk, path, State)
            layout = records.layout(state.version.layout) if state else None
            held = records.at(state, layout, whole.position) if state and layout else None
            if state is not None and held is not None:
                yield places, whole, state, held
                return
    raise NotWhole(
        f"{places.state} does not say what version {whole.position} should be; if the agent runs with --state-dir, "
        "name the same directory here"
    )


def verify_dir(model_dir: Path, state_dir: Path | None = None) -> Verdict:
    """Hash every group of a model directory and compare with the digests recorded locally.

    Holds engines' kind of lock meanwhile, so a running agent waits. Raises ``NotWhole`` or ``DamagedFiles`` (a file
    is missing or cut).
    """
    with _still(model_dir, state_dir) as (places, whole, state, held):
        return _compare(places, whole, state, held)


async def verify_dir_against(store: Store, model_dir: Path, state_dir: Path | None = None) -> Verdict:
    """The same against the receipts in the bucket, which is also where the groups' bounds are then taken from."""
    with _still(model_dir, state_dir) as (places, whole, state, held):
        source = Source(store, whole.run)
        source.run_id = whole.run_id
        loaded = await source.load(Hop(whole.position, "delta", 0))
        layout = loaded.layout
        names = kept_names(state, layout)
        groups = tuple(g for g in layout.groups if any(p.tensor.name in names for p in g.pieces))
        expected = Held(loaded.version, layout, groups, tuple(loaded.ranges[g.index].digest for g in groups))
        if held.position != expected.position:
            raise WrongRun(f"{model_dir} and the bucket disagree on version {held.position}")
        return await asyncio.to_thread(_compare, places, whole, state, expected)


def _compare(places: Places, whole: Whole, state: State, held: Held) -> Verdict:
    disk = LocalDisk()
    table = table_of(held.layout, kept_names(state, held.layout), state.file_bytes)
    weights = Weights(disk, places.model, table, writable=False)
    try:
        with ThreadPoolExecutor() as pool:
            damage = find_damage(weights, held.groups, held.digests, pool)
        misplaced = tuple(presence.misplaced(disk, places, held.version, table.index))
    finally:
        weights.close()
    return Verdict(whole, len(held.groups), sum(g.nbytes for g in held.groups), damage, misplaced)


async def verify_version(store: Store, run: str, position: Position) -> AsyncIterator[tuple[LoadedHop, Sequence[str]]]:
    """For each version from the newest full on: its hop, and a sentence for each damaged block of its shards."""
    source = Source(store, run)
    manifest = await source.manifest(position)
    for hop in plan_chain(None, manifest, position):
        loaded = await source.load(hop)
        faults: list[str] = []
        for receipt in loaded.receipts:
            faults += await _damaged_blocks(store, run, receipt)
        yield loaded, faults


async def _damaged_blocks(store: Store, run: str, receipt: Receipt) -> list[str]:
    key = shard_key(run, receipt.version, receipt.rank, receipt.nonce, extra_full=receipt.extra_full)
    slots = asyncio.Semaphore(_PARALLEL_BLOCKS)

    async def check(block: int) -> str | None:
        start = block * BLOCK_BYTES
        async with slots:
            buffer = bytearray(min(BLOCK_BYTES, receipt.shard_bytes - start))
            await store.read_into(key, start, memoryview(buffer))
            found = await asyncio.to_thread(sha256_hex, buffer)
        expected = receipt.block_sha256(block)
        return None if found == expected else f"block {block} of {key} has SHA-256 {found}, expected {expected}"

    checked = await asyncio.gather(*(check(block) for block in range(-(-receipt.shard_bytes // BLOCK_BYTES))))
    return [fault for fault in checked if fault is not None]
