"""A store that passes everything on to another one, for tests that change a little of what happens in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from weight_store.store import Blob, Entry, Store, Upload


class Passing:
    """Everything as the store below does it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        return await self._store.get(key, max_bytes=max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._store.read_into(key, offset, buffer)

    async def create(self, key: str, data: bytes) -> str:
        return await self._store.create(key, data)

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        return await self._store.replace(key, data, etag=etag)

    def upload(self, key: str) -> AbstractAsyncContextManager[Upload]:
        return self._store.upload(key)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    def list(self, prefix: str) -> AsyncIterator[Entry]:
        return self._store.list(prefix)

    async def close(self) -> None:
        await self._store.close()
