"""The same replica for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rollout_agent.replica import Replica
from weight_store.position import Position

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


class BlockingReplica:
    """A :class:`~rollout_agent.replica.Replica` whose calls block; takes the arguments of :meth:`Replica.open`.

    Its event loop runs in a thread of its own. Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightcast-replica", daemon=True)
        self._thread.start()
        try:
            self._replica = self._wait(Replica.open(**options))
        except BaseException:
            self._stop()
            raise

    @property
    def position(self) -> Position | None:
        """See :attr:`Replica.position`."""
        return self._replica.position

    @property
    def step(self) -> int | None:
        """See :attr:`Replica.step`."""
        return self._replica.step

    @property
    def model_dir(self) -> Path:
        """See :attr:`Replica.model_dir`."""
        return self._replica.model_dir

    @property
    def fetched_bytes(self) -> int:
        """See :attr:`Replica.fetched_bytes`."""
        return self._replica.fetched_bytes

    def catch_up(self) -> Position | None:
        """See :meth:`Replica.catch_up`."""
        return self._wait(self._replica.catch_up())

    def check(self) -> bool:
        """See :meth:`Replica.check`."""
        return self._wait(self._replica.check())

    def repair(self) -> None:
        """See :meth:`Replica.repair`."""
        self._wait(self._replica.repair())

    def told(self) -> None:
        """See :meth:`Replica.told`."""
        self._loop.call_soon_threadsafe(self._replica.told)

    def checkpoint(self, *, force: bool = False) -> None:
        """See :meth:`Replica.checkpoint`."""
        self._wait(self._replica.checkpoint(force=force))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """See :meth:`Replica.tensors`."""
        return self._replica.tensors()

    def close(self) -> None:
        """Stop and let go of the directory. Calling it twice is allowed."""
        if self._thread.is_alive():
            self._wait(self._replica.close())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
