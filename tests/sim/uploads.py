"""Multipart uploads: the server's side, with parts that it loses, and a client like that of weight_store.s3_upload.

Whoever is killed leaves an upload behind; a lost answer makes it begin two; one that arrives late finds nothing to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weight_store.errors import ObjectNotFound, PreconditionFailed, StoreError, StoreUnavailable, UploadLost
from weight_store.finishing import finished
from weight_store.store import UnfinishedUpload

if TYPE_CHECKING:
    from tests.sim.store import Bucket, SimStore


@dataclass
class _Begun:
    key: str
    write_id: str
    started_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


class Uploads:
    """What a server keeps of uploads that were begun and neither completed nor aborted; and who wrote which object."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._begun: dict[str, _Begun] = {}
        self.writers: dict[str, str] = {}

    def put(self, key: str, data: bytes, write_id: str) -> None:
        """One whole object, created only."""
        self._bucket.create(key, data)
        self.writers[key] = write_id

    def begin(self, key: str, write_id: str) -> str:
        """An id under which parts are taken."""
        upload_id = f"upload-{len(self.writers)}-{len(self._begun)}-{write_id}"
        self._begun[upload_id] = _Begun(key, write_id, self._bucket.date_s())
        return upload_id

    def part(self, upload_id: str, number: int, data: bytes) -> None:
        """Take a part, in place of the one of that number."""
        self._find(upload_id).parts[number] = data

    def complete(self, upload_id: str, count: int, *, loses: bool) -> None:
        """Make an object of the parts; of ``count``, one is gone if the server ``loses`` one."""
        begun = self._find(upload_id)
        if loses:
            begun.parts.pop(count, None)
        if set(begun.parts) != set(range(1, count + 1)):
            raise UploadLost(f"{begun.key}: InvalidPart", key=begun.key)
        self.put(begun.key, b"".join(begun.parts[number] for number in range(1, count + 1)), begun.write_id)
        del self._begun[upload_id]

    def abort(self, upload_id: str) -> str | None:
        """Forget an upload; the key that it was for, if it was there."""
        begun = self._begun.pop(upload_id, None)
        return None if begun is None else begun.key

    def list(self, prefix: str = "") -> list[UnfinishedUpload]:
        """What is unfinished."""
        found = [UnfinishedUpload(begun.key, name, begun.started_s) for name, begun in self._begun.items()]
        return [upload for upload in found if upload.key.startswith(prefix)]

    def _find(self, upload_id: str) -> _Begun:
        if upload_id not in self._begun:
            raise UploadLost(f"{upload_id}: NoSuchUpload")
        return self._begun[upload_id]


class SimUpload:
    """One object, in parts of ``part_bytes`` if it is larger (0: never)."""

    def __init__(self, store: SimStore, uploads: Uploads, key: str, write_id: str, part_bytes: int) -> None:
        self._store = store
        self._uploads = uploads
        self._key = key
        self._write_id = write_id
        self._part_bytes = part_bytes
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._sent = 0
        self._committed = False

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        await self._store.turn()
        self._buffer += data
        while self._part_bytes and len(self._buffer) > self._part_bytes:
            await self._send_part(bytes(self._buffer[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    async def commit(self) -> None:
        if self._committed:
            return
        try:
            await (self._put() if self._upload_id is None else self._complete(self._upload_id))
        except (PreconditionFailed, StoreUnavailable):
            if not await self._is_ours():
                raise
        self._committed = True

    async def discard(self) -> None:
        """Leave nothing behind, if that can be told to the server."""
        upload_id = self._upload_id
        if self._committed or upload_id is None:
            return
        try:
            await self._store.ask("abort", self._key, lambda: self._uploads.abort(upload_id))
        except StoreError:
            self._store.note(f"an unfinished upload of {self._key} stays")

    async def _put(self) -> None:
        data = bytes(self._buffer)
        await self._store.ask(
            "put",
            self._key,
            lambda: self._store.conditional(self._key, lambda: self._uploads.put(self._key, data, self._write_id)),
        )

    async def _send_part(self, data: bytes) -> None:
        retrier = self._store.retrier
        if self._upload_id is None:
            self._upload_id = await retrier.call(
                lambda: self._store.ask("begin", self._key, lambda: self._uploads.begin(self._key, self._write_id))
            )
        upload_id, number = self._upload_id, self._sent + 1
        await retrier.call(
            lambda: self._store.ask(f"part {number}", self._key, lambda: self._uploads.part(upload_id, number, data))
        )
        self._sent = number

    async def _complete(self, upload_id: str) -> None:
        if self._buffer:
            await self._send_part(bytes(self._buffer))
            self._buffer.clear()
        count = self._sent

        def effect() -> None:
            loses = self._store.loses_parts()
            self._store.conditional(self._key, lambda: self._uploads.complete(upload_id, count, loses=loses))

        await self._store.ask("complete", self._key, effect)

    async def _is_ours(self) -> bool:
        try:
            found = await self._store.ask("look at", self._key, self._writer)
        except StoreError:
            return False
        return found == self._write_id

    def _writer(self) -> str:
        if self._key not in self._uploads.writers:
            raise ObjectNotFound(f"no object {self._key}", key=self._key)
        return self._uploads.writers[self._key]


@asynccontextmanager
async def open_upload(
    store: SimStore, uploads: Uploads, key: str, write_id: str, part_bytes: int
) -> AsyncIterator[SimUpload]:
    """What is not committed at the end is aborted, unless its process is dead by then."""
    upload = SimUpload(store, uploads, key, write_id, part_bytes)
    try:
        yield upload
    finally:
        await finished(upload.discard())
