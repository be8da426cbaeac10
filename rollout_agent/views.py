"""Weights as torch tensors over the files themselves: no copy, no load."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from codec.dtypes import BITS_OF_SIZE, find, from_bits
from rollout_agent.filetable import FileTable

if TYPE_CHECKING:
    import torch

_U64 = struct.Struct("<Q")


def open_views(directory: Path, table: FileTable) -> dict[str, torch.Tensor]:
    """Every tensor of ``table`` and every tied name. Stores into them stay private; the files do not change.

    Mapped copy-on-write, so that torch may treat them as ordinary tensors.
    """
    found: dict[str, torch.Tensor] = {}
    for number, file in enumerate(table.files):
        with (directory / file.name).open("rb") as opened:
            data = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        for tensor in file.tensors:
            place = table.places[tensor.name]
            if place.file != number:
                raise AssertionError("unreachable: a file lists the tensors placed in it")
            bits = data[place.offset : place.offset + tensor.nbytes].view(BITS_OF_SIZE[tensor.itemsize])
            found[tensor.name] = cast("torch.Tensor", from_bits(bits, find(tensor.dtype), tensor.shape, "torch"))
    found.update(_tied(found, table.aliases))
    return found


def _tied(found: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    return {alias: found[target] for alias, target in aliases.items()}
