"""What checkpoints would cost as deltas: how much changed, by how many ulps, and the bytes of each format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import codec
from weight_store.grouping import GROUP_BYTES
from weightcast.measure import layouts
from weightcast.measure.pairs import Group, Pair, groups
from weightcast.measure.steps import memoryless_bits, steps_of

BUCKETS = (1, 2, 3, 4, 8, 16, 64, 256, 1 << 16)
"""Upper ends of the histogram's buckets, in ulps; a last one holds everything larger."""


@dataclass(frozen=True, slots=True)
class TensorStat:
    """One tensor: how many of its elements changed, and the median and largest step of those, in ulps."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    median_step: float
    largest_step: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Changes by ``low`` to ``high`` ulps: how many went up and down. The last bucket has no upper end."""

    low: int
    high: int | None
    up: int
    down: int


@dataclass(frozen=True, slots=True)
class FormatStat:
    """One way to send the delta, by one rank: how pieces are grouped depends on the layout of the job."""

    name: str
    bytes: int
    percent: float


@dataclass(frozen=True, slots=True)
class Stat:
    """Everything ``weightcast codec stat`` tells. ``floor_bytes`` is the entropy given the old exponents."""

    elements: int
    raw_bytes: int
    changed: int
    floor_bytes: float
    formats: tuple[FormatStat, ...]
    histogram: tuple[Bucket, ...]
    tensors: tuple[TensorStat, ...]


def measure(pairs: Iterable[Pair]) -> Stat:
    """Read ``pairs`` once, holding no more of them than one group (32 MiB, or the largest tensor)."""
    tensors: list[TensorStat] = []
    up, down, sizes = Counter[int](), Counter[int](), Counter[str]()
    raw = 0
    floor = 0.0
    for batch in _batches(pairs):
        for pair in batch:
            stat, steps = _tensor(pair)
            tensors.append(stat)
            up.update(_bucketed(steps[steps > 0]))
            down.update(_bucketed(-steps[steps < 0]))
            raw += pair.nbytes
        for group in groups(batch):
            floor += memoryless_bits(group.base, group.new, group.dtype) / 8
        sizes.update(_sizes(batch))
    return Stat(
        elements=sum(stat.elements for stat in tensors),
        raw_bytes=raw,
        changed=sum(stat.changed for stat in tensors),
        floor_bytes=floor,
        formats=tuple(FormatStat(name, sizes[name], 100 * sizes[name] / max(1, raw)) for name in _FORMATS),
        histogram=tuple(_histogram(up, down)),
        tensors=tuple(tensors),
    )


_FORMATS = (
    "auto",
    "fields_v1",
    "XOR + zstd-1",
    "PULSESync",  # one zstd frame a group instead of one for all
    "TRL draft",  # 48 bits a change, no header
    "full",
)


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    batch: list[Pair] = []
    held = 0
    for pair in pairs:
        batch.append(pair)
        held += pair.nbytes
        if held >= GROUP_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _sizes(batch: Sequence[Pair]) -> dict[str, int]:
    """Bytes of ``batch`` in each format; layouts that hold 16-bit weights take others as they are."""
    joined = groups(batch)
    narrow = [pair for pair in batch if pair.dtype == "BF16"]
    others = sum(pair.nbytes for pair in batch if pair.dtype != "BF16")
    changed = sum(int(np.count_nonzero(pair.base != pair.new)) for pair in narrow)
    return {
        **{method: sum(_group_bytes(group, method) for group in joined) for method in ("auto", "fields_v1")},
        "XOR + zstd-1": sum(map(len, layouts.xor_zstd_encode(joined))),
        "PULSESync": len(layouts.pulsesync_encode(narrow)) + others,
        "TRL draft": changed * layouts.TRL_BITS_PER_CHANGE // 8 + others,
        "full": sum(map(_full_bytes, joined)),
    }


def _group_bytes(group: Group, method: str) -> int:
    return len(codec.encode_group(group.base, group.new, group.dtype, method=method).payload) + codec.DIGEST_BYTES


def _full_bytes(group: Group) -> int:
    return len(codec.encode_group(None, group.new, group.dtype).payload) + codec.DIGEST_BYTES


def _tensor(pair: Pair) -> tuple[TensorStat, NDArray[np.int64]]:
    _, steps = steps_of(pair.base, pair.new, pair.dtype)
    size = np.abs(steps)
    stat = TensorStat(
        name=pair.name,
        dtype=pair.dtype,
        shape=pair.shape,
        elements=pair.new.size,
        changed=steps.size,
        median_step=float(np.median(size)) if size.size else 0.0,
        largest_step=int(size.max(initial=0)),
    )
    return stat, steps


def _bucketed(sizes: NDArray[np.int64]) -> dict[int, int]:
    """Index of the bucket -> how many of ``sizes``, all positive, fall into it."""
    index, counts = np.unique(np.searchsorted(BUCKETS, sizes), return_counts=True)
    return dict(zip(index.tolist(), counts.tolist(), strict=True))


def _histogram(up: Counter[int], down: Counter[int]) -> Iterator[Bucket]:
    for index, low in enumerate((1, *(high + 1 for high in BUCKETS))):
        if up[index] or down[index]:
            yield Bucket(low, BUCKETS[index] if index < len(BUCKETS) else None, up[index], down[index])
