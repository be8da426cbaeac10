"""Pairs of tensors, before and after, as raw bits; and checkpoints on disk as a source of them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

import codec
from codec.dtypes import Bits
from trainer_agent.checkpoint import open_checkpoint
from trainer_agent.errors import InvalidPieces
from trainer_agent.offering import make_offer
from trainer_agent.piece import Row, check_tensor
from weight_store.boxes import Box
from weight_store.errors import LayoutError
from weight_store.grouping import layer_order, resolve_layout
from weight_store.layout import Group as LayoutGroup
from weight_store.layout import Layout
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
    """Pieces of one dtype, joined as the agents join them before they code."""

    dtype: str
    base: Bits
    new: Bits


def groups(pairs: Sequence[Pair]) -> list[Group]:
    """The groups that one rank makes of ``pairs``; copies. Empty tensors vanish.

    Raises :class:`MeasureError` for what no run could publish, such as a name that comes twice.
    """
    solid = [pair for pair in pairs if pair.new.size]
    by_name = {pair.name: pair for pair in solid}
    return [_joined(by_name, group) for group in _layout(solid).groups] if solid else []


def _layout(pairs: Sequence[Pair]) -> Layout:
    try:
        for pair in pairs:
            check_tensor(pair.name, pair.shape)
        rows = [Row(p.name, p.dtype, p.new.itemsize, p.shape, Box((0,) * len(p.shape), p.shape)) for p in pairs]
        run_id = str(uuid.UUID(int=0))
        offer = make_offer(rows, run_id=run_id, term=1, rank=0, world_size=1, frozen=(), aliases={})
        return resolve_layout([offer])
    except (InvalidPieces, LayoutError) as error:
        raise MeasureError(f"these tensors could not be published: {error}") from None


def _joined(pairs: Mapping[str, Pair], group: LayoutGroup) -> Group:
    cuts = [(pairs[piece.tensor.name], _slices(piece.box)) for piece in group.pieces]
    return Group(
        group.dtype,
        np.concatenate([pair.base.reshape(pair.shape)[box].reshape(-1) for pair, box in cuts]),
        np.concatenate([pair.new.reshape(pair.shape)[box].reshape(-1) for pair, box in cuts]),
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


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
