"""A rebuild that is cancelled, because its version was given up, has written its last: the next copy may be there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_agent import rebuilding


async def test_no_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    written: list[str] = []
    item = SimpleNamespace(group=SimpleNamespace(index=0))

    def apply(*_: Any) -> None:
        began.set()
        go_on.wait(10)
        written.append("a group")

    async def fetch(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(range=item)

    monkeypatch.setattr(rebuilding, "_apply_group", apply)
    monkeypatch.setattr(rebuilding, "fetch_groups", fetch)
    monkeypatch.setattr(rebuilding, "group_ranges", lambda *_: [item])
    slots: Any = SimpleNamespace(view=lambda *_: None)
    receipt: Any = SimpleNamespace(version=1)
    nothing: Any = None
    task = asyncio.create_task(
        rebuilding._apply(nothing, "r", receipt, nothing, slots, 0, lambda version, groups: None)
    )
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written
