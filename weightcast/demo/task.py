"""A small task whose answers a program can verify: add two numbers of two digits."""

from __future__ import annotations

import torch
from torch import Tensor

PLUS, EQUALS = 10, 11
"""Tokens 0 to 9 are the digits; the rest of the vocabulary is never right."""
PROMPT_TOKENS = 6
ANSWER_TOKENS = 3


def prompts(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` prompts ``a a + b b =``: int64[count, 6]."""
    a = torch.randint(0, 100, (count,), generator=generator)
    b = torch.randint(0, 100, (count,), generator=generator)
    plus, equals = torch.full_like(a, PLUS), torch.full_like(a, EQUALS)
    return torch.stack([a // 10, a % 10, plus, b // 10, b % 10, equals], dim=1)


def answers(prompt: Tensor) -> Tensor:
    """Return the three digits of each sum, last digit first (what a left-to-right model can learn): int64[count, 3]."""
    total = 10 * (prompt[:, 0] + prompt[:, 3]) + prompt[:, 1] + prompt[:, 4]
    return torch.stack([total % 10, total // 10 % 10, total // 100], dim=1)


def rewards(prompt: Tensor, answer: Tensor) -> Tensor:
    """Score each answer: a third for every right digit, one more for all of them: float32[count]."""
    right = answer == answers(prompt)
    return right.float().mean(dim=1) + right.all(dim=1).float()
