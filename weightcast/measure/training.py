"""Real policy-gradient steps, for real deltas: three kinds of masters, one optimiser, any small language model.

The step is GRPO's: several sampled answers to each prompt, a reward that a program computes, advantages normalised
within the group, AdamW with clipped gradients. The forward pass runs in FP32 on the masters; what is published is BF16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from codec import to_bits
from weightcast.demo.policy import Policy, PolicyConfig
from weightcast.demo.task import answers, prompts, rewards
from weightcast.measure.deltasets import Weights
from weightcast.measure.errors import MeasureError
from weightcast.measure.pairs import Pair

REGIMES: Mapping[str, str] = {
    "steady": "FP32 masters, placed uniformly inside the BF16 rounding interval: long into training",
    "early": "FP32 masters, exactly at the BF16 values: the first steps after loading a BF16 checkpoint",
    "pure": "no masters, the parameters themselves are rounded to BF16 after each step: trainers without FP32 masters",
}
_TRIES = 8
"""Batches drawn until some group has two different rewards: without them the gradient is zero."""


class Task(Protocol):
    """What the policy is rewarded for."""

    @property
    def answer_tokens(self) -> int:
        """Tokens to sample after a prompt."""

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw prompts of one length: int64[count, time]."""

    def rewards(self, prompt: Tensor, answer: Tensor) -> Tensor:
        """Score answers, int64[count, answer_tokens]: float32[count]."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training run. ``prompts`` and ``samples`` (answers a prompt) make one batch; ``lr`` is AdamW's."""

    regime: str
    lr: float = 1e-6
    seed: int = 0
    prompts: int = 4
    samples: int = 4


def published(model: nn.Module) -> Weights:
    """The weights as they are published: BF16 bits by name; tied ones once."""
    bits, shapes = {}, {}
    for name, parameter in model.named_parameters():
        bits[name] = to_bits(parameter.detach().to(torch.bfloat16)).view(np.uint16).copy()
        shapes[name] = tuple(parameter.shape)
    return Weights(bits, shapes)


def train(model: nn.Module, task: Task, training: Training) -> Iterator[Weights]:
    """Start from the BF16 values of ``model`` and yield the published weights: before, then after each step, forever.

    ``model`` stays as it is. Raises :class:`MeasureError` for an unknown regime, or if no answer ever earns more
    than another.
    """
    if training.regime not in REGIMES:
        raise MeasureError(f"unknown regime {training.regime!r}; known are {', '.join(REGIMES)}")
    generator = torch.Generator().manual_seed(training.seed)
    model = copy.deepcopy(model)
    _place_masters(model, training.regime, generator)
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.999), weight_decay=0.01)
    yield published(model)
    while True:
        _step(model, optimiser, task, training, generator)
        if training.regime == "pure":
            _round(model)
        yield published(model)


@cache
def tiny_policy(seed: int = 0, steps: int = 40) -> Policy:
    """A model of 0.3 million weights that has begun to learn sums: a few seconds, nothing downloaded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Policy(PolicyConfig(width=128, inner=256, layers=2, heads=2, key_value_heads=1))
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        prompt = prompts(32, generator)
        loss = -_log_probabilities(model, prompt, answers(prompt)).mean()
        _descend(model, optimiser, loss)
    return model


@dataclass(frozen=True, slots=True)
class Sums:
    """The task of the tiny policy: add two numbers of two digits."""

    answer_tokens: int = 3

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """``a a + b b =``."""
        return prompts(count, generator)

    def rewards(self, prompt: Tensor, answer: Tensor) -> Tensor:
        """A third for every right digit, one more for all."""
        return rewards(prompt, answer)


def tiny_pairs(regime: str, *, step: int = 2, seed: int = 0) -> list[Pair]:
    """What step ``step`` changes in the tiny policy."""
    weights = train(tiny_policy(seed), Sums(), Training(regime, seed=seed))
    history = [next(weights) for _ in range(step + 1)]
    before, after = history[-2:]
    return [
        Pair(name, "BF16", before.shapes[name], before.bits[name], after.bits[name]) for name in sorted(before.bits)
    ]


def _place_masters(model: nn.Module, regime: str, generator: torch.Generator) -> None:
    """Round to BF16; for "steady", move each master to anywhere that still rounds to the same BF16 value."""
    _round(model)
    if regime != "steady":
        return
    with torch.no_grad():
        for parameter in model.parameters():
            half = (1 << 15) - 1  # BF16 is the upper half of FP32: this much less or more rounds back
            offset = torch.randint(-half, half + 1, parameter.shape, generator=generator, dtype=torch.int32)
            bits = parameter.view(torch.int32)
            zero = bits & 0x7FFFFFFF == 0
            bits += torch.where(zero, offset.abs(), offset)


def _round(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def _step(
    model: nn.Module, optimiser: torch.optim.Optimizer, task: Task, training: Training, generator: torch.Generator
) -> None:
    for _ in range(_TRIES):
        prompt = task.prompts(training.prompts, generator).repeat_interleave(training.samples, dim=0)
        answer = _sample(model, prompt, task.answer_tokens, generator)
        reward = task.rewards(prompt, answer).view(training.prompts, training.samples)
        centred = reward - reward.mean(dim=1, keepdim=True)
        if centred.abs().max() > 0:
            break
    else:
        raise MeasureError("all answers to each prompt earn the same: the task teaches this model nothing")
    advantage = centred / (reward.std(dim=1, keepdim=True) + 1e-6)
    loss = -(advantage.flatten()[:, None] * _log_probabilities(model, prompt, answer)).mean()
    _descend(model, optimiser, loss)


def _descend(model: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


@torch.no_grad()
def _sample(model: Callable[[Tensor], Tensor], prompt: Tensor, count: int, generator: torch.Generator) -> Tensor:
    tokens = prompt
    for _ in range(count):
        probability = model(tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probability, 1, generator=generator)], dim=1)
    return tokens[:, prompt.shape[1] :]


def _log_probabilities(model: nn.Module, prompt: Tensor, answer: Tensor) -> Tensor:
    """Of each answer token: float32[batch, time]."""
    logits = model(torch.cat([prompt, answer[:, :-1]], dim=1))[:, prompt.shape[1] - 1 :]
    nats = functional.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none")
    return -nats.view(answer.shape)
