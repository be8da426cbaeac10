"""Pairs of tensors, before and after, as raw bits; and checkpoints on disk as a source of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

import codec
from codec.dtypes import Bits
from trainer_agent.checkpoint import open_checkpoint
from weight_store.grouping import GROUP_BYTES, layer_order
from weightcast.measure.errors import MeasureError


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One tensor before and after: ``base`` and ``new`` are 1-D unsigned bits of ``dtype`` (a safetensors name)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: Bits
    new: Bits

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, once."""
        return self.new.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Consecutive pairs of one dtype, joined as the agents join them before they code."""

    dtype: str
    base: Bits
    new: Bits


def groups(pairs: Sequence[Pair]) -> list[Group]:
    """Join consecutive pairs of one dtype until a group holds 32 MiB; copies. Empty tensors vanish."""
    runs: list[list[Pair]] = []
    held = GROUP_BYTES
    for pair in pairs:
        if held >= GROUP_BYTES or runs[-1][0].dtype != pair.dtype:
            runs.append([])
            held = 0
        runs[-1].append(pair)
        held += pair.nbytes
    joined = [
        Group(run[0].dtype, np.concatenate([p.base for p in run]), np.concatenate([p.new for p in run])) for run in runs
    ]
    return [group for group in joined if group.new.size]


class TensorFiles:
    """The tensors of a safetensors file, or of a Hugging Face directory of them; a context manager.

    Files are mapped and one tensor is read at a time. Raises :class:`MeasureError` for what cannot be read;
    a directory whose index is damaged raises ``InvalidPieces`` of the trainer agent.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise MeasureError(f"{path} does not exist: name a safetensors file or a directory of them")
        self.path = path
        self._files = open_checkpoint(path).files if path.is_dir() else (path,)
        self._open = contextlib.ExitStack()
        self._home: dict[str, Any] = {}

    def __enter__(self) -> TensorFiles:
        try:
            for file in self._files:
                opened = self._open.enter_context(safe_open(file, framework="pt"))
                self._home |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError) as error:
            self._open.close()
            raise MeasureError(f"{file} cannot be read as safetensors: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> list[str]:
        """The names, in the order of the layers."""
        return sorted(self._home, key=lambda name: (layer_order(name), name))

    def read(self, name: str) -> tuple[str, tuple[int, ...], Bits]:
        """Dtype, shape and bits of one tensor."""
        try:
            tensor = self._home[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise MeasureError(f"{self.path}: {name} cannot be read: {error}") from None
        return codec.dtype_of(tensor).name, tuple(tensor.shape), codec.to_bits(tensor)


def read_pairs(base: TensorFiles, new: TensorFiles) -> Iterator[Pair]:
    """Every tensor of two open checkpoints of one model, in the order of the layers.

    Raises :class:`MeasureError` if they do not hold the same tensors, with the same shapes and dtypes.
    """
    only = set(base.names) ^ set(new.names)
    if only:
        name = min(only)
        having, lacking = (base, new) if name in base.names else (new, base)
        raise MeasureError(f"{name} is in {having.path} and not in {lacking.path}: a delta needs the same tensors")
    if not base.names:
        raise MeasureError(f"{base.path} holds no tensors")
    for name in base.names:
        dtype, shape, old = base.read(name)
        new_dtype, new_shape, now = new.read(name)
        if (dtype, shape) != (new_dtype, new_shape):
            raise MeasureError(
                f"{name} is {dtype} {list(shape)} in {base.path} and {new_dtype} {list(new_shape)} in {new.path}"
            )
        yield Pair(name, dtype, shape, old, now)
