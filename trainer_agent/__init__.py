"""The trainer's side: an in-process Publisher and the sidecar process that encodes, uploads and reports.

The public names are imported on first use: the sidecar runs from this package too and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_agent.adapters import from_named_tensors, from_state_dict
    from trainer_agent.errors import TrainerError
    from trainer_agent.handle import Handle, Stats
    from trainer_agent.piece import Piece
    from trainer_agent.publisher import Publisher

__all__ = ["Handle", "Piece", "Publisher", "Stats", "TrainerError", "from_named_tensors", "from_state_dict"]

_HOMES = {
    "Handle": "handle",
    "Piece": "piece",
    "Publisher": "publisher",
    "Stats": "handle",
    "TrainerError": "errors",
    "from_named_tensors": "adapters",
    "from_state_dict": "adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
