"""Fills a tray from the bucket: receipts that nobody reported here, and signs that other coordinators left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.bucket import RunBucket
from coordinator.decisions import Unreadable
from coordinator.tray import Tray
from weight_store.receipt import Receipt

_PARALLEL = 32
_MOST_SIGNS = 1000


async def gather_receipts(bucket: RunBucket, tray: Tray, ranks: Sequence[int], reported: str = "") -> bool:
    """Read the receipts of ``ranks`` that the bucket holds by now; whether there were any new ones.

    ``reported``: the SHA-256 of what the rank says that it wrote, for a single rank that said so.
    """
    limit = asyncio.Semaphore(_PARALLEL)

    async def one(rank: int) -> tuple[Receipt, bytes] | Unreadable | None:
        async with limit:
            return await bucket.receipt(tray.opened.version, rank, reported)

    wanted = [rank for rank in ranks if rank not in tray.receipts]
    found = await asyncio.gather(*(one(rank) for rank in wanted))
    for rank, receipt in zip(wanted, found, strict=True):
        if receipt is not None:
            tray.receipts[rank] = receipt
    return any(receipt is not None for receipt in found)


async def gather_signs(bucket: RunBucket, tray: Tray) -> bool:
    """See whether other coordinators were told of progress since this was last asked."""
    seen = tray.shared_n
    for _ in range(_MOST_SIGNS):
        if not await bucket.has_sign(tray.opened.version, tray.shared_n):
            break
        tray.shared_n += 1
    return tray.shared_n > seen
