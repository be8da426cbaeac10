"""An object store that does to each client what object stores do: the port of weight_store over one dictionary."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from tests.sim.clocks import EPOCH_S, Clock, Signer
from tests.sim.loop import Process, SimLoop
from tests.sim.network import Network, NoAnswer, Reply
from tests.sim.uploads import SimUpload, Uploads, open_upload
from weight_store.errors import ObjectTooLarge, PreconditionFailed, StoreError, StoreThrottled, StoreUnavailable
from weight_store.keys import parse_key
from weight_store.memory import MemoryStore
from weight_store.retry import Retrier, RetryingStore, RetryPolicy, with_retry
from weight_store.store import Blob, Entry, UnfinishedUpload

T = TypeVar("T")

TIMEOUT_S = 3.0
STALE_S = 3.0


class Watcher(Protocol):
    """Whoever looks at every change of the bucket at the moment it happens."""

    def wrote(self, key: str, before: bytes | None, after: bytes) -> None: ...

    def deleted(self, key: str) -> None: ...

    def aborted(self, key: str) -> None: ...


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of MemoryStore, which never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("a memory store waited")


class Bucket:
    """The one true content. ``create_only``: whether the server heeds If-None-Match."""

    create_only = True

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._store = MemoryStore(clock=self.date_s)
        self._heads: list[tuple[float, Blob]] = []
        self._blobs: dict[str, Blob] = {}
        self.watcher: Watcher | None = None
        self.uploads = Uploads(self)
        self.part_bytes = 0
        """In what parts clients send larger objects; 0: as one."""

    def date_s(self) -> float:
        """The server's time (Unix seconds), which it tells in whole seconds, as S3 does."""
        return EPOCH_S + int(self._loop.now_s)

    def read(self, key: str) -> bytes | None:
        """What lies at ``key``."""
        found = self._store._objects.get(key)
        return None if found is None else found[0]

    def get(self, key: str) -> Blob:
        known = self._blobs.get(key)
        if known is None or known.data is not self.read(key):
            known = self._blobs[key] = at_once(self._store.get(key, max_bytes=1 << 40))
        return known

    def stale_head(self, key: str, age_s: float) -> Blob:
        """The head as it was ``age_s`` ago, if it was there."""
        now_s = self._loop.time()
        blob = self.get(key)
        older = [old for until_s, old in self._heads if until_s > now_s - age_s]
        return older[0] if older else blob

    def create(self, key: str, data: bytes) -> str:
        before = self.read(key)
        if before is not None and not self.create_only:
            self._store._objects.pop(key)
        etag = at_once(self._store.create(key, data))
        self._tell(key, before, data)
        return etag

    def replace(self, key: str, data: bytes, etag: str) -> str:
        before = self.get(key)
        found = at_once(self._store.replace(key, data, etag=etag))
        if key.endswith("/head.json"):
            self._heads.append((self._loop.time(), before))
        self._tell(key, before.data, data)
        return found

    def delete(self, key: str) -> None:
        if self.watcher is not None and self.read(key) is not None:
            self.watcher.deleted(key)
        at_once(self._store.delete(key))

    def abort(self, upload: UnfinishedUpload) -> None:
        """For whoever did not begin it."""
        key = self.uploads.abort(upload.upload_id)
        if key is not None and self.watcher is not None:
            self.watcher.aborted(key)

    def list(self, prefix: str) -> list[Entry]:
        async def all_of_it() -> list[Entry]:
            return [entry async for entry in self._store.list(prefix)]

        return at_once(all_of_it())

    def _tell(self, key: str, before: bytes | None, after: bytes) -> None:
        if self.watcher is not None:
            self.watcher.wrote(key, before, after)


