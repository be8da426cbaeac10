"""Streamed uploads to S3: boto3 in threads, multipart by hand, create-only.

boto3's own TransferManager cannot make a conditional upload. Threads rather than the event loop, because sending and
MD5 release the GIL and a sidecar's loop is busy encoding. Memory: one part that fills for each open upload, and
``upload_workers`` parts in flight for the whole store.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config

from weight_store.errors import ObjectNotFound, PreconditionFailed, StoreError, StoreRefused, StoreUnavailable
from weight_store.finishing import finished
from weight_store.retry import Retrier
from weight_store.s3_clock import SigningClock
from weight_store.s3_errors import translated
from weight_store.s3_settings import S3Location, S3Options, client_arguments, shared_loader
from weight_store.store import Moved

T = TypeVar("T")

_log = logging.getLogger(__name__)

# A random id in the object's metadata: after "exists already", a HEAD tells our own write from somebody else's, which
# the bytes of a large object could only do by reading it.
_WRITE_ID = "weightcast-write"
_MAX_PARTS = 10_000
_MIN_PART_BYTES = 5 * 2**20
_BLOCK_BYTES = 2**18
# How long an abandoned upload waits for requests that are already being sent before it aborts all the same.
_DRAIN_S = 10.0


class S3Uploader:
    """The thread pool and the boto3 client that all uploads of a store share; made when first needed."""

    def __init__(
        self,
        location: S3Location,
        options: S3Options,
        retrier: Retrier,
        clock: SigningClock,
        moved: Moved,
    ) -> None:
        if options.part_bytes < _MIN_PART_BYTES:
            raise StoreRefused(f"part_bytes is {options.part_bytes}; S3 takes no parts below {_MIN_PART_BYTES}")
        self.location = location
        self.options = options
        self.retrier = retrier
        self._clock = clock
        self._moved = moved
        # Taken by every part in flight, so that any number of uploads together stay within the bound.
        self.slots = asyncio.Semaphore(options.upload_workers)
        self._pool = ThreadPoolExecutor(options.upload_workers, thread_name_prefix="weightcast-upload")
        self._client: Any = None
        self._client_lock = threading.Lock()
        # What the thread is about: botocore's events know the request alone.
        self._about = threading.local()

    @asynccontextmanager
    async def open(self, key: str) -> AsyncIterator[S3Upload]:
        """Yield an upload to ``key``; what is not committed at the end is aborted."""
        upload = S3Upload(self, key, uuid.uuid4().hex)
        try:
            yield upload
        finally:
            await finished(upload.discard())

    def submit(self, key: str, request: Callable[[Any], T], start: int = 0) -> Future[T]:
        """Run ``request(client)`` in a thread; its future raises the port's errors.

        ``start``: where in the object its body begins.
        """

        def work() -> T:
            self._about.piece = (key, start)
            with translated(self.location.place, key):
                return request(self._connected())

        return self._pool.submit(work)

    async def close(self) -> None:
        """Wait for what is being sent and release the connections. Calling it twice is allowed."""
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._client_lock:
            if self._client is None:
                arguments = client_arguments(
                    self.location,
                    self.options,
                    Config,
                    read_timeout_s=self.options.upload_timeout_s,
                    connections=self.options.upload_workers,
                )
                # A session of its own: boto3's default one is shared with the user's code and not thread-safe.
                session = botocore.session.get_session()
                session.register_component("data_loader", shared_loader())
                client = boto3.session.Session(botocore_session=session).client("s3", **arguments)
                self._clock.watch(client)
                client.meta.events.register("before-send.s3", self._count)
                self._client = client
            return self._client

    def _count(self, request: Any, **_: Any) -> None:
        """botocore's event: what is about to go over the wire."""
        if isinstance(request.body, bytearray):
            request.body = _Counted(request.body, self._moved, *self._about.piece)


class _Counted:
    """A body that says how far the socket has taken it.

    It stands in for a bytearray only where that is sent: as a body given to botocore it would be taken for a file.
    """

    def __init__(self, body: bytearray, moved: Moved, key: str, start: int) -> None:
        self._body = body
        self._at = 0
        self._moved = moved
        self._key = key
        self._start = start

    def read(self, size: int = -1) -> bytearray:
        """The next block. Larger than asked, because http.client asks for so little that the GIL would be the limit.

        A copy, cheap beside sending it: a view in an error's traceback would hold the whole body.
        """
        # Whoever asks for the next block has got rid of the one before.
        self._moved(self._key, self._start, self._start + self._at)
        block = self._body[self._at : self._at + _BLOCK_BYTES]
        self._at += len(block)
        return block

    def seek(self, offset: int) -> int:
        """botocore goes back to the beginning before it sends to the region in which the bucket really is."""
        self._at = offset
        return offset


