"""What may go wrong while the sidecar works, and how it goes on when nothing is wrong for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from codec import CodecError
from coordinator.errors import CoordinatorError, TryAgain
from trainer_agent.errors import TrainerError
from weight_store import retry
from weight_store.errors import StoreUnavailable, WeightStoreError
from weight_store.retry import RetryPolicy

T = TypeVar("T")

_log = logging.getLogger(__name__)

TRANSIENT = (TryAgain, StoreUnavailable)
"""Nothing is wrong for good: the same again later."""
EXPECTED = (CoordinatorError, WeightStoreError, CodecError, TrainerError)
"""What may go wrong. Anything else ends the process with a traceback; the trainer starts another."""
PATIENCE = RetryPolicy(first_delay_s=0.1, max_delay_s=5.0)


@dataclass(slots=True)
class Patience:
    """Repeats an operation until it succeeds or fails for good: what is undecided must be decided, training goes on.

    ``tell`` gets every failure in words, and "" when the operation that had failed succeeds, or fails for good.
    """

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    fraction: Callable[[], float] = retry.fraction
    policy: RetryPolicy = field(default=PATIENCE)
    tell: Callable[[str], None] = retry.nobody

    async def __call__(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Await ``operation()``, again with growing jittered delays after every transient error."""
        failures = 0
        try:
            while True:
                try:
                    return await operation()
                except TRANSIENT as error:
                    failures += 1
                    await self.pause(what, failures, error)
        finally:
            if failures:
                self.tell("")

    async def pause(self, what: str, failures: int, error: Exception) -> None:
        """Wait after the ``failures``-th failure in a row; say so at the first and then ever more rarely."""
        if failures & (failures - 1) == 0:
            _log.warning("%s: %s (attempt %d; trying again)", what, error, failures)
        self.tell(f"{what}: {error}")
        await self.sleep(self.policy.delay_s(failures, self.fraction()))
