"""A trainer may be gone with what it has just asked for: nothing of that is begun, and nothing is complained of."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from trainer_agent.messages import AskServing, Attach, Message, Offered, Publish
from trainer_agent.sidecar import Connection


async def test_what_was_not_begun_leaves_nothing_behind() -> None:
    begun: list[str] = []

    async def nothing(*_: object) -> None:
        begun.append("begun")

    async def close() -> None:
        begun.clear()

    worker = SimpleNamespace(
        attach=nothing, publish=nothing, ask_serving=nothing, settle_layout=nothing, close=close, full=None
    )
    reader = asyncio.StreamReader()
    attach = Attach(arena="/a", run="r", store="s", coordinator="c", rank=0, world_size=1, launch="l")
    asked: list[Message] = [
        attach,
        Offered(),
        Publish(ordinal=0, step=0, slot=0),
        AskServing(id=0, version=1, regions=(), quorum=1.0, timeout_s=1.0),
    ]
    reader.feed_data(b"".join(message.to_line() for message in asked))
    reader.feed_eof()
    writer: Any = SimpleNamespace(is_closing=lambda: True)
    connection = Connection(reader, writer, lambda *_: worker)  # type: ignore[arg-type, return-value]
    assert not await connection.serve()
    gc.collect()  # a coroutine that nobody awaited would say so now
    assert not begun
