"""What the records cost that list a model's pieces: `python -m bench.pieces 1000000`.

A mixture-of-experts model on 64 ranks: half of its pieces are whole expert matrices, each on the one rank that has that
expert; the others are rows of matrices that all ranks share evenly, as FSDP cuts them. Prints CPU seconds, the peak of
resident memory so far, and sizes, a step a line.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from weight_store.boxes import Box
from weight_store.grouping import resolve_layout
from weight_store.layout import Layout
from weight_store.manifest import Manifest, seal
from weight_store.offer import Offer
from weight_store.position import GENESIS
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Receipt, group_ranges
from weight_store.records import pack, sha256_hex, unpack
from weight_store.version import Open

T = TypeVar("T")

RANKS = 64
RUN_ID = "00000000-0000-4000-8000-000000000000"
EXPERTS_A_LAYER = 1024
EXPERT = (512, 1024)
"""1 MiB of BF16, as in models with a thousand and more small experts a layer."""
ROWS = (64 * RANKS, 256)

_Row = tuple[str, tuple[int, ...], Box]


def rows_of(rank: int, pieces: int) -> list[_Row]:
    """The boxes of one rank: ``pieces // RANKS`` of them, one half whole experts, one half rows of shared matrices."""
    share = pieces // RANKS
    rows: list[_Row] = []
    for i in range(share // 2):
        layer, expert = divmod(i * RANKS + rank, EXPERTS_A_LAYER)
        name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
        rows.append((name, EXPERT, Box((0, 0), EXPERT)))
    height = ROWS[0] // RANKS
    for i in range(share - share // 2):
        name = f"model.layers.{i // 8}.shared.{i % 8}.weight"
        rows.append((name, ROWS, Box((height * rank, 0), (height, ROWS[1]))))
    return rows


def offer_of(rank: int, pieces: int) -> Offer:
    """What one rank offers."""
    rows = rows_of(rank, pieces)
    return Offer(
        run_id=RUN_ID,
        term=1,
        rank=rank,
        world_size=RANKS,
        names=tuple(name for name, _, _ in rows),
        dtypes=("BF16",) * len(rows),
        itemsizes=(2,) * len(rows),
        shapes=tuple(shape for _, shape, _ in rows),
        offsets=tuple(box.offsets for _, _, box in rows),
        sizes=tuple(box.sizes for _, _, box in rows),
    )


def receipt_of(rank: int, layout: Layout, sha256: str) -> Receipt:
    """A rank's report of a full at version 1, with digests of nothing."""
    groups = layout.owned(rank)
    sizes = tuple(group.nbytes for group in groups)
    shard_bytes = len(SHARD_MAGIC) + sum(sizes)
    return Receipt(
        run_id=RUN_ID,
        version=1,
        rank=rank,
        parent=GENESIS,
        layout=sha256,
        nonce="0" * 16,
        shard_bytes=shard_bytes,
        sizes=sizes,
        changed=tuple(group.elements for group in groups),
        digests="0" * 32 * len(groups),
        full=tuple(range(len(groups))),
        blocks="0" * 64 * -(-shard_bytes // BLOCK_BYTES),
    )


def timed(what: str, work: Callable[[], T]) -> T:
    """Do ``work`` and print what it took."""
    gc.collect()
    started_s = time.process_time()
    result = work()
    seconds = time.process_time() - started_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    size = f"{len(result) / 1e6:10.1f} MB" if isinstance(result, bytes) else ""
    print(f"{what:<34}{seconds:8.2f} s{peak_mib:8.0f} MiB{size}", flush=True)
    return result


def measure(pieces: int) -> None:
    """Go through the life of a layout and of a version of ``pieces`` pieces."""
    print(f"{pieces} pieces on {RANKS} ranks: CPU seconds, peak of memory so far, size")
    offer = timed("one rank: make the offer", lambda: offer_of(0, pieces))
    raw = timed("one rank: write the offer", offer.to_bytes)
    timed("one rank: pack the offer", lambda: pack(raw))
    stored = [pack(offer_of(rank, pieces).to_bytes()) for rank in range(RANKS)]
    offers = timed("all offers: read", lambda: [Offer.parse(unpack(data)) for data in stored])
    layout = timed("layout: resolve", lambda: resolve_layout(offers))
    offers.clear()
    written = timed("layout: write", layout.to_bytes)
    packed = timed("layout: pack", lambda: pack(written))
    sha256 = timed("layout: digest", lambda: sha256_hex(written))
    layout = timed("layout: read", lambda: Layout.parse(unpack(packed)))
    timed("layout: groups", lambda: layout.groups)
    receipts = [receipt_of(rank, layout, sha256) for rank in range(RANKS)]
    reports = timed("all receipts: write", lambda: [receipt.to_bytes() for receipt in receipts])
    parsed = timed("all receipts: read", lambda: [Receipt.parse(data) for data in reports])
    opened = Open(
        run_id=RUN_ID,
        version=1,
        term=1,
        step=0,
        ordinal=0,
        parent=GENESIS,
        layout=sha256,
        world_size=RANKS,
        write_id="0" * 16,
    )
    sealed = timed("manifest: seal", lambda: seal(opened, layout, list(zip(parsed, reports, strict=True)), None))
    manifest = timed("manifest: write", sealed.to_bytes)
    timed("manifest: read", lambda: Manifest.parse(manifest))
    timed("all receipts: ranges of groups", lambda: [group_ranges(receipt, layout) for receipt in parsed])
    print(f"{len(layout.names)} tensors, {len(layout.piece_tensor)} pieces, {len(layout.groups)} groups")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.pieces", description=__doc__)
    parser.add_argument("pieces", type=int, nargs="?", default=1_000_000)
    measure(parser.parse_args().pieces)


if __name__ == "__main__":
    main()
