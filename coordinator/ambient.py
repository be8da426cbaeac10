"""What the coordinator takes from its surroundings, in one value, so that a simulation can replace all of it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator.fleet import Room


def _nonce() -> str:
    return secrets.token_hex(8)


def _run_id() -> str:
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True)
class Ambient:
    """Clock (monotonic seconds), sleep, fresh identifiers, and where long computations run.

    ``offload(function, *args)`` runs a pure function off the event loop; a simulation calls it in place. ``large`` is
    held by whoever handles an object that takes so much memory that two at once would be too many.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    nonce: Callable[[], str] = _nonce
    run_id: Callable[[], str] = _run_id
    offload: Callable[..., Awaitable[Any]] = asyncio.to_thread
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Settings:
    """``expire_after_s``: an undecided version that gave no sign of life for so long is given up. ``poll_s``: how often
    the bucket is looked at for what other coordinators, or lost reports, have left there; ``idle_poll_s`` for runs that
    nobody asks about.

    The rest bounds what clients can make the coordinator do: ``room`` for agents (about 2 KB each), event streams, and
    how many receipts that nobody reported are looked for at once.
    """

    expire_after_s: float = 120.0
    poll_s: float = 1.0
    idle_poll_s: float = 60.0
    keep_alive_s: float = 15.0
    room: Room = field(default_factory=Room)
    max_streams: int = 2_000
    max_probes: int = 64
