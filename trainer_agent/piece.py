"""Pieces: boxes of tensors in checkpoint coordinates, and the dtype in which each is published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from codec.dtypes import TORCH_NAMES
from trainer_agent.errors import InvalidPieces
from weight_store.boxes import Box, Dims
from weight_store.offer import MAX_AXES, METADATA

_NAME = re.compile(r"[\x21-\x7e]{1,512}")

_DTYPES = {name: getattr(torch, torch_name) for torch_name, name in TORCH_NAMES.items() if hasattr(torch, torch_name)}

DEFAULT_KEEP_DTYPE = ("*e_score_correction_bias", "*_scale_inv", "*_scale")
"""Tensors that inference reads in the trainer's own precision: router bias, scales of quantised weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """``tensor`` holds the elements of the box at ``offsets`` of the tensor ``name`` of shape ``global_shape``.

    Names, shapes and offsets are those of the checkpoint (Hugging Face), whatever the trainer's own are. The tensor
    may be on any device, of any strides, but must have the box's shape. Raises ``InvalidPieces``.
    """

    name: str
    global_shape: Dims
    offsets: Dims
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(n) for n in self.global_shape))
        object.__setattr__(self, "offsets", tuple(int(n) for n in self.offsets))
        check_tensor(self.name, self.global_shape)
        if type(self.tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise InvalidPieces(
                f"{self.name}: a piece holds a plain torch tensor, not {type(self.tensor).__name__}; "
                "from_state_dict takes DTensors apart"
            )
        if self.tensor.layout != torch.strided or self.tensor.is_quantized or self.tensor.is_meta:
            raise InvalidPieces(f"{self.name}: a sparse, quantised or meta tensor has no plain elements to publish")
        if not self.box.inside(self.global_shape):
            raise InvalidPieces(f"{self.name}: box {self.box} lies outside its shape {list(self.global_shape)}")

    @property
    def box(self) -> Box:
        """The piece's box in checkpoint coordinates."""
        return Box(self.offsets, tuple(self.tensor.shape))


def check_tensor(name: str, shape: Dims) -> None:
    """Raise ``InvalidPieces`` if no tensor of this name or with so many axes can be published."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidPieces(
            f"{str(name)[:80]!r} is not a tensor name: use 1 to 512 printable ASCII characters without spaces"
        )
    if name == METADATA:
        raise InvalidPieces(f"{METADATA} is no tensor name: safetensors files keep their metadata under it")
    if len(shape) > MAX_AXES:
        raise InvalidPieces(f"{name} has {len(shape)} axes: tensors have 0 to {MAX_AXES}")


class Row(NamedTuple):
    """What a rank offers: a piece without its elements. ``dtype`` is the one published (safetensors name)."""

    name: str
    dtype: str
    itemsize: int
    shape: Dims
    box: Box


@dataclass(frozen=True, slots=True)
class Casting:
    """Which dtype a tensor is published in: ``dtype`` for floats of 16 bits and more, unless ``keep`` matches.

    Integers and floats of 8 bits and less are what the trainer made of them: they are never cast.
    """

    dtype: torch.dtype | None
    keep: tuple[str, ...] = DEFAULT_KEEP_DTYPE

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The published dtype of tensor ``name`` that the trainer holds as ``dtype``."""
        if self.dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
            return dtype
        return dtype if any(fnmatchcase(name, pattern) for pattern in self.keep) else self.dtype

    def row(self, piece: Piece) -> Row:
        """The piece as it is offered. Raises ``InvalidPieces`` for a dtype that checkpoints cannot hold."""
        dtype = self.of(piece.name, piece.tensor.dtype)
        return Row(piece.name, dtype_name(piece.name, dtype), dtype.itemsize, piece.global_shape, piece.box)


def make_casting(dtype: torch.dtype | None, keep: str | Sequence[str]) -> Casting:
    """Check the arguments of ``publish``. Raises ``InvalidPieces`` for a dtype that is no float of 16 bits or more."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidPieces(f"dtype is a torch.dtype or None, not {dtype!r}")
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise InvalidPieces(f"weights are cast to a float dtype of 16 bits or more, or not at all (None); not {dtype}")
    return Casting(dtype, (keep,) if isinstance(keep, str) else tuple(keep))


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; ``InvalidPieces`` naming the tensor if there is none."""
    try:
        return TORCH_NAMES[str(dtype).removeprefix("torch.")]
    except KeyError:
        raise InvalidPieces(f"{name}: checkpoints have no dtype for {dtype}; view the tensor as torch.uint8") from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name that :func:`dtype_name` gave."""
    found: torch.dtype = _DTYPES[name]
    return found
