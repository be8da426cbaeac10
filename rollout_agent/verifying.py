"""Checking from outside: a model directory against what was recorded or the bucket, and versions of the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_agent import checking, gate
from rollout_agent.checking import Content, Findings
from rollout_agent.disk import LocalDisk
from rollout_agent.errors import NotWhole
from rollout_agent.places import Places
from rollout_agent.source import LoadedHop, Source
from rollout_agent.state import Whole, kept_names
from rollout_agent.statedir import Held
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
    """Result of hashing a directory."""

    whole: Whole
    groups: int
    nbytes: int
    findings: Findings

    @property
    def good(self) -> bool:
        """Whether everything is as it should be."""
        return self.findings.good


def check_kept(places: Places) -> None:
    """Raise ``NotWhole`` where no agent ever was: there is nothing to wait for."""
    if not places.private.is_dir():
        raise NotWhole(
            f"no agent has kept weights in {places.model}: it has no {places.private.name}; name the --model-dir of "
            "`weightcast rollout`"
        )


@contextmanager
def _still(model_dir: Path) -> Iterator[tuple[Places, Whole, Content]]:
    """Hold a whole directory still and say what it should hold."""
    places = Places.of(model_dir)
    check_kept(places)
    with gate.still(model_dir, timeout_s=_WAIT_S) as whole:
        content = checking.recorded(LocalDisk(), places, whole)
        if content is None:
            raise NotWhole(f"{places.digests} does not say what version {whole.position} should be: restart the agent")
        yield places, whole, content


def verify_dir(model_dir: Path) -> Verdict:
    """Hash every group of a model directory and compare with the digests recorded there.

    Holds engines' kind of lock meanwhile, so a running agent waits. Raises ``NotWhole`` or ``DamagedFiles`` (a file
    is missing or cut).
    """
    with _still(model_dir) as (places, whole, content):
        return _compare(places, whole, content)


async def verify_dir_against(store: Store, model_dir: Path) -> Verdict:
    """The same against the receipts in the bucket, which is also where the groups' bounds are then taken from."""
    with _still(model_dir) as (places, whole, content):
        source = Source(store, whole.run)
        source.run_id = whole.run_id
        loaded = await source.load(Hop(whole.position, "delta", 0))
        layout = loaded.layout
        names = kept_names(content.state, layout)
        groups = tuple(g for g in layout.groups if any(p.tensor.name in names for p in g.pieces))
        expected = Held(loaded.version, layout, groups, tuple(loaded.ranges[g.index].digest for g in groups))
        return await asyncio.to_thread(_compare, places, whole, Content(content.state, expected))


def _compare(places: Places, whole: Whole, content: Content) -> Verdict:
    with ThreadPoolExecutor() as pool:
        findings = checking.compare(LocalDisk(), places, content, pool)
    groups = content.held.groups
    return Verdict(whole, len(groups), sum(group.nbytes for group in groups), findings)


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
