"""From the offers of a term to its one layout, recomputed from the bucket by any coordinator that is asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence

from coordinator.ambient import Ambient
from coordinator.bucket import RunBucket
from coordinator.decisions import View
from coordinator.errors import LayoutRefused
from coordinator.waking import Shared
from weight_store.errors import FormatError, LayoutError
from weight_store.grouping import resolve_layout
from weight_store.layout import Layout, check_same_tensors
from weight_store.manifest import Manifest
from weight_store.offer import Offer

_PARALLEL = 16


class Collecting:
    """The offers of one term by a world of one size. ``outcome``: the layout's SHA-256, or why there is none.

    Offers are created once, so what was read stays true and an outcome is final.
    """

    def __init__(self, bucket: RunBucket, view: View, term: int, world_size: int, ambient: Ambient) -> None:
        self._bucket = bucket
        self._run_id = view.head.run_id
        self._term = term
        self._world_size = world_size
        self._ambient = ambient
        self._offers: dict[int, Offer] = {}
        self._lock = asyncio.Lock()
        self.outcome: str | LayoutRefused | None = None
        self.look = Shared(self._look)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose offer has not been seen."""
        if self.outcome is not None:
            return ()
        return tuple(rank for rank in range(self._world_size) if rank not in self._offers)

    async def _look(self) -> bool:
        await self.fetch(self.missing)
        return True

    async def fetch(self, ranks: Iterable[int]) -> None:
        """Read the offers of ``ranks`` that the bucket holds by now."""
        limit = asyncio.Semaphore(_PARALLEL)

        async def fetch_one(rank: int) -> None:
            async with limit:
                await self._fetch_one(rank)

        wanted = [rank for rank in ranks if rank not in self._offers]
        if self.outcome is None:
            # Not a TaskGroup: its ExceptionGroup would hide the store's error from those who answer it.
            await asyncio.gather(*(fetch_one(rank) for rank in wanted))

    async def _fetch_one(self, rank: int) -> None:
        try:
            offer = await self._bucket.offer(self._term, rank)
        except FormatError as error:
            self._refuse(f"the offer of rank {rank} cannot be used: {error}")
            return
        if offer is None:
            return
        expected = (self._run_id, self._term, rank, self._world_size)
        if (offer.run_id, offer.term, offer.rank, offer.world_size) != expected:
            self._refuse(
                f"rank {rank} offers as rank {offer.rank} of a world of {offer.world_size} in term {offer.term}, "
                f"expected a world of {self._world_size} in term {self._term}: start all ranks as one launch"
            )
            return
        self._offers[rank] = offer

    async def resolve(self, current: Manifest | None) -> None:
        """Settle the outcome if all offers are there. ``current``: the head's manifest, whose tensors must stay."""
        async with self._lock:
            if self.outcome is not None or self.missing:
                return
            before = None if current is None else await self._bucket.layout(current.layout)
            offers = [self._offers[rank] for rank in range(self._world_size)]
            try:
                layout: Layout = await self._ambient.offload(_resolve, offers, before)
            except LayoutError as error:
                self._refuse(str(error))
                return
            self.outcome = await self._bucket.write_layout(layout)
            self._offers.clear()

    def _refuse(self, sentence: str) -> None:
        self.outcome = LayoutRefused(sentence)
        self._offers.clear()


def _resolve(offers: Sequence[Offer], before: Layout | None) -> Layout:
    with _uncollected():
        layout = resolve_layout(offers)
        if before is not None:
            check_same_tensors(before.tensors, layout.tensors)
    return layout


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Hold the collector of cycles off: it would walk over millions of tuples again and again, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def check_layout(bucket: RunBucket, current: Manifest | None, sha256: str, world_size: int) -> None:
    """``LayoutRefused`` unless the layout is in the bucket, is for ``world_size`` and has the run's tensors."""
    if current is not None and (current.layout, current.world_size) == (sha256, world_size):
        return
    layout = await bucket.find_layout(sha256)
    if layout is None:
        raise LayoutRefused(f"layout {sha256[:12]} is not in the bucket: report the offers of all ranks first")
    if layout.world_size != world_size:
        raise LayoutRefused(
            f"layout {sha256[:12]} is for a world of {layout.world_size}, the version asked for {world_size}"
        )
    if current is not None and current.layout != sha256:
        before = await bucket.layout(current.layout)
        try:
            check_same_tensors(before.tensors, layout.tensors)
        except LayoutError as error:
            raise LayoutRefused(str(error)) from None
