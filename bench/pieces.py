"""What the records cost that list a model's pieces: `python -m bench.pieces 1000000`.

A mixture-of-experts model on 64 ranks: half of its pieces are whole expert matrices, each on the one rank that has that
expert; the others are rows of matrices that all ranks share evenly, as FSDP cuts them. Prints CPU seconds, the peak of
resident memory so far, and sizes, a step a line: first of the records one by one, then of what coordinator, one rank
and one agent do with them at the start, at a first full, and at the deltas after it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench.sides import RUN, RUN_ID, AgentSide, CoordinatorSide, RankSide, Side, write_receipts
from weight_store.boxes import Box
from weight_store.grouping import resolve_layout
from weight_store.keys import offer_key
from weight_store.layout import Layout
from weight_store.offer import Offer
from weight_store.opening import open_store
from weight_store.reading import read_layout
from weight_store.records import pack, sha256_hex, unpack

T = TypeVar("T")

RANKS = 64
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


def measure_records(pieces: int) -> None:
    """Go through the life of a layout, record by record."""
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
    timed("layout: digest", lambda: sha256_hex(written))
    layout = timed("layout: read", lambda: Layout.parse(unpack(packed)))
    timed("layout: groups", lambda: layout.groups)
    print(f"{len(layout.names)} tensors, {len(layout.piece_tensor)} pieces, {len(layout.groups)} groups")


async def measure_sides(pieces: int, directory: Path) -> None:
    """Publish three versions: a full, the first delta, and one as all later ones are."""
    print(f"{'':<46}{'CPU':>9}{'memory':>12}{'peak':>12}")
    bucket, files = directory / "bucket", directory / "model"
    bucket.mkdir()
    files.mkdir()
    store = open_store(f"file://{bucket}")
    with (
        closing(Side(bucket, partial(CoordinatorSide, ranks=RANKS))) as coordinator,
        closing(Side(bucket, partial(RankSide, rank=0))) as rank,
        closing(Side(bucket, partial(AgentSide, directory=files))) as agent,
    ):
        run_id, term = told(coordinator, "coordinator: take over", "take_over", "a")
        for number in range(RANKS):
            offer = offer_of(number, pieces).model_copy(update={"run_id": run_id, "term": term})
            await store.create(offer_key(RUN, term, number), pack(offer.to_bytes()))
        sha256 = told(coordinator, "coordinator: offers and layout", "agree")
        layout = await read_layout(store, RUN, sha256)
        own_offer = offer_of(0, pieces).model_copy(update={"run_id": run_id, "term": term}).to_bytes()
        told(rank, "one rank: layout and plan", "settle", own_offer, sha256)
        for ordinal, what in enumerate(("full", "first delta", "later delta")):
            opened = told(coordinator, f"coordinator: {what}, open", "open", term, sha256, ordinal)
            told(rank, f"one rank: {what}, find its pieces", "look_up")
            told(rank, f"one rank: {what}, receipt", "report", opened)
            digests = await write_receipts(store, layout, opened)
            told(coordinator, f"coordinator: {what}, receipts and sealing", "seal", term, opened.version, digests)
            if not ordinal:
                told(agent, "one agent: full, layout, receipts and files", "join")
                continue
            told(agent, f"one agent: {what}, receipts", "load")
            if ordinal == 1:
                told(agent, f"one agent: {what}, choose groups", "choose")
            told(agent, f"one agent: {what}, find their bytes", "find")
            told(agent, f"one agent: {what}, digests", "record")
    with closing(Side(bucket, partial(CoordinatorSide, ranks=RANKS))) as restarted:
        opened = told(restarted, "coordinator, restarted: open", "open", term, sha256, 3)
        digests = await write_receipts(store, layout, opened)
        told(restarted, "coordinator, restarted: receipts and sealing", "seal", term, opened.version, digests)
    await store.close()


def told(side: Side, what: str, method: str, *arguments: Any) -> Any:
    """Call a side and print what it took."""
    result, spent = side.call(method, *arguments)
    print(f"{what:<46}{spent.cpu_s:7.2f} s{spent.now_mib:8.0f} MiB{spent.peak_mib:8.0f} MiB", flush=True)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.pieces", description=__doc__)
    parser.add_argument("pieces", type=int, nargs="?", default=1_000_000)
    pieces = parser.parse_args().pieces
    measure_records(pieces)
    with tempfile.TemporaryDirectory(prefix="weightcast-pieces-") as directory:
        asyncio.run(measure_sides(pieces, Path(directory)))


if __name__ == "__main__":
    main()
