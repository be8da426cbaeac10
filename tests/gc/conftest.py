"""A bucket whose clock tests move, a trainer in miniature on it, and what a crash or a lost race leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.rollout_agent.training import Training, read_model
from weight_store.chain import plan_chain
from weight_store.control import Control
from weight_store.gc import Collector
from weight_store.head import Head
from weight_store.keys import control_key, head_key, manifest_key, offer_key, open_key, receipt_key, shard_key
from weight_store.memory import MemoryStore
from weight_store.reading import fetch_groups, read_head, read_layout, read_manifest, read_receipt
from weight_store.receipt import group_ranges
from weight_store.records import MAX_RECORD_BYTES
from weight_store.store import Store, UnfinishedUpload
from weight_store.version import Abort, Open

RUN = "tiny"
HOUR = 3600.0


@dataclass
class Clock:
    """The store's clock: moves only when told to, or when somebody sleeps."""

    now_s: float = 1_000_000.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Begun(MemoryStore):
    """A store with uploads that were begun and not finished."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.uploads: list[UnfinishedUpload] = []

    async def list_uploads(self, prefix: str) -> AsyncIterator[UnfinishedUpload]:
        for upload in [upload for upload in self.uploads if upload.key.startswith(prefix)]:
            yield upload

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        self.uploads.remove(upload)


class Bucket:
    """What tests do to a bucket."""

    def __init__(self, store: Store, training: Training, clock: Clock) -> None:
        self.store, self.training, self.clock = store, training, clock
        self._nonces = 0

    def collector(self, store: Store | None = None, *, min_age_s: float = HOUR) -> Collector:
        return Collector(store or self.store, RUN, min_age_s=min_age_s, nonce=self.nonce, sleep=self.clock.sleep)

    def nonce(self) -> str:
        self._nonces += 1
        return f"{self._nonces:016x}"

    async def publish(self, count: int) -> None:
        for _ in range(count):
            await self.training.publish()
            self.training.step()

    async def keys(self, prefix: str = f"{RUN}/") -> set[str]:
        return {entry.key async for entry in self.store.list(prefix)}

    async def versions(self) -> set[int]:
        """Numbers that still have any object."""
        return {int(key.split("/")[2]) for key in await self.keys(f"{RUN}/v/")}

    async def control(self) -> Control:
        return Control.parse((await self.store.get(control_key(RUN), max_bytes=MAX_RECORD_BYTES)).data)

    async def floor(self) -> int:
        return (await self.control()).floor if control_key(RUN) in await self.keys() else 0

    async def aim(self, **targets: int) -> None:
        """Tell regions what to run."""
        try:
            blob = await self.store.get(control_key(RUN), max_bytes=MAX_RECORD_BYTES)
        except Exception:
            record = Control(run_id=self.training.run_id, targets=targets, write_id=self.nonce())
            await self.store.create(control_key(RUN), record.to_bytes())
            return
        record = Control.parse(blob.data).model_copy(update={"targets": targets, "write_id": self.nonce()})
        await self.store.replace(control_key(RUN), record.to_bytes(), etag=blob.etag)

    async def take_over(self) -> None:
        """Another launch takes the run."""
        training = self.training
        training.term += 1
        training.published = 0
        training.fulls.clear()  # a launch reports its own fulls alone
        blob = await self.store.get(head_key(RUN), max_bytes=MAX_RECORD_BYTES)
        old = Head.parse(blob.data)
        head = old.model_copy(update={"term": training.term, "launch": "next", "write_id": self.nonce()})
        await self.store.replace(head_key(RUN), head.to_bytes(), etag=blob.etag)

    async def open(self, version: int, *, term: int | None = None, layout: str = "0" * 64) -> Open:
        opened = Open(
            run_id=self.training.run_id,
            version=version,
            term=term or self.training.term,
            step=0,
            ordinal=version,
            parent=self.training.position,
            layout=layout,
            world_size=2,
            write_id=self.nonce(),
        )
        await self.store.create(open_key(RUN, version), opened.to_bytes())
        return opened

    async def abort(self, opened: Open) -> None:
        abort = Abort(
            run_id=opened.run_id,
            version=opened.version,
            term=opened.term,
            reason="expired",
            detail="no receipt of rank 1",
            write_id=self.nonce(),
        )
        await self.store.create(manifest_key(RUN, opened.version), abort.to_bytes())

    async def shard(self, version: int, rank: int = 0, *, nonce: str = "f" * 16, extra_full: bool = False) -> str:
        key = shard_key(RUN, version, rank, nonce, extra_full=extra_full)
        await self.store.create(key, b"shard")
        return key

    async def receipt(self, version: int, rank: int = 0) -> str:
        key = receipt_key(RUN, version, rank)
        await self.store.create(key, b"receipt")
        return key

    async def offer(self, term: int, rank: int = 0) -> str:
        key = offer_key(RUN, term, rank)
        await self.store.create(key, b"offer")
        return key

    async def check_reachable(self, floor: int) -> None:
        """Everything that readers with nothing, or at ``floor`` or half way, would fetch is there and right.

        Goes by the chain rules and the readers' own functions, not by the collector's.
        """
        head, _ = await read_head(self.store, RUN)
        target = await read_manifest(self.store, RUN, head.position)
        starts = [link.position for link in target.chain if link.version >= floor]
        for held in [None, *starts[:1], *starts[len(starts) // 2 :][:1]]:
            for hop in plan_chain(held, target, head.position):
                manifest = await read_manifest(self.store, RUN, hop.position)
                for rank, ref in enumerate(hop.extra_full or manifest.receipts):
                    receipt = await read_receipt(
                        self.store, RUN, hop.position, rank, ref, extra_full=bool(hop.extra_full)
                    )
                    layout = await read_layout(self.store, RUN, receipt.layout)
                    async for _ in fetch_groups(self.store, RUN, receipt, group_ranges(receipt, layout)):
                        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def bucket(store: MemoryStore, clock: Clock) -> Bucket:
    return Bucket(store, Training(store, name=RUN), clock)


@pytest.fixture
def make_bucket(clock: Clock) -> Callable[[Store], Bucket]:
    """A bucket on another store."""
    return lambda store: Bucket(store, Training(store, name=RUN), clock)


@pytest.fixture
def read_dir() -> Callable[[Path], dict[str, bytes]]:
    """Every tensor in a model directory, as raw bytes."""
    return lambda path: read_model({p.name: p.read_bytes() for p in sorted(path.glob("*.safetensors"))})
