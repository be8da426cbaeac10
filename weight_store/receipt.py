"""A receipt: one rank's durable report of one shard. Created once; the first one wins.

The shard is an eight-byte magic, then the rank's groups in layout order, back to back, without padding; so sizes are
enough to find every group. Digests are per group (XXH3-128 of the rebuilt bytes) and per block of the shard (SHA-256).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar, Self

from pydantic import Field, StringConstraints, model_validator

from weight_store.errors import FormatError
from weight_store.layout import Group, Layout
from weight_store.position import Position
from weight_store.records import Count, Nonce, Part, Rank, Record, Sha256, Uuid, Version

SHARD_MAGIC = b"WCSHARD\x01"
"""First bytes of a shard; the last one is the format version of the shard."""
BLOCK_BYTES = 8 << 20
DIGEST_BYTES = 16
GROUP_OVERHEAD_BYTES = 4096
"""A payload may exceed its group's raw bytes by at most this; a larger claim is refused before it is fetched."""

Hex = Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{2})*$")]
_ASSET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
AssetName = Annotated[str, StringConstraints(pattern=f"^{_ASSET_NAME.pattern}$")]

_NO_ASSETS = (
    *(".safetensors", ".index.json"),
    *(".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".sh"),
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
    ".tmp",
)
"""Weights and their indexes; what is run; what is unpickled; what agents call a file that they have not finished."""


def is_asset_name(name: str) -> bool:
    """Whether a file beside the weights may be called ``name``: nothing that is run, unpickled or loaded as weights."""
    return bool(_ASSET_NAME.fullmatch(name)) and ".." not in name and not name.lower().endswith(_NO_ASSETS)


class Asset(Part):
    """A small file beside the weights (config.json, tokenizer): name in the model directory and its content."""

    name: AssetName
    sha256: Sha256
    size: Annotated[int, Field(ge=0, le=1 << 30)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_asset_name(self.name):
            raise ValueError(f"{self.name!r} may not be the name of an asset")
        return self


class FullRef(Part):
    """An extra full of an older position, one rank's part: its receipt by digest and its cost in bytes."""

    version: Version
    sha256: Sha256
    size: Annotated[int, Field(ge=1, le=64 << 20)]
    shard_bytes: Count


class Receipt(Record):
    """``v/<version>/<rank>.json``, or ``v/<version>/full/<rank>.json`` for the rank's part of an extra full.

    ``sizes``, ``changed`` and ``digests`` have one entry a group owned by the rank, in layout order; ``full`` lists
    the entries whose payload needs no base, in order. ``fulls``: the rank's parts of extra fulls that are durable.
    """

    FORMAT: ClassVar[str] = "weightcast.receipt"

    run_id: Uuid
    version: Version
    rank: Rank
    parent: Position
    layout: Sha256
    extra_full: bool = False
    nonce: Nonce
    shard_bytes: Count
    sizes: tuple[Count, ...]
    changed: tuple[Count, ...]
    digests: Hex
    full: tuple[Count, ...] = ()
    blocks: Hex
    fulls: tuple[FullRef, ...] = Field(default=(), max_length=64)
    assets: tuple[Asset, ...] = Field(default=(), max_length=256)

    @model_validator(mode="after")
    def _check(self) -> Self:
        groups = len(self.sizes)
        if len(self.changed) != groups or len(self.digests) != 2 * DIGEST_BYTES * groups:
            raise ValueError("columns of a receipt differ in length")
        if any(entry >= groups for entry in self.full):
            raise ValueError("full names a group that is not there")
        if any(a >= b for a, b in pairwise(self.full)):
            raise ValueError("full names a group twice or out of order")
        if self.extra_full and len(self.full) != groups:
            raise ValueError("an extra full has a group that is not full")
        older = [ref.version for ref in self.fulls]
        if len(set(older)) != len(older) or any(version >= self.version for version in older):
            raise ValueError("fulls names a version twice, or one that is not older than this")
        if self.shard_bytes != len(SHARD_MAGIC) + sum(self.sizes):
            raise ValueError("shard_bytes is not the sum of its groups")
        if len(self.blocks) != 64 * -(-self.shard_bytes // BLOCK_BYTES):
            raise ValueError("number of blocks does not fit shard_bytes")
        if len({asset.name for asset in self.assets}) != len(self.assets):
            raise ValueError("an asset name appears twice")
        return self

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each group starts in the shard (bytes)."""
        return tuple(accumulate(self.sizes[:-1], initial=len(SHARD_MAGIC))) if self.sizes else ()

    def digest(self, entry: int) -> bytes:
        """XXH3-128 of the rebuilt bytes of the rank's ``entry``-th group."""
        return bytes.fromhex(self.digests[2 * DIGEST_BYTES * entry : 2 * DIGEST_BYTES * (entry + 1)])

    def block_sha256(self, block: int) -> str:
        """SHA-256 (hex) of bytes ``block * BLOCK_BYTES`` onwards of the shard."""
        return self.blocks[64 * block : 64 * (block + 1)]


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Where one group lies in a shard and what it must become."""

    group: Group
    offset: int
    size: int
    digest: bytes
    changed: int
    full: bool


def group_ranges(receipt: Receipt, layout: Layout) -> list[GroupRange]:
    """Pair a receipt with its layout. ``FormatError`` if it does not report exactly the rank's groups within bounds."""
    check_receipt(receipt, layout)
    full = set(receipt.full)
    return [
        GroupRange(group, receipt.offsets[i], receipt.sizes[i], receipt.digest(i), receipt.changed[i], i in full)
        for i, group in enumerate(layout.owned(receipt.rank))
    ]


def check_receipt(receipt: Receipt, layout: Layout) -> None:
    """``FormatError`` naming rank and tensor unless the receipt reports exactly its rank's groups within bounds."""
    owned = layout.owned_indices.get(receipt.rank, [])
    if len(receipt.sizes) != len(owned):
        missing = layout.owned(receipt.rank)[len(receipt.sizes)].pieces[0] if len(receipt.sizes) < len(owned) else None
        what = f"{missing.tensor.name} {missing.box} is missing" if missing else "it reports groups it does not own"
        raise FormatError(
            f"rank {receipt.rank} reports {len(receipt.sizes)} groups of {len(owned)} that it owns: {what}"
        )
    for index, size, changed in zip(owned, receipt.sizes, receipt.changed, strict=True):
        elements, nbytes = layout.group_sizes[index]
        if size > nbytes + GROUP_OVERHEAD_BYTES:
            raise FormatError(
                f"rank {receipt.rank} claims {size} bytes for the group of {_first_name(layout, index)}, "
                f"whose weights have {nbytes}"
            )
        if changed > elements:
            raise FormatError(
                f"rank {receipt.rank} reports more changes than weights in the group of {_first_name(layout, index)}"
            )


def _first_name(layout: Layout, group: int) -> str:
    return layout.names[layout.piece_tensor[layout.group_start[group]]]
