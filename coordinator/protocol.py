"""uvicorn's HTTP/1.1 with a deadline for the head of a request, and for the TLS handshake before it.

uvicorn closes a connection that is idle between two requests, but waits for ever for the first byte of the first one
and for the last byte of every head, so a thousand clients that send a header a minute would hold every connection.
asyncio waits a minute for a handshake, before which uvicorn does not so much as count the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.errors import BadRequest
from coordinator.problems import MEDIA_TYPE
from coordinator.wire import Problem

HEAD_TIMEOUT_S = 15.0


class BoundedLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, whose TLS servers close connections that do not shake hands, or say goodbye, in time.

    uvicorn, which makes the server, has no setting for that.
    """

    handshake_timeout_s = HEAD_TIMEOUT_S

    async def create_server(self, *arguments: Any, **named: Any) -> asyncio.Server:
        """As asyncio's own."""
        if named.get("ssl") is not None:
            named.setdefault("ssl_handshake_timeout", self.handshake_timeout_s)
            named.setdefault("ssl_shutdown_timeout", self.handshake_timeout_s)
        return await super().create_server(*arguments, **named)


class BoundedProtocol(H11Protocol):
    """Closes connections on which no head of a request was completed within ``head_timeout_s``."""

    head_timeout_s = HEAD_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Start the clock with the first byte of a head, and stop it with its last."""
        super().data_received(data)
        if self._answering:
            self._forget()
        elif self._deadline is None:
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP with a problem body, as everything else."""
        detail = f"this is not an HTTP/1.1 request that can be read: {msg}"
        body = Problem(title="Bad Request", status=400, detail=detail, code=BadRequest.code).model_dump_json().encode()
        headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body)), "Connection": "close"}
        for event in (
            h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Between requests uvicorn's own clock runs; what was sent ahead may be the next head already."""
        super().on_response_complete()
        self._forget()
        if not self._answering and self.conn.trailing_data[0]:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._forget()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
