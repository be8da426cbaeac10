"""What the training program does at each step, for the demo's own policy: FSDP2, AdamW, policy gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightcast.demo.boxes import LocalBox, rows_of
from weightcast.demo.errors import DemoError
from weightcast.demo.learning import Rewards, policy_step, warm_up_step
from weightcast.demo.policy import Policy, PolicyConfig

_WARM_UP_RATE = 1e-3
_WARM_UP_BATCH = 32
_PROMPTS = 4
_SAMPLES = 8


class Job(Protocol):
    """A training job of one rank. Steps are collective; everything else is local."""

    def warm_up(self, steps: int, tell: Callable[[int, float], None]) -> None:
        """Bring fresh weights to a state from which learning goes on; ``tell(done, loss)`` after each step."""

    def step(self, step: int) -> Rewards | None:
        """Take optimiser step ``step``; None if the objective has no rewards."""

    def published(self) -> object:
        """Return what is handed to ``Publisher.publish``."""

    def sharded(self) -> Sequence[Tensor]:
        """Return the tensors of which no rank may make a full copy."""

    def boxes(self) -> list[LocalBox]:
        """Return the rank's part of the weights as published, made without the publishing code."""

    def state(self) -> dict[str, Tensor]:
        """Return the rank's masters and optimiser moments."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` returned."""


class PolicyJob:
    """The demo's own policy, sharded among all ranks by rows."""

    def __init__(self, *, seed: int, learning_rate: float) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._seed, self._learning_rate = seed, learning_rate
        torch.manual_seed(seed)
        self._model = Policy(PolicyConfig())
        mesh = init_device_mesh("cpu", (self._world_size,))
        # Sampling runs the model several times on the same weights: gathered once, they stay until the backward pass.
        for layer in self._model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self._model, mesh=mesh, reshard_after_forward=False)
        self._parameters = [(name, p) for name, p in self._model.named_parameters() if isinstance(p, DTensor)]
        self._optimiser = self._adam(learning_rate)

    def warm_up(self, steps: int, tell: Callable[[int, float], None]) -> None:
        """Learn the form of the task from worked sums, so that rewards vary and weights look trained."""
        optimiser = self._adam(_WARM_UP_RATE)
        generator = self._generator(0)
        for done in range(1, steps + 1):
            tell(done, warm_up_step(self._model, optimiser, generator, _WARM_UP_BATCH))

    def step(self, step: int) -> Rewards | None:
        """Take one policy-gradient step; what it samples depends on seed, step and rank alone."""
        return policy_step(self._model, self._optimiser, self._generator(step), prompt_count=_PROMPTS, samples=_SAMPLES)

    def published(self) -> object:
        """Return the state dict: DTensors, with the tied head under its own name."""
        return self._model.state_dict()

    def sharded(self) -> Sequence[Tensor]:
        """Return all parameters."""
        return [parameter for _, parameter in self._parameters]

    def boxes(self) -> list[LocalBox]:
        """Return the local rows of each parameter, cast here."""
        return [self._box(name, parameter) for name, parameter in self._parameters]

    def state(self) -> dict[str, Tensor]:
        """Return FP32 masters and both moments of this rank's rows."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters:
            found[f"{name}:master"] = parameter.to_local().detach().clone()
            for key, value in self._optimiser.state.get(parameter, {}).items():
                found[f"{name}:{key}"] = (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put masters and moments back."""
        for name, parameter in self._parameters:
            parameter.to_local().copy_(state[f"{name}:master"])
            if f"{name}:step" in state:
                self._optimiser.state[parameter] = {
                    "step": state[f"{name}:step"].clone(),
                    "exp_avg": _like(parameter, state[f"{name}:exp_avg"]),
                    "exp_avg_sq": _like(parameter, state[f"{name}:exp_avg_sq"]),
                }

    def _adam(self, learning_rate: float) -> torch.optim.AdamW:
        parameters = [parameter for _, parameter in self._parameters]
        return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 1009 + self._rank)

    def _box(self, name: str, parameter: DTensor) -> LocalBox:
        local = parameter.to_local().detach()
        rows = rows_of(parameter.shape[0], self._rank, self._world_size)
        if len(rows) != local.shape[0]:
            raise DemoError(f"{name}: rank {self._rank} holds {local.shape[0]} rows where {len(rows)} were expected")
        return LocalBox(name, tuple(parameter.shape), rows.start, local.to(torch.bfloat16))


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local.clone(),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def checked_step(job: Job, step: int) -> tuple[Rewards | None, int, int, float]:
    """Take a step and count, over all ranks, the published weights that it changed.

    Returns rewards, changed, elements and seconds. ``DemoError`` if not one weight changed.
    """
    before = job.boxes()
    started = time.perf_counter()
    earned = job.step(step)
    step_s = time.perf_counter() - started
    changed = sum(_differing(old.tensor, new.tensor) for old, new in zip(before, job.boxes(), strict=True))
    counts = torch.tensor([changed, sum(box.tensor.numel() for box in before)])
    dist.all_reduce(counts)
    if not counts[0]:
        raise DemoError(f"step {step} changed no published weight: the learning rate is too small")
    return earned, int(counts[0]), int(counts[1]), step_s


def _differing(old: Tensor, new: Tensor) -> int:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
    return int((old.view(bits) != new.view(bits)).sum())


def save_checkpoint(job: Job, path: Path) -> None:
    """Write the rank's state; the file appears complete or not at all."""
    temporary = path.with_suffix(".tmp")
    save_file(job.state(), str(temporary))
    temporary.replace(path)


def load_checkpoint(job: Job, path: Path) -> None:
    """Go on from :func:`save_checkpoint`; ``DemoError`` if there is none."""
    if not path.exists():
        raise DemoError(f"there is no checkpoint to resume from at {path}")
    job.load_state(load_file(str(path)))
