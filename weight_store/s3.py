"""S3 and what speaks its language: aiobotocore for polling and reads, :mod:`~weight_store.s3_upload` for shards.

Classifies, never retries, although aiohttp sends a request once more when the connection broke: a lost reply may also
show as "exists already", which the port allows. Bodies are streamed into the caller's buffer in whatever pieces the
socket gives: ``read()`` of a large body costs eight times the throughput.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import ClientError

from weight_store.errors import (
    FormatError,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreRefused,
    StoreUnavailable,
)
from weight_store.object_keys import check_key_prefix, check_object_key
from weight_store.retry import ONCE, Retrier
from weight_store.s3_clock import SigningClock
from weight_store.s3_errors import translated
from weight_store.s3_settings import S3Location, S3Options, client_arguments, shared_loader
from weight_store.s3_upload import S3Uploader
from weight_store.store import Blob, Entry, Moved, UnfinishedUpload, Upload

# botocore sends bytes as a file, with "Expect: 100-continue" and so a second round trip; a bytearray goes at once.
# That would copy a large body for nothing, and aiohttp warns of it.
_ONE_TRIP_BYTES = 2**18


class S3Store:
    """Objects in a bucket. The client is made at the first call, in that call's event loop, which must stay the same.

    ``retrier`` is for the parts of an upload and the pages of a listing, which no decorator outside can see. ``moved``
    hears how far the server has taken or given the bodies of uploads and of ranged reads.
    """

    def __init__(
        self,
        location: S3Location,
        options: S3Options | None = None,
        *,
        retrier: Retrier | None = None,
        moved: Moved | None = None,
    ) -> None:
        self._location = location
        self._options = options or S3Options()
        self._retrier = retrier or Retrier(ONCE)
        self._moved = moved or _nobody
        self._clock = SigningClock(location.place)
        self._uploader = S3Uploader(location, self._options, self._retrier, self._clock, self._moved)
        self._stack = AsyncExitStack()
        self._client: Any = None
        self._connecting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"S3Store({self._location.bucket!r}, {self._location.prefix!r}, {self._location.place.endpoint!r})"

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        """See :meth:`~weight_store.store.Store.get`."""
        with self._translated(key):
            async with self._body(key) as (answer, chunks):
                size = int(answer.get("ContentLength", 0))
                data = bytearray()
                if size <= max_bytes:
                    async for chunk in chunks:
                        data += chunk
                        if len(data) > max_bytes:
                            break
        if max(size, len(data)) > max_bytes:
            raise ObjectTooLarge(f"object {key} has {max(size, len(data))} bytes; at most {max_bytes} are allowed here")
        if "ContentLength" in answer and len(data) != size:
            raise StoreUnavailable(f"object {key} was cut short at byte {len(data)} of {size}", key=key)
        return Blob(bytes(data), _etag_of(answer, key))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See :meth:`~weight_store.store.Store.read_into`. An empty buffer asks nothing of the store."""
        view = buffer.cast("B")
        end = offset + len(view)
        if offset < 0:
            raise FormatError(f"object {key} has no byte {offset}")
        if not view:
            check_object_key(key)
            return
        filled = 0
        with self._translated(key):
            try:
                async with self._body(key, Range=f"bytes={offset}-{end - 1}") as (answer, chunks):
                    _check_range(answer, key, offset, end)
                    async for chunk in chunks:
                        taken = min(len(chunk), len(view) - filled)
                        view[filled : filled + taken] = chunk[:taken]
                        filled += taken
                        self._moved(key, offset, offset + filled)
                        if taken < len(chunk):
                            # A server that took the range for the whole object; what we asked for is complete.
                            break
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in {"InvalidRange", "416"}:
                    raise FormatError(f"object {key} ends before byte {offset}") from error
                raise
        if filled < len(view):
            raise StoreUnavailable(f"object {key}: the body was cut short at byte {offset + filled}", key=key)

    async def create(self, key: str, data: bytes) -> str:
        """See :meth:`~weight_store.store.Store.create`."""
        return await self._put(key, data, IfNoneMatch="*")

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        """See :meth:`~weight_store.store.Store.replace`."""
        try:
            return await self._put(key, data, IfMatch=etag)
        except ObjectNotFound as error:
            # Amazon answers 404 to If-Match on a missing key, others 412.
            raise PreconditionFailed(f"object {key} is gone", key=key) from error

    @asynccontextmanager
    async def upload(self, key: str) -> AsyncIterator[Upload]:
        """See :meth:`~weight_store.store.Store.upload`."""
        check_object_key(key)
        async with self._uploader.open(key) as upload:
            yield upload

    async def delete(self, key: str) -> None:
        """See :meth:`~weight_store.store.Store.delete`."""
        with self._translated(key):
            client = await self._connected()
            await client.delete_object(**self._address(key))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        """See :meth:`~weight_store.store.Store.list`. The order is the server's.

        Amazon compares whole keys; SeaweedFS compares them part by part, so ``run/x`` may precede ``run-2/x`` there.
        """
        check_key_prefix(prefix)
        full_prefix = self._location.full_key(prefix) if prefix or self._location.prefix else ""
        token: dict[str, str] = {}
        while True:
            page = await self._retrier.call(functools.partial(self._page, full_prefix, token))
            for found in page.get("Contents", ()):
                with self._translated(""):
                    entry = Entry(
                        self._location.relative_key(found["Key"]),
                        int(found["Size"]),
                        found.get("ETag", ""),
                        found["LastModified"].timestamp(),
                    )
                yield entry
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    async def list_uploads(self, prefix: str) -> AsyncIterator[UnfinishedUpload]:
        """See :meth:`~weight_store.store.MultipartStore.list_uploads`."""
        check_key_prefix(prefix)
        full_prefix = self._location.full_key(prefix) if prefix or self._location.prefix else ""
        marker: dict[str, str] = {}
        while True:
            page = await self._retrier.call(functools.partial(self._upload_page, full_prefix, marker))
            for found in page.get("Uploads", ()):
                # SeaweedFS lists whole directories whatever the prefix.
                if found["Key"].startswith(full_prefix):
                    key = self._location.relative_key(found["Key"])
                    yield UnfinishedUpload(key, found["UploadId"], found["Initiated"].timestamp())
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"]}
            if page.get("NextUploadIdMarker"):
                marker["UploadIdMarker"] = page["NextUploadIdMarker"]

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """See :meth:`~weight_store.store.MultipartStore.abort_upload`."""
        try:
            with self._translated(upload.key):
                client = await self._connected()
                await client.abort_multipart_upload(**self._address(upload.key), UploadId=upload.upload_id)
        except ObjectNotFound:
            return
        except StoreUnavailable as error:
            # Read as transient for an upload of our own; here it only means that there is nothing left to do.
            if not _is_unknown_upload(error):
                raise

    async def close(self) -> None:
        """See :meth:`~weight_store.store.Store.close`."""
        self._client = None
        await self._stack.aclose()
        await self._uploader.close()

    async def _page(self, full_prefix: str, token: Mapping[str, str]) -> Mapping[str, Any]:
        with self._translated(""):
            client = await self._connected()
            page: Mapping[str, Any] = await client.list_objects_v2(
                Bucket=self._location.bucket, Prefix=full_prefix, **token
            )
        return page

    async def _upload_page(self, full_prefix: str, marker: Mapping[str, str]) -> Mapping[str, Any]:
        with self._translated(""):
            client = await self._connected()
            page: Mapping[str, Any] = await client.list_multipart_uploads(
                Bucket=self._location.bucket, Prefix=full_prefix, **marker
            )
        return page

    async def _put(self, key: str, data: bytes, **condition: str) -> str:
        # Records are small, so always: buckets with a default retention (Object Lock) ask for it, too.
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        with self._translated(key):
            client = await self._connected()
            body = bytearray(data) if len(data) <= _ONE_TRIP_BYTES else data
            answer = await client.put_object(**self._address(key), Body=body, ContentMD5=md5, **condition)
        return _etag_of(answer, key)

    @asynccontextmanager
    async def _body(self, key: str, **more: str) -> AsyncIterator[tuple[Mapping[str, Any], AsyncIterator[bytes]]]:
        client = await self._connected()
        answer = await client.get_object(**self._address(key), **more)
        # Leaving early drops the connection, which is cheaper than reading what nobody wants.
        async with answer["Body"] as body:
            yield answer, body.raw_stream.content.iter_any()

    def _address(self, key: str) -> dict[str, str]:
        return {"Bucket": self._location.bucket, "Key": self._location.full_key(check_object_key(key))}

    def _translated(self, key: str) -> Any:
        return translated(self._location.place, key)

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None:
                arguments = client_arguments(
                    self._location,
                    self._options,
                    AioConfig,
                    read_timeout_s=self._options.read_timeout_s,
                    connections=self._options.max_connections,
                )
                session = get_session()
                session.register_component("data_loader", shared_loader())
                opening: AbstractAsyncContextManager[Any] = session.create_client("s3", **arguments)
                client = await self._stack.enter_async_context(opening)
                self._clock.watch(client)
                self._client = client
            return self._client


def _nobody(key: str, start: int, end: int) -> None:
    pass


def _is_unknown_upload(error: StoreUnavailable) -> bool:
    cause = error.__cause__
    return isinstance(cause, ClientError) and cause.response.get("Error", {}).get("Code") == "NoSuchUpload"


def _etag_of(answer: Mapping[str, Any], key: str) -> str:
    etag = str(answer.get("ETag", ""))
    if not etag:
        raise StoreRefused(f"the store gives no ETag (object {key}), so nothing could be replaced safely", key=key)
    return etag


def _check_range(answer: Mapping[str, Any], key: str, offset: int, end: int) -> None:
    """Compare what is coming with what was asked, before a byte of it is used."""
    length = int(answer.get("ContentLength", end - offset))
    served = answer.get("ContentRange")
    if served is None:
        if offset:
            raise StoreRefused(f"the store ignores ranges (object {key}): weightcast cannot use it", key=key)
    elif not served.startswith(f"bytes {offset}-"):
        raise StoreUnavailable(f"object {key}: asked for byte {offset}, got {served[:60]!r}", key=key)
    if length < end - offset:
        raise FormatError(f"object {key} ends at byte {offset + length}, before the wanted {offset}..{end}")
