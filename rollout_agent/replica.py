"""A replica: one model directory brought, version by version, to where a run's head is."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from rollout_agent.detours import leads_on
from rollout_agent.disk import Disk, LocalDisk
from rollout_agent.errors import DamagedFiles, DamagedObject, DiskError, NotWhole
from rollout_agent.faults import Faults
from rollout_agent.filetable import FILE_BYTES
from rollout_agent.holding import Holding
from rollout_agent.places import Places
from rollout_agent.settled import in_thread
from rollout_agent.source import Source
from rollout_agent.state import Serving, load, save
from rollout_agent.statedir import check_not_back
from rollout_agent.updating import Updater
from rollout_agent.views import open_views
from rollout_agent.weights import Damage
from weight_store.errors import DigestMismatch, FormatError, ObjectNotFound
from weight_store.head import Head
from weight_store.opening import open_store
from weight_store.position import GENESIS, Position
from weight_store.store import Store

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

CHECKPOINT_LOGS = 16
CHECKPOINT_SHARE = 0.25
"""A checkpoint is due after so many logs, or logs of this part of the model."""
_REPLANS = 3
"""A version may be collected while it is being read; a fresh head leads past it."""


class Replica:
    """One model directory kept on the versions of one run. Made by :meth:`open`; one at a time for a directory.

    The directory is whole at a version, or hidden from engines, at every moment (see :mod:`rollout_agent.gate`).
    """

    def __init__(self, holding: Holding, updater: Updater, source: Source, pool: ThreadPoolExecutor) -> None:
        self._holding = holding
        self._updater = updater
        self._source = source
        self._pool = pool
        self._busy = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._closing = False
        self._heard: str | None = None
        self._stuck: Position | None = None
        """The version held when an object that leads on was last found damaged."""
        self._owned_store: Store | None = None

    @classmethod
    async def open(
        cls,
        *,
        run: str,
        model_dir: str | os.PathLike[str],
        store: Store | str,
        state_dir: str | os.PathLike[str] | None = None,
        include: Sequence[str] = (),
        file_bytes: int = FILE_BYTES,
        disk: Disk | None = None,
        threads: int | None = None,
    ) -> Self:
        """Take ``model_dir`` for ``run`` and bring it to the last version decided there, which needs no store.

        ``state_dir``: where logs and checkpoint lie, on a disk, if ``model_dir`` is in memory. ``include``: patterns
        of the tensors to keep (all if empty). Raises ``WrongRun``, ``ForeignFiles``, ``AgentRunning``, ``DiskError``.
        """
        pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="weightcast")
        opened = open_store(store) if isinstance(store, str) else store
        places = Places.of(Path(model_dir), Path(state_dir) if state_dir is not None else None)
        source = Source(opened, run)
        holding = Holding(disk or LocalDisk(), places, pool, run)
        updater = Updater(holding, source, pool, include=include, file_bytes=file_bytes)
        replica = cls(holding, updater, source, pool)
        if isinstance(store, str):
            replica._owned_store = opened
        try:
            await in_thread(holding.open)
            await replica._recover()
        except BaseException:
            await replica.close()
            raise
        return replica

    # ---- what it holds

    @property
    def run_id(self) -> str | None:
        """The run's id, once known."""
        return self._holding.run_id or self._heard

    @property
    def position(self) -> Position | None:
        """The version that engines can see; None while there is none."""
        return self._holding.held.position if self._holding.held is not None and self._holding.whole else None

    @property
    def step(self) -> int | None:
        """The trainer's label of that version."""
        held = self._holding.held
        return held.version.step if held is not None and self._holding.whole else None

    @property
    def serving(self) -> Position | None:
        """The version that the engine confirmed last, also across restarts of the agent within one boot.

        None once weights were found wrong that it may have loaded.
        """
        holding = self._holding
        found = load(holding.disk, holding.places.serving, Serving)
        same = found is not None and (found.run_id, found.boot_id) == (holding.run_id, holding.disk.boot_id())
        return found.position if found is not None and same else None

    def confirm(self, position: Position) -> None:
        """Note that the engine serves ``position``."""
        holding = self._holding
        found = Serving(run_id=str(holding.run_id), position=position, boot_id=holding.disk.boot_id())
        save(holding.disk, holding.places.serving, found)

    @property
    def telling(self) -> Position | None:
        """The version that an engine was told of and has not answered to, also across restarts within one boot."""
        return self._holding.telling.position

    async def tells(self, position: Position) -> tuple[int, ...]:
        """Note that an engine is about to be told of ``position``: no other version takes its place until :meth:`told`.

        Returns file descriptors for a process to inherit that loads it. Raises ``NotWhole`` if the directory does not
        hold that version, or not for engines to see, and ``EngineSilent`` while one that an earlier agent told loads.
        """
        holding = self._holding
        async with self._updater.replacing:
            if self.position != position or holding.unsettled:
                raise NotWhole(f"{self.model_dir} holds {self.position or 'no whole version'} by now, not {position}")
            return await self._local(holding.telling.begin, str(holding.run_id), position)

    def told(self) -> None:
        """Note that the engine has answered, whatever it said, or loads no more: versions may go on."""
        self._holding.telling.end()

    @property
    def waits(self) -> str:
        """For which engine a version or a repair waits that is ready to be stored, once that takes long; else empty."""
        return self._holding.waits

    @property
    def model_dir(self) -> Path:
        """The directory with the weights."""
        return self._holding.places.model

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Groups whose bytes are not what they should be; empty once repaired."""
        return self._holding.damage

    @property
    def faults(self) -> Faults:
        """What was found damaged and repaired since the start."""
        return self._holding.faults

    @property
    def upsets(self) -> int:
        """How often, since the start, weights were found wrong or lost that engines may have loaded."""
        return self._holding.upsets

    @property
    def nbytes(self) -> int:
        """Size of the weight files held; 0 while there are none."""
        return self._holding.weights.table.nbytes if self._holding.weights is not None else 0

    @property
    def fetched_bytes(self) -> int:
        """Payload bytes fetched so far."""
        return self._updater.fetcher.fetched_bytes

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every kept tensor, and every tied name, as a view of the files. ``NotWhole`` while there is no version.

        A later :meth:`catch_up` shows through the views or leaves them at the old version: ask again after it, and do
        not compute with them while it runs.
        """
        weights = self._holding.weights
        if self.position is None or weights is None:
            raise NotWhole(f"{self.model_dir} holds no whole version yet")
        return open_views(self.model_dir, weights.table)

    # ---- following

    async def catch_up(self) -> Position | None:
        """Bring the directory to the run's head; return its position (None: nothing has been published).

        Whatever is raised, the directory is at a whole version or hidden, and the next call goes on from there:
        ``StoreError`` and ``ObjectNotFound`` (no such run yet), ``FormatError`` and ``DamagedObject`` (the bucket is
        damaged), ``DiskError``, ``WrongRun``, ``Rewind``, ``EngineLoading`` (see :meth:`tells`).
        """
        async with self._turn():
            await self._look()
            missed: Position | None = None
            for attempt in range(_REPLANS):
                try:
                    head = await self._source.head()
                except FormatError:
                    self.faults.stopped_by_object()
                    raise
                self._heard = head.run_id
                if head.position == GENESIS and self._holding.held is None:
                    return None
                try:
                    await self._claim(head)
                    await self._follow(head, around=missed == head.position)
                except (DamagedObject, FormatError):
                    self.faults.stopped_by_object()
                    if attempt == _REPLANS - 1 or not await self._may_leap(head):
                        raise
                    missed = head.position
                except ObjectNotFound:
                    if attempt == _REPLANS - 1:
                        raise
                    missed = head.position
                    _LOG.info("an object of version %s is gone; reading the head again", head.position)
                else:
                    self.faults.followed()
                    return self.position
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _may_leap(self, head: Head) -> bool:
        """Whether to go another way: what leads on from the version held was found damaged once more."""
        held = self._holding.held
        again, self._stuck = self._stuck, held.position if held is not None else None
        if held is None or again != held.position:
            return False
        manifest = await self._source.manifest(head.position)
        if not leads_on(held.position, manifest, head.position):
            return False
        _LOG.warning("the way on from version %s is damaged: taking another one", held.position)
        return True

    async def repair(self) -> None:
        """Hash everything held and refetch what differs. Raises what :meth:`catch_up` raises."""
        async with self._turn():
            await self._look(everything=True)
            await self._mend()

    async def check(self) -> bool:
        """Look whether somebody touched the files, or an engine at the gate found them wrong; repair what differs.

        True if weights had to be repaired. A file that is right inside costs one hash of it. Raises what
        :meth:`catch_up` raises.
        """
        async with self._turn():
            if self._holding.unsettled or self._holding.held is None:
                return False  # catch_up comes first
            before = self.upsets
            await self._local(partial(self._holding.check, asked=True))
            return await self._mend() or self.upsets != before

    async def scrub(self, number: int) -> int:
        """Hash the ``number``-th group held (modulo their count); its size in bytes, 0 while nothing is held.

        If it differs the directory is hidden from engines; the next :meth:`check` or :meth:`catch_up` repairs it.
        """
        async with self._turn():
            return 0 if self._holding.unsettled else await self._local(self._holding.scrub, number)

    async def doubted(self) -> bool:
        """Whether an engine waits at the gate because it found the files wrong."""
        return await self._local(self._is_doubted)

    async def checkpoint(self, *, force: bool = False) -> None:
        """Make the version held survive a reboot without its logs, if that is due (or ``force``).

        Run it beside :meth:`catch_up`, in a task of its own: neither waits for the other for longer than a small file
        takes to write, and a failure (``DiskError``, ``DamagedFiles``) leaves checkpoint and logs as they were.
        """
        holding = self._holding
        async with self._saving:
            async with self._turn():
                saving = await self._local(holding.begin_checkpoint) if self._is_due(force) else None
            if saving is None:
                return
            try:
                while await in_thread(saving.step):
                    if self._closing:
                        return
            except (DiskError, DamagedFiles):
                async with self._turn():
                    if await self._local(holding.fail_checkpoint, saving):
                        raise
                return
            finally:
                saving.close()
            async with self._turn():
                await self._local(holding.end_checkpoint, saving)

    def _is_due(self, force: bool) -> bool:
        holding = self._holding
        if holding.held is None or holding.weights is None:
            return False
        share = holding.log_bytes / max(1, holding.weights.table.nbytes)
        lost = holding.unsaved
        uncopied = holding.copies and holding.files is not None and not holding.files.checkpoint
        return force or lost or uncopied or len(holding.logs) >= CHECKPOINT_LOGS or share >= CHECKPOINT_SHARE

    async def close(self) -> None:
        """Stop and let go of the directory. Calling it twice is allowed."""
        self._closing = True
        self._holding.cancelled.set()
        async with self._saving:
            pass  # a checkpoint that is being made ends after its present step
        await in_thread(self._pool.shutdown)
        await in_thread(self._holding.close)
        store, self._owned_store = self._owned_store, None
        if store is not None:
            await store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._busy:
            self._holding.cancelled.clear()
            yield

    async def _local(self, call: Callable[..., _T], *args: object) -> _T:
        return await in_thread(call, *args, on_cancel=self._holding.cancelled.set)

    def _is_doubted(self) -> bool:
        return self._holding.doubted

    async def _look(self, *, everything: bool = False) -> None:
        """Know what is held: recover if a step was left half-way, hash what somebody touched (or ``everything``)."""
        if self._holding.unsettled:
            await self._recover()
        await self._local(partial(self._holding.check, everything=everything))

    async def _recover(self) -> None:
        await self._local(self._holding.recover)

    async def _claim(self, head: Head) -> None:
        if head.run_id != self._holding.run_id and head.position != GENESIS:
            await self._source.check_owner(head)
        await self._local(self._holding.claim, head.run_id)
        self._source.run_id = head.run_id

    async def _follow(self, head: Head, *, around: bool) -> None:
        held = self._holding.held
        check_not_back(held, head)
        if around:
            # The head has not moved, so the same way, or the repair of what is held, would meet the same gap again:
            # most often deltas that were collected. What the head reaches from its newest full never is.
            await self._updater.advance(head.position, around=True)
            return
        try:
            await self._mend()
            await self._updater.advance(head.position)
        except (DamagedObject, DigestMismatch, DamagedFiles):
            # Either side may be wrong: an altered shard, or a base that was altered under us.
            await self._recover()
            if not self._holding.damage:
                raise
            await self._mend()
            await self._updater.advance(head.position)

    async def _mend(self) -> bool:
        """Repair what is hidden because it differs, by the cheapest route; whether there was anything."""
        holding = self._holding
        if holding.held is None or holding.weights is None or holding.suspect or holding.whole:
            return False
        await self._local(holding.mend)
        if self.position is not None:
            return True
        damaged = {item.group.index for item in holding.damage}
        if damaged:
            _LOG.info("refetching %d groups of version %s", len(damaged), holding.held.position)
        await self._updater.repair(damaged)
        if holding.damage:
            raise DamagedFiles(f"{self.model_dir} is still damaged after a repair: {holding.damage[0]}")
        holding.faults.repaired("store", len(damaged))
        return True
