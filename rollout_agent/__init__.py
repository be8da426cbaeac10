"""The rollout side: a replica that plans, fetches, verifies, applies, and hands each version over to an engine.

``gate.shared`` is what engines load through. The public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_agent.blocking import BlockingReplica
    from rollout_agent.engine import CommandEngine, Engine, NotifyEngine, Staged
    from rollout_agent.errors import RolloutError
    from rollout_agent.replica import Replica

__all__ = ["BlockingReplica", "CommandEngine", "Engine", "NotifyEngine", "Replica", "RolloutError", "Staged"]

_HOMES = {
    "BlockingReplica": "blocking",
    "CommandEngine": "engine",
    "Engine": "engine",
    "NotifyEngine": "engine",
    "Replica": "replica",
    "RolloutError": "errors",
    "Staged": "engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
