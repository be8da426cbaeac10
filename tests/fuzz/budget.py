"""How long to go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """``runs`` executions (0: no limit) or ``seconds`` (0: no limit), from ``seed`` on; ``slow_s`` of one input."""

    runs: int = 0
    seconds: int = 0
    seed: int = 1
    slow_s: int = 30
