"""A training job over any Hugging Face directory: real optimiser steps on its raw tensors, without running its model.

Each rank holds the FP32 masters of its rows of every float tensor and moves them with AdamW. The objective is
synthetic: a linear one whose gradient is noise around a direction that persists, which gives Adam the ratio of its two
moments, and with it the size of updates, that it has in training. Whether the model gets better is not its business;
which weights change is decided as in training: by masters that cross a BF16 rounding boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from trainer_agent import Piece
from weightcast.demo.boxes import LocalBox, rows_of
from weightcast.demo.errors import DemoError
from weightcast.demo.learning import Rewards

_MOVED = (torch.bfloat16, torch.float16, torch.float32)
_SIGNAL = 0.1
"""The persistent part of a gradient, relative to its noise; policy gradients of large batches are about as noisy."""


class FilesJob:
    """The float tensors of ``directory``, sharded by rows; tensors of other dtypes are published as they are."""

    def __init__(self, directory: Path, *, seed: int, learning_rate: float) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._fixed: dict[str, Tensor] = {}
        self._masters: dict[str, Tensor] = {}
        for name, shape, rows in _local_rows(directory, self._rank, self._world_size):
            self._shapes[name] = shape
            if rows.dtype in _MOVED:
                self._masters[name] = torch.nn.Parameter(rows.float())
            else:
                self._fixed[name] = rows
        if not self._masters:
            raise DemoError(f"{directory} has no BF16, F16 or F32 tensor: there is nothing to train")
        self._optimiser = torch.optim.AdamW(self._masters.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0)

    def warm_up(self, steps: int, tell: Callable[[int, float], None]) -> None:
        """Do nothing: the weights of a published model are trained."""

    def step(self, step: int) -> Rewards | None:
        """Take one AdamW step along the synthetic gradient."""
        for ordinal, master in enumerate(self._masters.values()):
            noise = torch.randn(master.shape, generator=self._generator(step, ordinal))
            direction = torch.randn(master.shape, generator=self._generator(0, ordinal))
            master.grad = noise.add_(direction, alpha=_SIGNAL)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return None

    def published(self) -> object:
        """Return pieces, one a tensor of which this rank has rows."""
        return [
            Piece(box.name, box.shape, (box.start, *[0] * (len(box.shape) - 1))[: len(box.shape)], box.tensor)
            for box in self.boxes()
        ]

    def sharded(self) -> Sequence[Tensor]:
        """Return nothing: the masters are plain local tensors, there is no handle on a whole one."""
        return []

    def boxes(self) -> list[LocalBox]:
        """Return this rank's rows: masters cast to BF16, everything else as it is."""
        moved = {name: master.detach().to(torch.bfloat16) for name, master in self._masters.items()}
        return [self._box(name, rows) for name, rows in sorted({**moved, **self._fixed}.items())]

    def state(self) -> dict[str, Tensor]:
        """Return FP32 masters and both moments."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found[f"{name}:master"] = master.detach().clone()
            found |= {f"{name}:{key}": value.clone() for key, value in self._optimiser.state.get(master, {}).items()}
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put masters and moments back."""
        for name, master in self._masters.items():
            master.copy_(state[f"{name}:master"])
            moments = ("step", "exp_avg", "exp_avg_sq")
            self._optimiser.state[master] = {key: state[f"{name}:{key}"].clone() for key in moments}

    def _box(self, name: str, rows: Tensor) -> LocalBox:
        shape = self._shapes[name]
        start = rows_of(shape[0], self._rank, self._world_size).start if shape else 0
        return LocalBox(name, shape, start, rows)

    def _generator(self, step: int, ordinal: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self._seed, step, ordinal, self._rank)) & (2**63 - 1))


def _local_rows(directory: Path, rank: int, world_size: int) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Yield (name, shape of the whole, this rank's rows); a tensor without rows is rank 0's."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                rows = rows_of(shape[0] if shape else 0, rank, world_size)
                if rows:
                    yield name, shape, part[rows.start : rows.stop].clone()
                elif rank == 0 and 0 in (shape or (0,)):
                    yield name, shape, file.get_tensor(name).clone()
