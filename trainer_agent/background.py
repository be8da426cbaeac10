"""The background upload of an extra full: the same position as an already sealed version, readable without a base."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from codec import CodecError
from trainer_agent.encoding import Encoder
from trainer_agent.messages import Attach
from trainer_agent.patience import TRANSIENT, Patience
from trainer_agent.shard import Envelope, SentShard, send_shard
from trainer_agent.slots import Slots
from trainer_agent.state import Base
from weight_store.errors import WeightStoreError
from weight_store.reading import read_manifest
from weight_store.receipt import FullRef
from weight_store.store import Store

_log = logging.getLogger(__name__)

_ATTEMPTS = 6
_THREADS = 1
"""A full is never urgent; the version being published gets the other cores."""
_WINDOW_BYTES = 64 << 20


@dataclass(slots=True)
class FullUpload:
    """Encodes the slot of ``base`` whole and reports it. ``result`` is set once it is durable."""

    store: Store
    config: Attach
    run_id: str
    layout: str
    slots: Slots
    base: Base
    nonce: Callable[[], str]
    clock: Callable[[], float]
    patience: Patience
    result: FullRef | None = None
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def slot(self) -> int:
        """The slot that may not be written meanwhile."""
        return self.base.slot

    def start(self, ended: Callable[[], None]) -> None:
        """Begin; ``ended`` is called when it is over, however it ended."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="extra-full")

        def over(task: asyncio.Task[None]) -> None:
            ended()
            if not task.cancelled():
                task.result()  # a defect must reach the loop's exception handler

        self._task.add_done_callback(over)

    async def wait(self, seconds: float) -> None:
        """Wait for the end, ``seconds`` at most."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    async def cancel(self) -> None:
        """Give it up and wait until the slot is no longer read."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        version = self.base.position.version
        encoder = Encoder(_THREADS, _WINDOW_BYTES)
        try:
            self.result = (await self._send(encoder)).full_ref()
            _log.info("full of version %d uploaded: %d bytes", version, self.result.shard_bytes)
        except (WeightStoreError, CodecError) as error:
            _log.warning("the extra full of version %d is given up: %s", version, error)
        finally:
            # Threads still reading the slot are waited for: the trainer may write it next.
            await asyncio.to_thread(encoder.close)

    async def _send(self, encoder: Encoder) -> SentShard:
        config, position = self.config, self.base.position
        manifest = await self.patience("manifest", lambda: read_manifest(self.store, config.run, position))
        envelope = Envelope(
            run=config.run,
            run_id=self.run_id,
            version=position.version,
            rank=config.rank,
            parent=manifest.parent,
            layout=self.layout,
            extra_full=True,
            digests=self.base.digests,
        )
        failures = 0
        while True:
            jobs = self.slots.jobs(self.slot, None)
            try:
                return await send_shard(self.store, encoder, jobs, envelope, nonce=self.nonce(), clock=self.clock)
            except TRANSIENT as error:
                failures += 1
                if failures == _ATTEMPTS:
                    raise
                await self.patience.pause(f"full of version {position.version}", failures, error)
