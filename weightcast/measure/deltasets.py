"""Folders of real deltas: one base and, for each kind of training, what every optimiser step changed.

::

    base.safetensors                  BF16 tensors
    <regime>/step001.safetensors      what step 1 changed: for each changed tensor <name>.index (int32, flat, ascending)
    <regime>/step002.safetensors      and <name>.bits (int16: the new BF16 bits); step n starts from step n - 1

An unchanged tensor is left out. Metadata is free text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import codec
from weightcast.measure.errors import MeasureError
from weightcast.measure.pairs import Pair

BASE_FILE = "base.safetensors"
_STEP_FILE = re.compile(r"step(\d{3,6})\.safetensors")


@dataclass(frozen=True, slots=True)
class Weights:
    """BF16 tensors as raw bits: uint16, 1-D, by name, and their shapes."""

    bits: Mapping[str, NDArray[np.uint16]]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class DeltaSet:
    """A folder of deltas: its ``path``, and for each regime how many steps follow each other from 1."""

    path: Path
    steps: Mapping[str, int]


def is_delta_set(path: Path) -> bool:
    """Whether ``path`` looks like such a folder."""
    return (path / BASE_FILE).is_file()


def open_delta_set(path: Path) -> DeltaSet:
    """Look for regimes in ``path``; :class:`MeasureError` if there is no base or no step."""
    if not is_delta_set(path):
        raise MeasureError(f"{path} holds no {BASE_FILE}: it is no folder of deltas (python -m bench.make_deltas)")
    steps: dict[str, int] = {}
    for folder in sorted(child for child in path.iterdir() if child.is_dir()):
        found = {int(match[1]) for file in folder.iterdir() if (match := _STEP_FILE.fullmatch(file.name))}
        if found:
            if found != set(range(1, len(found) + 1)):
                raise MeasureError(f"{folder}: steps must follow each other from 1; there are {sorted(found)}")
            steps[folder.name] = len(found)
    if not steps:
        raise MeasureError(f"{path} holds no <regime>/step001.safetensors")
    return DeltaSet(path, steps)


def read_step(deltas: DeltaSet, regime: str, step: int) -> list[Pair]:
    """All tensors before and after ``step`` (1 is the first) of ``regime``, sorted by name."""
    if not 1 <= step <= deltas.steps.get(regime, 0):
        raise MeasureError(f"{deltas.path} has no step {step} of {regime}")
    base = _load(deltas.path / BASE_FILE)
    if not base or any(tensor.dtype != torch.bfloat16 for tensor in base.values()):
        raise MeasureError(f"{deltas.path / BASE_FILE} must hold BF16 tensors and nothing else")
    now = {name: codec.to_bits(tensor).copy() for name, tensor in base.items()}
    before = now
    for number in range(1, step + 1):
        before = now
        now = _apply(deltas.path / regime / f"step{number:03d}.safetensors", before)
    return [Pair(name, "BF16", tuple(base[name].shape), before[name], now[name]) for name in sorted(base)]


def write_base(path: Path, weights: Weights, note: str) -> None:
    """Create the folder and its base. Raises :class:`MeasureError` if that cannot be written."""
    tensors = {
        name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(weights.shapes[name])
        for name, bits in weights.bits.items()
    }
    _save(path / BASE_FILE, tensors, {"note": note})


def write_step(path: Path, regime: str, step: int, before: Weights, after: Weights) -> int:
    """Write what ``step`` changed; returns the number of changed weights. Errors as for :func:`write_base`."""
    arrays: dict[str, torch.Tensor] = {}
    changed = 0
    for name, old in before.bits.items():
        index = np.flatnonzero(old != after.bits[name])
        if index.size:
            arrays[f"{name}.index"] = torch.from_numpy(index.astype(np.int32))
            arrays[f"{name}.bits"] = torch.from_numpy(after.bits[name][index].view(np.int16))
            changed += index.size
    _save(path / regime / f"step{step:03d}.safetensors", arrays, {"parent": str(step - 1)})
    return changed


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise MeasureError(f"{path} cannot be written: {error}") from None


def _apply(path: Path, before: Mapping[str, codec.dtypes.Bits]) -> dict[str, codec.dtypes.Bits]:
    after = dict(before)
    delta = _load(path)
    for key in (key for key in delta if key.endswith(".index")):
        name = key.removesuffix(".index")
        index, bits = delta[key].numpy(), delta.get(f"{name}.bits")
        if name not in before or bits is None or index.dtype != np.int32 or bits.dtype != torch.int16:
            raise MeasureError(f"{path}: {name} needs a tensor of that name in the base, int32 .index and int16 .bits")
        ascends = bool((index[1:] > index[:-1]).all())
        if index.shape != tuple(bits.shape) or index.ndim != 1 or not ascends:
            raise MeasureError(f"{path}: {key} must ascend and be as long as {name}.bits")
        if index.size and not 0 <= index[0] <= index[-1] < before[name].size:
            raise MeasureError(f"{path}: {key} points outside the tensor of {before[name].size} weights")
        after[name] = before[name].copy()
        after[name][index] = bits.numpy().view(np.uint16)
    return after


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise MeasureError(f"{path} cannot be read as safetensors: {error}") from None
