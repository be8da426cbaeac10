"""The other projects' own packages, used if they are installed (``pip install --group bench``), and only to measure.

``fireworks-delta-compression`` holds ARCv2 and ARCv3, ``basilica-sdk`` holds PULSEPT1. ARCv3 decodes by unpickling;
here it only ever gets the bytes that it has just made itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from codec import dtypes
from codec.dtypes import Bits
from weightcast.measure.coders import Coded, Coder, Delta
from weightcast.measure.pairs import Pair

NOT_INSTALLED = "not installed"
_ARC = "fireworks_delta_compression"
_PULSE = "basilica._pulse.codec"


@dataclass(frozen=True, slots=True)
class Arc(Coder):
    """ARCv2 or ARCv3, tensor by tensor. The size is that of the payloads: no safetensors header, no checksums."""

    name: str
    format: str
    hashes: bool = False  # not with XXH3: with Adler-32

    def refusal(self, delta: Delta) -> str | None:
        """It wants its package."""
        return None if importlib.util.find_spec(_ARC) else NOT_INSTALLED

    def before_encode(self, delta: Delta) -> Any:
        """The package."""
        return importlib.import_module(_ARC)

    def encode(self, delta: Delta, state: Any) -> Coded:
        """Each tensor's bytes and checksum."""
        sent = [
            state.delta_compress(src=_tensor(p, p.base), dst=_tensor(p, p.new), compression_format=self.format)
            for p in delta.pairs
        ]
        return Coded(sum(compressed.numel() for compressed, _ in sent), sent)

    def smallest(self, delta: Delta, coded: Coded) -> Coded:
        """ARCv3 takes the smallest of what is ready in time; here it may take its time, which nobody counts."""
        if self.format != "arc_v3":
            return coded
        with _patience():
            patient = self.encode(delta, self.before_encode(delta))
        return min(coded, patient, key=lambda c: c.size)

    def before_decode(self, delta: Delta) -> Any:
        """The package; it returns new tensors."""
        return importlib.import_module(_ARC)

    def decode(self, delta: Delta, coded: Coded, state: Any) -> list[torch.Tensor]:
        """New tensors."""
        return [
            state.delta_decompress(
                src=_tensor(pair, pair.base),
                compressed_diff=compressed,
                checksum=checksum,
                compression_format=self.format,
            )
            for pair, (compressed, checksum) in zip(delta.pairs, coded.payload, strict=True)
        ]

    def decoded(self, delta: Delta, result: list[torch.Tensor]) -> Iterator[tuple[Bits, Bits]]:
        """Tensor by tensor."""
        return zip((pair.new for pair in delta.pairs), map(dtypes.to_bits, result), strict=True)


@dataclass(frozen=True, slots=True)
class Pulse(Coder):
    """PULSEPT1 format 3: the whole file with its header. It copies and hashes the new weights, as it always does."""

    name: str = "PULSEPT1 v3"
    hashes: bool = True

    def refusal(self, delta: Delta) -> str | None:
        """It wants its package, and BF16."""
        if not importlib.util.find_spec("basilica"):
            return NOT_INSTALLED
        return None if delta.dtypes <= {"BF16"} else "BF16 only"

    def before_encode(self, delta: Delta) -> Any:
        """A snapshot of the base, which it holds between steps."""
        return importlib.import_module(_PULSE).Snapshot({pair.name: _tensor(pair, pair.base) for pair in delta.pairs})

    def encode(self, delta: Delta, state: Any) -> Coded:
        """One patch."""
        package = importlib.import_module(_PULSE)
        model = package.ModelMeta("model", "xxh3_128:" + "0" * 32, sum(pair.new.size for pair in delta.pairs))
        items = [(pair.name, _tensor(pair, pair.new)) for pair in delta.pairs]
        blob, _ = state.encode_step(items, step=1, base_step=0, model=model, format_version=3)
        return Coded(len(blob), blob)

    def before_decode(self, delta: Delta) -> Any:
        """A snapshot of the base, to be patched in place."""
        return self.before_encode(delta)

    def decode(self, delta: Delta, coded: Coded, state: Any) -> Any:
        """Patch the snapshot."""
        state.apply_patch(importlib.import_module(_PULSE).parse_patch(coded.payload))
        return state

    def decoded(self, delta: Delta, result: Any) -> Iterator[tuple[Bits, Bits]]:
        """Tensor by tensor."""
        return ((pair.new, dtypes.to_bits(result.tensor(pair.name))) for pair in delta.pairs)


PEERS: tuple[Coder, ...] = (Pulse(), Arc("ARCv3", "arc_v3"), Arc("ARCv2", "arc_v2"))


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """ARCv3 waits for all its candidates: as with ARC3_CANDIDATE_WAIT_MULTIPLIER, which it reads once, on import."""
    arc3: Any = importlib.import_module(f"{_ARC}.backends.arc3")
    usual = arc3._CANDIDATE_WAIT_MULTIPLIER
    arc3._CANDIDATE_WAIT_MULTIPLIER = 1e6  # times what its first candidate took
    try:
        yield
    finally:
        arc3._CANDIDATE_WAIT_MULTIPLIER = usual


def _tensor(pair: Pair, bits: Bits) -> torch.Tensor:
    tensor = dtypes.from_bits(bits, dtypes.find(pair.dtype), pair.shape, "torch")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{pair.name} is no torch tensor")
    return tensor
