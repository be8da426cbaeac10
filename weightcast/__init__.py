"""The public face: everything a user imports, from one place.

Names are resolved when first used, so that ``import weightcast`` and ``weightcast --help`` load neither torch nor the
clients of object stores. Nothing in this project imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codec import apply_delta, decode_full, delta_compress, delta_decompress, encode_delta, encode_full
    from codec.errors import CodecError
    from coordinator.errors import CoordinatorError
    from rollout_agent import Replica
    from rollout_agent.errors import RolloutError
    from trainer_agent import Piece, Publisher
    from trainer_agent.errors import TrainerError
    from weight_store.errors import WeightStoreError
    from weight_store.memory import MemoryStore
    from weight_store.opening import open_store

__all__ = [
    "CodecError",
    "CoordinatorError",
    "MemoryStore",
    "Piece",
    "Publisher",
    "Replica",
    "RolloutError",
    "TrainerError",
    "WeightStoreError",
    "apply_delta",
    "decode_full",
    "delta_compress",
    "delta_decompress",
    "encode_delta",
    "encode_full",
    "open_store",
]

_HOMES = {
    "CodecError": "codec.errors",
    "CoordinatorError": "coordinator.errors",
    "MemoryStore": "weight_store.memory",
    "Piece": "trainer_agent",
    "Publisher": "trainer_agent",
    "Replica": "rollout_agent",
    "RolloutError": "rollout_agent.errors",
    "TrainerError": "trainer_agent.errors",
    "WeightStoreError": "weight_store.errors",
    "apply_delta": "codec",
    "decode_full": "codec",
    "delta_compress": "codec",
    "delta_decompress": "codec",
    "encode_delta": "codec",
    "encode_full": "codec",
    "open_store": "weight_store.opening",
}
"""Public name -> the module it comes from."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
