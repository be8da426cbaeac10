"""A store in memory: the reference for the others, and what simulations and tests run on."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import xxhash

from weight_store.errors import FormatError, ObjectNotFound, ObjectTooLarge, PreconditionFailed
from weight_store.object_keys import check_key_prefix, check_object_key
from weight_store.store import Blob, Entry


class MemoryStore:
    """Objects in a dictionary. Safe to share between threads and event loops; ``close`` keeps the objects.

    ``clock`` returns Unix seconds for :attr:`~weight_store.store.Entry.modified_s`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._objects)} objects)"

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        """See :meth:`~weight_store.store.Store.get`."""
        data = self._find(key)
        if len(data) > max_bytes:
            raise ObjectTooLarge(f"object {key} has {len(data)} bytes; at most {max_bytes} are allowed here")
        return Blob(data, _etag(data))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See :meth:`~weight_store.store.Store.read_into`."""
        data = self._find(key)
        end = offset + len(buffer)
        if offset < 0 or end > len(data):
            raise FormatError(f"object {key} ends at byte {len(data)}, before the wanted {offset}..{end}")
        buffer[:] = data[offset:end]

    async def create(self, key: str, data: bytes) -> str:
        """See :meth:`~weight_store.store.Store.create`."""
        check_object_key(key)
        with self._lock:
            if key in self._objects:
                raise PreconditionFailed(f"object {key} exists already", key=key)
            self._objects[key] = (bytes(data), self._clock())
        return _etag(data)

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        """See :meth:`~weight_store.store.Store.replace`."""
        check_object_key(key)
        with self._lock:
            found = self._objects.get(key)
            if found is None or _etag(found[0]) != etag:
                raise PreconditionFailed(f"object {key} changed or is gone", key=key)
            self._objects[key] = (bytes(data), self._clock())
        return _etag(data)

    @asynccontextmanager
    async def upload(self, key: str) -> AsyncIterator[MemoryUpload]:
        """See :meth:`~weight_store.store.Store.upload`."""
        check_object_key(key)
        yield MemoryUpload(self, key)

    async def delete(self, key: str) -> None:
        """See :meth:`~weight_store.store.Store.delete`."""
        check_object_key(key)
        with self._lock:
            self._objects.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        """See :meth:`~weight_store.store.Store.list`."""
        check_key_prefix(prefix)
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        for key, (data, modified_s) in found:
            yield Entry(key, len(data), _etag(data), modified_s)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _find(self, key: str) -> bytes:
        found = self._objects.get(check_object_key(key))
        if found is None:
            raise ObjectNotFound(f"no object {key}", key=key)
        return found[0]


class MemoryUpload:
    """An upload that becomes an object when it is committed."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        self._data = bytearray()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See :meth:`~weight_store.store.Upload.write`."""
        self._data += data

    async def commit(self) -> None:
        """See :meth:`~weight_store.store.Upload.commit`."""
        await self._store.create(self._key, bytes(self._data))


def _etag(data: bytes) -> str:
    # A digest of the content, like S3's: a value that comes back has its old ETag, as it would there.
    return f'"{xxhash.xxh3_128_hexdigest(data)}"'
