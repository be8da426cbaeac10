"""What a step of a model of many pieces costs each side, beside its weights: coordinator, one rank, one agent.

Each side is a process of its own, so that its memory is its own; they share a store in a directory. Nothing is encoded,
sent or applied: what is measured is what the records cost that describe it.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from coordinator.service import Coordinator
from coordinator.wire import OfferReport, OpenRequest, ReceiptReport, TermRequest, VersionAnswer
from rollout_agent.disk import LocalDisk
from rollout_agent.filetable import FILE_BYTES
from rollout_agent.selection import is_closed, wanted_groups
from rollout_agent.source import LoadedHop, Source
from rollout_agent.state import State, seal, table_of
from rollout_agent.statedir import held_after
from rollout_agent.weights import Weights
from trainer_agent.placement import place_groups, plan_copies
from weight_store.chain import plan_chain
from weight_store.keys import receipt_key
from weight_store.layout import Layout
from weight_store.offer import Offer
from weight_store.opening import open_store
from weight_store.position import GENESIS
from weight_store.reading import read_layout
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Receipt
from weight_store.records import sha256_hex
from weight_store.store import Store

RUN = "pieces"
RUN_ID = "00000000-0000-4000-8000-000000000000"
PAYLOAD_SHARE = 200
"""A delta of RL has about this small a part of its weights."""


def receipt_of(rank: int, layout: Layout, opened: VersionAnswer) -> Receipt:
    """A rank's report of a full at version 1, of a delta later, with digests of nothing."""
    groups = layout.owned(rank)
    full = opened.parent == GENESIS
    sizes = tuple(group.nbytes if full else group.nbytes // PAYLOAD_SHARE for group in groups)
    shard_bytes = len(SHARD_MAGIC) + sum(sizes)
    return Receipt(
        run_id=opened.run_id,
        version=opened.version,
        rank=rank,
        parent=opened.parent,
        layout=opened.layout,
        nonce="0" * 16,
        shard_bytes=shard_bytes,
        sizes=sizes,
        changed=tuple(group.elements if full else group.elements // PAYLOAD_SHARE for group in groups),
        digests="0123456789abcdef" * 2 * len(groups),
        full=tuple(range(len(groups))) if full else (),
        blocks="0" * 64 * -(-shard_bytes // BLOCK_BYTES),
    )


class CoordinatorSide:
    """The real coordinator, without HTTP, as all ranks of one launch call it."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._coordinator = Coordinator(store)
        self._ranks = ranks
        self._term = 0
        self._layout = ""

    async def take_over(self, launch: str) -> tuple[str, int]:
        """Run id and term."""
        answer = await self._coordinator.take_over(RUN, TermRequest(launch=launch))
        self._term = answer.term
        return answer.run_id, answer.term

    async def agree(self) -> str:
        """All ranks report the offers that are in the bucket; the layout's digest."""
        for rank in range(self._ranks):
            answer = await self._coordinator.report_offer(RUN, self._term, rank, OfferReport(world_size=self._ranks))
        self._layout = answer.layout or ""
        return self._layout

    async def open(self, term: int, layout: str, ordinal: int) -> VersionAnswer:
        """All ranks open the same version."""
        request = OpenRequest(term=term, step=ordinal, ordinal=ordinal, layout=layout, world_size=self._ranks)
        for _ in range(self._ranks):
            answer = await self._coordinator.open_version(RUN, request)
        return answer

    async def seal(self, term: int, version: int, digests: list[str]) -> str:
        """All ranks report the receipts that are in the bucket; the version's state."""
        for rank, sha256 in enumerate(digests):
            report = ReceiptReport(term=term, sha256=sha256)
            answer = await self._coordinator.report_receipt(RUN, version, rank, report)
        return answer.state


class RankSide:
    """What Publisher and sidecar of one rank do with the records."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._layout: Layout | None = None

    async def settle(self, offer: bytes, sha256: str) -> int:
        """Read the layout and plan all copies; the number of the rank's groups."""
        self._layout = layout = await read_layout(self._store, RUN, sha256)
        placed = place_groups(layout.owned(self._rank))
        self._plan = plan_copies(Offer.parse(offer), placed)
        return len(placed)

    async def look_up(self) -> int:
        """Find the plan of every piece, as a publication does before it copies."""
        plan = self._plan
        for (name, box), known in list(plan.pieces.items()):
            plan.find(name, known.dtype, plan.shapes[name], box)
        return len(plan.pieces)

    async def report(self, opened: VersionAnswer) -> int:
        """Make the receipt and write it; its size in bytes."""
        if self._layout is None:
            return 0
        return len(receipt_of(self._rank, self._layout, opened).to_bytes())


class AgentSide:
    """What a rollout agent does with the records: from the head to where each group's weights lie."""

    def __init__(self, store: Store, directory: Path) -> None:
        self._source = Source(store, RUN)
        self._directory = directory

    async def join(self) -> int:
        """Load the full that a new agent starts from, and lay out its files (sparse); the number of groups."""
        loaded = await self._load()
        layout = loaded.layout
        table = table_of(layout, frozenset(layout.names), FILE_BYTES)
        for file in table.files:
            write_sparse(self._directory / file.name, file.head, file.size)
        self._weights = Weights(LocalDisk(), self._directory, table)
        return len(layout.groups)

    async def load(self) -> int:
        """Read the head's delta and all its receipts; bytes to fetch."""
        self._loaded = await self._load()
        return self._loaded.hop.payload_bytes

    async def _load(self) -> LoadedHop:
        head = await self._source.head()
        manifest = await self._source.manifest(head.position)
        hop = plan_chain(manifest.parent if manifest.chain else None, manifest, head.position)[-1]
        return await self._source.load(hop)

    async def choose(self) -> int:
        """Check that the groups hold kept tensors only, and which are wanted; once a layout."""
        names = self._weights.table.places.keys()
        wanted = wanted_groups(self._loaded.layout, names)
        return len(wanted) if is_closed(wanted, names) else 0

    async def find(self) -> int:
        """Where the elements of each group lie, once to read the base and once to store."""
        for _ in range(2):
            found = sum(len(self._weights.where(group)) for group in self._loaded.layout.groups)
        return found

    async def record(self) -> int:
        """The record of what each group is now; its size in bytes."""
        loaded = self._loaded
        state = State(run=RUN, run_id=RUN_ID, version=loaded.version, digests="")
        held = held_after(state, loaded.version, loaded.layout, loaded.table)
        if held is None:
            return 0
        return len(seal(state.model_copy(update={"digests": b"".join(held.digests).hex()})))


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds, and resident memory in MiB: now, and at its highest so far."""

    cpu_s: float
    now_mib: float
    peak_mib: float


class Side:
    """A side in its own process. ``make(store)`` makes it there; ``call`` awaits one of its methods."""

    def __init__(self, directory: Path, make: Callable[[Store], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, f"file://{directory}", make), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any) -> tuple[Any, Spent]:
        """What the method returns, and what it took."""
        self._ours.send((method, arguments))
        result, spent = self._ours.recv()
        return result, spent

    def close(self) -> None:
        """End the process."""
        self._ours.close()
        self._process.join(10)


def _serve(connection: Connection, url: str, make: Callable[[Store], Any]) -> None:
    asyncio.run(_serving(connection, url, make))


async def _serving(connection: Connection, url: str, make: Callable[[Store], Any]) -> None:
    store = open_store(url)
    side = make(store)
    with closing(connection):
        while True:
            try:
                method, arguments = await asyncio.to_thread(connection.recv)
            except EOFError:
                break
            work: Coroutine[Any, Any, Any] = getattr(side, method)(*arguments)
            gc.collect()
            started_s = time.process_time()
            result = await work
            cpu_s = time.process_time() - started_s
            connection.send((result, Spent(cpu_s, *_memory_mib())))
    await store.close()


def _memory_mib() -> tuple[float, float]:
    """Resident memory, now and at its highest. Not by ``getrusage``, whose peak is that of the parent at first."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def write_sparse(path: Path, head: bytes, size: int) -> None:
    """A file of ``size`` bytes that takes no more room than its ``head``."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


async def write_receipts(store: Store, layout: Layout, opened: VersionAnswer) -> list[str]:
    """Store the receipts of all ranks; their digests."""
    found = []
    for rank in range(opened.world_size):
        data = receipt_of(rank, layout, opened).to_bytes()
        await store.create(receipt_key(RUN, opened.version, rank), data)
        found.append(sha256_hex(data))
    return found
