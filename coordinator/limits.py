"""Bounds on what a client may send and how slowly it may send it. Pure ASGI."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.errors import BodyTooLarge, TooSlow
from coordinator.problems import BODY_TIMEOUT_S, MAX_BODY_BYTES, problem_response, too_large


class BodyLimit:
    """Middleware that refuses bodies above ``MAX_BODY_BYTES``, announced or not, and those that trickle in."""

    def __init__(self, app: ASGIApp, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a ``receive`` that counts and looks at the clock."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or len(announced) > 18 or int(announced) > MAX_BODY_BYTES:
            await problem_response(too_large())(scope, receive, send)
            return
        seen, more = 0, True
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s

        async def counting() -> Message:
            nonlocal seen, more
            try:
                # After the body only a disconnect can come, and that may be long.
                async with asyncio.timeout_at(deadline_s if more else None):
                    message = await receive()
            except TimeoutError:
                # FastAPI lets this one pass; any other exception would become a complaint about JSON.
                raise HTTPException(TooSlow.status) from None
            seen += len(message.get("body", b""))
            more = message.get("more_body", False)
            if seen > MAX_BODY_BYTES:
                raise HTTPException(BodyTooLarge.status)
            return message

        await self._app(scope, counting, send)