class SimStore:
    """One process's way to the bucket."""

    def __init__(
        self,
        bucket: Bucket,
        network: Network,
        process: Process,
        node: str,
        clock: Clock,
        chance: random.Random,
        note: Callable[[str], None],
        *,
        distrust: frozenset[str] = frozenset(),
    ) -> None:
        """``distrust``: kinds of object (see keys.ParsedKey) that may reach this client with wrong bytes."""
        self._bucket = bucket
        self._network = network
        self._process = process
        self._node = node
        self.signer = Signer(clock)
        self._chance = chance
        self._note = note
        self._distrust = distrust
        self._wrong: dict[str, bytes] = {}
        self.retrier: Retrier

    def __repr__(self) -> str:
        return f"SimStore({self._node})"

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        def effect() -> Blob:
            faults = self._network.faults
            stale = faults.stale_head and key.endswith("/head.json") and self._network.happens(faults.stale_head)
            blob = self._bucket.stale_head(key, self._chance.uniform(0, STALE_S)) if stale else self._bucket.get(key)
            if len(blob.data) > max_bytes:
                raise ObjectTooLarge(f"object {key} has {len(blob.data)} bytes; at most {max_bytes} are allowed here")
            data = self._perhaps_wrong(key, blob.data) if faults.wrong_bytes else blob.data
            return blob if data is blob.data else Blob(data, blob.etag)

        return await self.ask("get", key, effect)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        def effect() -> bytes:
            data = bytearray(len(buffer))
            at_once(self._bucket._store.read_into(key, offset, memoryview(data)))
            return self._perhaps_wrong(key, bytes(data))

        data = await self.ask("read", key, effect)
        buffer[:] = data

    async def create(self, key: str, data: bytes) -> str:
        if self._process.deciding is not None and parse_key(key).kind == "manifest":
            self._process.deciding(data)
        return await self.ask("create", key, lambda: self.conditional(key, lambda: self._bucket.create(key, data)))

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        return await self.ask(
            "replace", key, lambda: self.conditional(key, lambda: self._bucket.replace(key, data, etag))
        )

    def upload(self, key: str) -> AbstractAsyncContextManager[SimUpload]:
        write_id = f"{self._chance.getrandbits(64):016x}"
        return open_upload(self, self._bucket.uploads, key, write_id, self._bucket.part_bytes)

    async def list_uploads(self, prefix: str) -> AsyncIterator[UnfinishedUpload]:
        def look() -> Awaitable[list[UnfinishedUpload]]:
            return self.ask("list uploads", prefix, lambda: self._bucket.uploads.list(prefix))

        for upload in await self.retrier.call(look):
            yield upload

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        await self.ask("abort", upload.key, lambda: self._bucket.abort(upload))

    async def delete(self, key: str) -> None:
        await self.ask("delete", key, lambda: self._bucket.delete(key))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        for entry in await self.ask("list", prefix, lambda: self._bucket.list(prefix)):
            yield entry

    async def close(self) -> None:
        pass

    async def turn(self) -> None:
        """See :meth:`~tests.sim.loop.Process.turn`."""
        await self._process.turn()

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        self._note(f"{self._node}: {line}")

    def loses_parts(self) -> bool:
        """Whether the server has lost a part of an upload that is about to be completed."""
        return self._network.happens(self._network.faults.lost_part)

    def conditional(self, key: str, write: Callable[[], T]) -> T:
        """What a create-only or compare-and-set write comes to."""
        if self._network.happens(self._network.faults.conflict):
            # 409: another request for this key is under way, whatever becomes of it.
            raise PreconditionFailed(f"object {key}: conflicting request", key=key)
        return write()

    def _perhaps_wrong(self, key: str, data: bytes) -> bytes:
        if not data or not self._distrust or not self._network.happens(self._network.faults.wrong_bytes):
            return data
        if parse_key(key).kind not in self._distrust:
            return data
        wrong = bytearray(data)
        # Often the lowest bit: a digit stays a digit then, and what can still be read is worst.
        at = self._chance.randrange(len(wrong))
        wrong[at] ^= 1 << self._chance.choice((0, 0, 0, 1, 2, 3, 5, 7))
        if self._wrong.get(key) == wrong:  # two that agree are right: nobody can do anything about more
            wrong[at] ^= 1 << 4
        self._wrong[key] = bytes(wrong)
        self._note(f"{self._node} gets wrong bytes of {key}")
        return bytes(wrong)

    async def ask(self, what: str, key: str, effect: Callable[[], T]) -> T:
        """Send a request, whose ``effect`` the server has if it arrives, and return its answer."""

        def serve(reply: Reply) -> None:
            faults = self._network.faults
            if self.signer.may_be_wrong and self.signer.is_refused(self._bucket.date_s()):
                reply(StoreUnavailable(f"{key}: RequestTimeTooSkewed", key=key))
            elif faults.unavailable and self._network.happens(faults.unavailable):
                reply(StoreUnavailable(f"{key}: 500", key=key))
            elif faults.throttled and self._network.happens(faults.throttled):
                reply(StoreThrottled(f"{key}: 503 SlowDown", key=key))
            else:
                reply(self._outcome(what, key, effect))

        try:
            found: T = await self._network.exchange(self._process, self._node, "store", serve, TIMEOUT_S)
        except NoAnswer:
            self._note(f"{self._node} {what} {key}: no answer")
            raise StoreUnavailable(f"{key}: no answer in {TIMEOUT_S:g} s", key=key) from None
        return found

    def _outcome(self, what: str, key: str, effect: Callable[[], T]) -> T | StoreError:
        try:
            result = effect()
        except (StoreError, ObjectTooLarge) as error:
            self._note(f"{self._node} {what} {key}: {type(error).__name__}")
            return error  # type: ignore[return-value]
        self._note(f"{self._node} {what} {key}")
        return result


def retried(store: SimStore, clock: Clock, process: Process, chance: random.Random) -> RetryingStore:
    """The store as agents have it."""
    store.retrier = Retrier(RetryPolicy(), clock=clock.count_s, sleep=process.sleep, fraction=chance.random)
    return with_retry(store, store.retrier)  # type: ignore[arg-type]
