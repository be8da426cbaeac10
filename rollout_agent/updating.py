"""From the version held to another one: by log, by new files, or by repair. What is fetched is decided by digests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from rollout_agent import beside, presence, syncing
from rollout_agent.changelog import LogWriter
from rollout_agent.detours import cheapest_start, plan_without
from rollout_agent.errors import DamagedFiles, DiskError, DiskFailed
from rollout_agent.fetching import Fetcher
from rollout_agent.filetable import FILE_BYTES, FileTable
from rollout_agent.holding import Holding
from rollout_agent.rebuilding import needed_groups, remaining
from rollout_agent.selection import is_closed, select, wanted_groups
from rollout_agent.settled import in_thread
from rollout_agent.source import LoadedHop, Source
from rollout_agent.state import State, Version, table_of
from rollout_agent.statedir import Held
from rollout_agent.weights import Weights, digests
from weight_store.chain import plan_chain
from weight_store.layout import Group, Layout
from weight_store.manifest import Manifest
from weight_store.position import Position

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

LOG_SHARE = 0.10
"""A step whose log would be larger than this part of the model is written as new files."""
_INDEX_BYTES = 4


class Updater:
    """Carries one replica from version to version. ``include``: patterns; ``file_bytes``: where files are cut."""

    def __init__(
        self,
        holding: Holding,
        source: Source,
        pool: Executor,
        *,
        include: Sequence[str] = (),
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._holding = holding
        self._source = source
        self._pool = pool
        self._include = tuple(include)
        self._file_bytes = file_bytes
        self.fetcher = Fetcher(source.store, source.run, pool)
        self.replacing = asyncio.Lock()
        """Held while another version takes the place of the one held, and to begin to tell an engine of that."""
        self._known: tuple[Layout, FileTable, frozenset[int] | None] | None = None

    async def advance(self, position: Position, *, around: bool = False) -> None:
        """Bring the holding to ``position``, which is not older than what it holds.

        ``around``: not by the cheapest way, but by the other one if there is one.
        """
        manifest = await self._source.manifest(position)
        held = self._trusted()
        if held is None:
            await self._beside(manifest, position, None)
            return
        hops = plan_chain(held.position, manifest, position)
        if around:
            start = cheapest_start(held.position, manifest, position)
            hops = plan_without(start, held.position, manifest, position)
        afresh = self._holding.suspect
        if (hops and hops[0].kind == "full") or (afresh and not hops):
            await self._beside(manifest, position, None)
            return
        for number, hop in enumerate(hops):
            loaded = await self._source.load(hop)
            if self._kept_groups(loaded.layout) is None:
                await self._beside(manifest, position, None)
                return
            if afresh or _log_share(loaded) > LOG_SHARE:
                rest = [loaded, *[await self._source.load(later) for later in hops[number + 1 :]]]
                await self._beside(manifest, position, rest)
                return
            await self._by_log(loaded)

    async def repair(self, damaged: Collection[int]) -> None:
        """Refetch the ``damaged`` groups of the version held, in place and hidden from engines meanwhile."""
        holding = self._holding
        held, weights = holding.held, holding.weights
        if held is None or weights is None:
            raise DamagedFiles(f"{holding.places.model} holds nothing that could be repaired")
        await self._keep(held.version, held.layout)
        if damaged:
            manifest = await self._source.manifest(held.position)
            hops = [await self._source.load(hop) for hop in plan_chain(None, manifest, held.position)]
            needed = needed_groups(hops, damaged)
            names = weights.table.places.keys()
            if any(not is_closed((h.layout.groups[i] for i in n), names) for h, n in zip(hops, needed, strict=True)):
                await self._beside(manifest, held.position, None)
                return
            await self._local(holding.hide)
            await self._run(hops, needed, weights)
            if not holding.copies:
                # No log would bring these bytes back after a power loss, nor the name of a file that was gone.
                await self._local(holding.sync_weights)
        await self._local(holding.verify)

    def _trusted(self) -> Held | None:
        """What deltas may be applied to: what is held, unless other tensors are wanted.

        Where a sync failed, to a copy of it: see :mod:`rollout_agent.syncing`.
        """
        holding = self._holding
        if holding.files is None or holding.files.include != self._include:
            return None
        return holding.held if holding.weights is not None and not holding.damage else None

    def _kept_groups(self, layout: Layout) -> frozenset[int] | None:
        """The groups of the kept tensors; None if the layout cuts them so that they hold others as well.

        Remembered, since it takes a look at each piece, and layout and files are mostly those of the step before.
        """
        weights = self._holding.weights
        if weights is None:
            return None
        if self._known is None or self._known[0] is not layout or self._known[1] is not weights.table:
            names = weights.table.places.keys()
            wanted = wanted_groups(layout, names)
            kept = frozenset(group.index for group in wanted) if is_closed(wanted, names) else None
            self._known = layout, weights.table, kept
        return self._known[2]

    async def _keep(self, version: Version, layout: Layout) -> None:
        """Keep layout and assets of a version locally, before anything refers to them."""
        holding = self._holding
        await self._local(holding.records.keep_layout, version.layout, layout)
        for asset in await self._local(presence.missing_assets, holding.disk, holding.places, version.assets):
            data = await self._source.asset(asset)
            await self._local(presence.keep_asset, holding.disk, holding.places, asset, data)
        await self._local(holding.disk.sync_dir, holding.places.assets)

    # ---- one step by a log

    async def _by_log(self, hop: LoadedHop) -> None:
        holding = self._holding
        weights = holding.weights
        if weights is None:
            raise DamagedFiles(f"{holding.places.model} holds no weights")
        wanted = self._kept_groups(hop.layout) or frozenset()
        await self._keep(hop.version, hop.layout)
        # Files that were begun for a version and then not needed: a whole model, perhaps in memory.
        await self._local(beside.clear, holding.disk, holding.places)
        writer = await self._local(holding.begin_log, hop.version)
        table = {index: hop.ranges[index].digest for index in wanted}
        async with AsyncExitStack() as turn:
            try:
                await self.fetcher.run(hop, wanted, weights.base, lambda group, change: writer.add(group.index, change))
                await turn.enter_async_context(self._replace())
            except BaseException:
                await self._discard(writer)
                raise
            await self._local(holding.finish_log, writer, hop.version, hop.layout, table)

    @asynccontextmanager
    async def _replace(self) -> AsyncIterator[None]:
        """Inside the block another version may take the place of the one held; ``EngineLoading`` if none may now."""
        async with self.replacing:
            # What is hidden from engines is of no use to one that reads it.
            if self._holding.whole:
                self._holding.telling.check()
            yield

    async def _discard(self, writer: LogWriter) -> None:
        # Not awaited in a thread: this also runs while a task is being cancelled.
        try:
            writer.discard()
        except DiskError as error:
            _LOG.warning("an unfinished log stays behind: %s", error)

    # ---- new files

    async def _beside(self, manifest: Manifest, position: Position, deltas: list[LoadedHop] | None) -> None:
        """Make ``position`` in new files: from a full, or by ``deltas`` from a copy of what is held."""
        holding = self._holding
        hops = deltas or [await self._source.load(hop) for hop in plan_chain(None, manifest, position)]
        last = hops[-1]
        selected = select([hop.layout for hop in hops], self._include)
        groups = wanted_groups(last.layout, selected)
        table = table_of(last.layout, selected, self._file_bytes)
        weights = await self._local(self._prepare, table, deltas is None)
        try:
            if deltas:
                needed = [{group.index for group in wanted_groups(hop.layout, selected)} for hop in hops]
            else:
                needed = remaining(hops, await self._local(self._digests, weights, groups))
            await self._run(hops, needed, weights)
            await self._local(self._check, weights, groups, last)
            await self._keep(last.version, last.layout)
            await self._local(self._sync, weights)
        finally:
            weights.close()
        state = State(
            run=self._source.run,
            run_id=manifest.run_id,
            version=last.version,
            include=self._include,
            selected=tuple(sorted(selected)) if self._include else (),
            file_bytes=self._file_bytes,
            digests=b"".join(last.ranges[group.index].digest for group in groups).hex(),
        )
        async with self._replace():
            await self._local(holding.install, state, last.layout)

    def _prepare(self, table: FileTable, resume: bool) -> Weights:
        holding = self._holding
        return beside.prepare(holding.disk, holding.places, table, holding.weights, resume=resume)

    def _digests(self, weights: Weights, groups: Sequence[Group]) -> dict[int, bytes]:
        return {group.index: found for group, found in digests(weights, groups, self._pool)}

    def _check(self, weights: Weights, groups: Sequence[Group], last: LoadedHop) -> None:
        for group, found in digests(weights, groups, self._pool):
            expected = last.ranges[group.index].digest
            if found != expected:
                raise DamagedFiles(
                    f"group {group.index} ({group.pieces[0].tensor.name}) of {weights.directory} has digest "
                    f"{found.hex()} after it was written, expected {expected.hex()}: check memory and disk"
                )

    def _sync(self, weights: Weights) -> None:
        disk, places = self._holding.disk, self._holding.places
        try:
            with syncing.noted(disk, places.new_syncing):
                weights.sync()
        except DiskFailed:
            # Pages that failed to reach the disk look clean afterwards: these files are never used.
            beside.clear(disk, places)
            raise

    async def _run(self, hops: Sequence[LoadedHop], needed: Sequence[set[int]], weights: Weights) -> None:
        for hop, groups in zip(hops, needed, strict=True):
            if groups:
                await self.fetcher.run(hop, groups, weights.base, weights.apply)

    async def _local(self, call: Callable[..., _T], *args: object) -> _T:
        return await in_thread(call, *args, on_cancel=self._holding.cancelled.set)


def _log_share(hop: LoadedHop) -> float:
    """How large a log of this hop would be, as a part of the model."""
    log_bytes = nbytes = 0
    for item in hop.ranges.values():
        group = item.group
        sparse = item.changed * (_INDEX_BYTES + group.itemsize)
        log_bytes += group.nbytes if item.full else min(group.nbytes, sparse)
        nbytes += group.nbytes
    return log_bytes / max(1, nbytes)
