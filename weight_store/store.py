"""The port: all that weightcast asks of an object store. Adapters implement it; decorators wrap it.

Keys are relative to the store's prefix, use ``/`` and never start with it. Every method raises only
:class:`~weight_store.errors.StoreError` (or ``ObjectTooLarge``); an adapter classifies, it does not retry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Moved = Callable[[str, int, int], None]
"""``moved(key, start, end)``: of the piece of the object that begins at ``start``, what lies before ``end`` was taken
or given by the server. Called from any thread; a piece that is sent again begins again."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A whole small object and the ETag under which it can be replaced."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as LIST and HEAD report it; ``modified_s`` is the store's clock (Unix seconds)."""

    key: str
    size: int
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """Parts that were sent and neither completed nor aborted; ``started_s`` is the store's clock (Unix seconds)."""

    key: str
    upload_id: str
    started_s: float


class Upload(Protocol):
    """A streamed, create-only upload. Nothing is visible at the key before :meth:`commit` returns."""

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``. The buffer may be reused as soon as the call returns."""

    async def commit(self) -> None:
        """Make the object visible (``If-None-Match: *``). Raises ``PreconditionFailed`` if the key exists.

        May be called again after ``StoreUnavailable``; an attempt whose reply was lost then counts as success. After
        ``UploadLost`` only a new upload, to this key or another, leads anywhere.
        """


class Store(Protocol):
    """Seven operations and :meth:`close`. Strong read-after-write is assumed for single keys."""

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        """Return the whole object. ``ObjectTooLarge`` before reading more than ``max_bytes``; ``ObjectNotFound``."""

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Streams; a body cut short is ``StoreUnavailable``.

        ``FormatError`` if the object ends before ``offset + len(buffer)``. An empty buffer asks nothing of an S3
        server, so it does not tell whether the object is there.
        """

    async def create(self, key: str, data: bytes) -> str:
        """Create the object (``If-None-Match: *``) and return its ETag. Atomic among racing writers.

        ``PreconditionFailed`` if it exists, even if it is ours from a write whose reply was lost.
        """

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        """Replace the object if it still has ``etag`` (``If-Match``); returns the new ETag.

        ``PreconditionFailed`` if it changed or is gone.
        """

    def upload(self, key: str) -> AbstractAsyncContextManager[Upload]:
        """Open a streamed upload; leaving the block without ``commit`` discards every part."""

    async def delete(self, key: str) -> None:
        """Remove the object; removing one that is not there succeeds."""

    def list(self, prefix: str) -> AsyncIterator[Entry]:
        """Iterate the objects below ``prefix``. For people and garbage collection only.

        In key order within one run; servers differ in where they put the objects of another.
        """

    async def close(self) -> None:
        """Release connections. Calling it twice is allowed."""


@runtime_checkable
class MultipartStore(Protocol):
    """A store that keeps, and bills, the parts of uploads whose writer died."""

    def list_uploads(self, prefix: str) -> AsyncIterator[UnfinishedUpload]:
        """Iterate the unfinished uploads to keys below ``prefix``. For people and garbage collection only."""

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Discard its parts; one that was completed or aborted meanwhile is left as it is."""
