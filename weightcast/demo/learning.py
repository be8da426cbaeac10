"""One optimiser step of the demo's policy: supervised to warm up, policy gradient afterwards.

Both work on a sharded model as on a whole one; what crosses ranks is gradients (FSDP's business) and four numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from weightcast.demo.errors import DemoError
from weightcast.demo.task import ANSWER_TOKENS, PROMPT_TOKENS, answers, prompts, rewards


@dataclass(frozen=True, slots=True)
class Rewards:
    """What one batch of all ranks earned. ``spread`` is the standard deviation within groups of one prompt."""

    mean: float
    spread: float


def warm_up_step(model: nn.Module, optimiser: torch.optim.Optimizer, generator: torch.Generator, batch: int) -> float:
    """Take one supervised step on ``batch`` worked sums; returns the loss of this rank."""
    prompt = prompts(batch, generator)
    loss = -_answer_log_probabilities(model, prompt, answers(prompt)).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())


def policy_step(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    *,
    prompt_count: int,
    samples: int,
) -> Rewards:
    """Sample ``samples`` answers to each of ``prompt_count`` prompts, reward them, take one REINFORCE step.

    An answer's advantage is its reward minus the mean of its prompt's group. ``DemoError`` if no group of any rank
    has two different rewards: the gradient would be zero and the step an empty one.
    """
    prompt = prompts(prompt_count, generator).repeat_interleave(samples, dim=0)
    answer = _sample(model, prompt, generator)
    reward = rewards(prompt, answer).view(prompt_count, samples)
    advantage = reward - reward.mean(dim=1, keepdim=True)
    earned = _over_all_ranks(reward, advantage)
    if earned.spread == 0:
        raise DemoError("the reward has no variance: every answer to a prompt earned the same, nothing can be learned")
    log_probability = _answer_log_probabilities(model, prompt, answer).sum(dim=1)
    loss = -(advantage.flatten() * log_probability).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return earned


@torch.no_grad()
def _sample(model: nn.Module, prompt: Tensor, generator: torch.Generator) -> Tensor:
    tokens = prompt
    for _ in range(ANSWER_TOKENS):
        probability = model(tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probability, 1, generator=generator)], dim=1)
    return tokens[:, PROMPT_TOKENS:]


def _answer_log_probabilities(model: nn.Module, prompt: Tensor, answer: Tensor) -> Tensor:
    """Log-probability of each answer token: float32[batch, 3]."""
    logits = model(torch.cat([prompt, answer[:, :-1]], dim=1))[:, PROMPT_TOKENS - 1 :]
    nats = functional.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none")
    return -nats.view(answer.shape)


def _over_all_ranks(reward: Tensor, advantage: Tensor) -> Rewards:
    sums = torch.stack([reward.sum(), advantage.square().sum(), torch.tensor(float(reward.numel()))]).double()
    dist.all_reduce(sums)
    total, squares, count = sums.tolist()
    return Rewards(mean=total / count, spread=(squares / count) ** 0.5)