class S3Upload:
    """One create-only object: a single PUT up to the part size, a multipart upload above it."""

    def __init__(self, uploader: S3Uploader, key: str, write_id: str) -> None:
        self._uploader = uploader
        self._key = key
        self._write_id = write_id
        self._address = {
            "Bucket": uploader.location.bucket,
            "Key": uploader.location.full_key(key),
        }
        self._buffer = bytearray()
        self._spare: list[bytearray] = []
        # By part number: what is being sent, or could not be.
        self._bodies: dict[int, bytearray] = {}
        self._filled = 0
        self._upload_id: str | None = None
        self._parts: list[asyncio.Task[dict[str, Any]]] = []
        self._running: set[Future[Any]] = set()
        self._committed = False

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See :meth:`~weight_store.store.Upload.write`. Waits while ``upload_workers`` parts are in flight."""
        view = memoryview(data).cast("B")
        while view:
            # A full part is sent only when more follows: an object of exactly one part is one PUT.
            if self._filled and self._filled == len(self._buffer):
                await self._send_part()
            if not self._buffer:
                self._buffer = self._spare.pop() if self._spare else bytearray(self._uploader.options.part_bytes)
            taken = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]

    async def commit(self) -> None:
        """See :meth:`~weight_store.store.Upload.commit`. May be called again after ``StoreUnavailable``."""
        if self._committed:
            return
        try:
            if self._upload_id is None:
                await self._put()
            else:
                await self._complete()
        except (PreconditionFailed, StoreUnavailable):
            # The lost attempt may have been the one that counted; a completed upload's id is unknown afterwards.
            if not await self._is_ours():
                raise
        self._committed = True

    async def discard(self) -> None:
        """Abort what was not committed, so that its parts are not stored and billed for ever; free the memory."""
        try:
            await self._end()
        finally:
            # The clients' errors make cycles with what was to be sent: it would be there until the collector comes by.
            if not self._running:
                for buffer in (self._buffer, *self._spare, *self._bodies.values()):
                    buffer.clear()

    async def _end(self) -> None:
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        if self._running:
            # A part that arrives after the abort would stay: S3 asks to abort when none is being sent.
            await asyncio.wait([asyncio.wrap_future(sent) for sent in self._running], timeout=_DRAIN_S)
        if self._committed or self._upload_id is None:
            return
        upload_id = self._upload_id
        try:
            await self._send(lambda client: client.abort_multipart_upload(**self._address, UploadId=upload_id))
        except ObjectNotFound:
            pass
        except StoreError as error:
            _log.warning("an unfinished upload of %s stays until garbage collection: %s", self._key, error)

    async def _send_part(self) -> None:
        if len(self._parts) == _MAX_PARTS:
            raise StoreRefused(
                f"object {self._key} needs more than {_MAX_PARTS} parts: raise part_bytes "
                f"above {self._uploader.options.part_bytes}",
                key=self._key,
            )
        if self._upload_id is None:
            await self._uploader.retrier.call(self._begin)
        for part in self._parts:
            if part.done():
                part.result()
        await self._uploader.slots.acquire()
        body, self._buffer, self._filled = self._buffer, bytearray(), 0
        self._bodies[len(self._parts) + 1] = body
        self._parts.append(self._start_part(len(self._parts) + 1))

    def _start_part(self, number: int) -> asyncio.Task[dict[str, Any]]:
        """Begin to send a part whose slot was taken; the slot is given back however that ends."""
        part = asyncio.create_task(self._part(number, self._bodies[number]))
        part.add_done_callback(lambda _: self._uploader.slots.release())
        return part

    async def _part(self, number: int, body: bytearray) -> dict[str, Any]:
        def request(client: Any) -> Any:
            return client.upload_part(
                **self._address,
                PartNumber=number,
                UploadId=self._upload_id,
                Body=body,
                **self._integrity(body),
            )

        start = (number - 1) * self._uploader.options.part_bytes
        # Safe to repeat: the same part number overwrites itself.
        answer = await self._uploader.retrier.call(lambda: self._send(request, start))
        self._spare.append(self._bodies.pop(number))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    async def _begin(self) -> None:
        def request(client: Any) -> None:
            answer = client.create_multipart_upload(**self._address, Metadata={_WRITE_ID: self._write_id})
            # Set here, in the thread: a cancelled task would never see the answer, and could not abort.
            self._upload_id = answer["UploadId"]

        await self._send(request)

    async def _complete(self) -> None:
        if self._filled:
            if self._filled < len(self._buffer):
                # A copy: what is left of a failed attempt may still hold on to the buffer, which then keeps its size.
                self._buffer = self._buffer[: self._filled]
            await self._send_part()
        for index, part in enumerate(self._parts):
            # Left by an earlier call that ran out of attempts; its bytes are still here.
            if part.done() and index + 1 in self._bodies:
                await self._uploader.slots.acquire()
                self._parts[index] = self._start_part(index + 1)
        parts = await asyncio.gather(*self._parts)
        await self._send(
            lambda client: client.complete_multipart_upload(
                **self._address,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
            )
        )

    async def _put(self) -> None:
        # Not bytes, which botocore would send as a file, after a round trip for "100 Continue".
        body = self._bodies[1] = self._buffer[: self._filled]
        await self._send(
            lambda client: client.put_object(
                **self._address,
                Body=body,
                IfNoneMatch="*",
                Metadata={_WRITE_ID: self._write_id},
                **self._integrity(body),
            )
        )

    async def _is_ours(self) -> bool:
        try:
            answer = await self._send(lambda client: client.head_object(**self._address))
        except StoreError:
            # Then the outcome stays as unknown as it was.
            return False
        return bool(answer.get("Metadata", {}).get(_WRITE_ID) == self._write_id)

    def _integrity(self, body: bytes | bytearray) -> dict[str, str]:
        if not self._uploader.location.sends_md5:
            return {}
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        return {"ContentMD5": base64.b64encode(digest).decode()}

    async def _send(self, request: Callable[[Any], T], start: int = 0) -> T:
        sent = self._uploader.submit(self._key, request, start)
        self._running.add(sent)
        sent.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(sent)
