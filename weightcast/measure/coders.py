"""Every codec behind one face: what it is called, whether it applies, how one delta is encoded and decoded.

A coder works on all tensors of a delta at once, as it would be sent. ``decode`` brings new weights into being: in
place where the codec can, on a copy that was made before the clock started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import codec
from codec import ulp
from codec.dtypes import Bits
from weightcast.measure import layouts
from weightcast.measure.errors import MeasureError
from weightcast.measure.pairs import Group, Pair


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """One delta in the two shapes that coders want, of the same bytes."""

    pairs: Sequence[Pair]
    groups: Sequence[Group]

    @property
    def dtypes(self) -> set[str]:
        """All element types in it."""
        return {pair.dtype for pair in self.pairs}


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """What an encoder made: its size on the wire, and whatever its decoder takes."""

    size: int
    payload: Any


class Coder(ABC):
    """One codec. ``hashes`` says whether encode and decode hash the new bytes with XXH3-128."""

    name: str
    hashes: bool

    def refusal(self, delta: Delta) -> str | None:
        """Why it cannot code ``delta``, in a few words; None if it can."""
        return None

    def before_encode(self, delta: Delta) -> Any:
        """What ``encode`` starts from, made afresh for each call before the clock starts."""
        return None

    @abstractmethod
    def encode(self, delta: Delta, state: Any) -> Coded:
        """Code ``delta``."""

    def smallest(self, delta: Delta, coded: Coded) -> Coded:
        """What ``encode`` can make of ``delta`` at best, where that is luck; ``coded`` is the best it did make."""
        return coded

    def before_decode(self, delta: Delta) -> Any:
        """What ``decode`` works on, made afresh for each call before the clock starts."""
        return None

    @abstractmethod
    def decode(self, delta: Delta, coded: Coded, state: Any) -> Any:
        """Make the new weights."""

    @abstractmethod
    def decoded(self, delta: Delta, result: Any) -> Iterator[tuple[Bits, Bits]]:
        """Pairs of new bits as they should be, and as ``decode`` made them."""


@dataclass(frozen=True, slots=True)
class Ours(Coder):
    """This project's codec as the agents call it: groups, each with its digest, which counts."""

    name: str
    method: str
    hashes: bool = True

    def refusal(self, delta: Delta) -> str | None:
        """What a method cannot code goes out raw; where that is everything, it is not the method's size."""
        codable = self.method != "ulp_v1" or any(map(ulp.applies_to, delta.dtypes))
        return None if codable else "floats of 8, 16 and 32 bits only"

    def encode(self, delta: Delta, state: None) -> Coded:
        """Payloads and digests."""
        coded = [codec.encode_group(g.base, g.new, g.dtype, method=self.method) for g in delta.groups]
        return Coded(sum(len(c.payload) + len(c.digest) for c in coded), coded)

    def before_decode(self, delta: Delta) -> list[Bits]:
        """Copies of the bases."""
        return [group.base.copy() for group in delta.groups]

    def decode(self, delta: Delta, coded: Coded, state: list[Bits]) -> list[Bits]:
        """Decode, compare the digest, store: in place."""
        for group, sent, bits in zip(delta.groups, coded.payload, state, strict=True):
            change = codec.decode_group(bits, sent.payload, group.dtype, bits.size)
            if change.digest != sent.digest:
                raise MeasureError(f"{self.name}: a group decodes to another digest than it was encoded with")
            codec.apply_change(bits, change)
        return state

    def decoded(self, delta: Delta, result: list[Bits]) -> Iterator[tuple[Bits, Bits]]:
        """Group by group."""
        return zip((group.new for group in delta.groups), result, strict=True)


@dataclass(frozen=True, slots=True)
class Layout(Coder):
    """A layout of :mod:`weightcast.measure.layouts` over whole tensors of 16-bit weights."""

    name: str
    encoder: Callable[[Sequence[Pair]], bytes]
    decoder: Callable[[bytes, Sequence[Pair]], list[Bits]]
    hashes: bool = False

    def refusal(self, delta: Delta) -> str | None:
        """These layouts hold BF16."""
        return None if delta.dtypes <= {"BF16"} else "BF16 only"

    def encode(self, delta: Delta, state: None) -> Coded:
        """One file."""
        blob = self.encoder(delta.pairs)
        return Coded(len(blob), blob)

    def decode(self, delta: Delta, coded: Coded, state: None) -> list[Bits]:
        """New arrays."""
        return self.decoder(coded.payload, delta.pairs)

    def decoded(self, delta: Delta, result: list[Bits]) -> Iterator[tuple[Bits, Bits]]:
        """Tensor by tensor."""
        return zip((pair.new for pair in delta.pairs), result, strict=True)


@dataclass(frozen=True, slots=True)
class XorZstd(Coder):
    """XOR with the base, then zstd level 1."""

    name: str = "XOR + zstd-1"
    hashes: bool = False

    def encode(self, delta: Delta, state: None) -> Coded:
        """One zstd frame a group."""
        blobs = layouts.xor_zstd_encode(delta.groups)
        return Coded(sum(map(len, blobs)), blobs)

    def decode(self, delta: Delta, coded: Coded, state: None) -> list[Bits]:
        """New arrays."""
        return layouts.xor_zstd_decode(coded.payload, delta.groups)

    def decoded(self, delta: Delta, result: list[Bits]) -> Iterator[tuple[Bits, Bits]]:
        """Group by group."""
        return zip((group.new for group in delta.groups), result, strict=True)


OURS: tuple[Coder, ...] = (Ours("ulp_v1", "ulp_v1"), Ours("fields_v1", "fields_v1"))
AUTO: Coder = Ours("auto", "auto")
LAYOUTS: tuple[Coder, ...] = (
    Layout("PULSESync", layouts.pulsesync_encode, layouts.pulsesync_decode),
    Layout("TRL draft", partial(layouts.trl_encode, step=1), layouts.trl_decode),
    XorZstd(),
)
