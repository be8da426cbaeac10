"""The stream of a run's events: waits for them and puts them on the wire. Names and order are in events.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable

from coordinator import events
from coordinator.decisions import View
from coordinator.errors import UnknownVersion
from coordinator.events import EventId
from coordinator.history import History
from coordinator.runs import Run
from coordinator.wire import RegionsEvent, RegionVersion
from weight_store.errors import FormatError, StoreError

_REGIONS_EVERY_S = 1.0
"""Heartbeats may come thousands a second; what they amount to is told this often at most."""


async def feed(
    run: Run, view: View, history: History, clock: Callable[[], float], keep_alive_s: float, after: EventId | None
) -> AsyncIterator[str]:
    """Yield events after ``after`` for ever (until the coordinator stops), with keep-alive comments in between.

    ``view``: read just now. While the store does not answer, what has to be read for the next event waits for it.
    """
    last, gap = events.start(view, after)
    if gap:
        yield _gap(gap)
    told: list[tuple[str, int, int, int]] = []
    said_s = looked_s = clock()
    with run.watched():
        while not run.changed.closed:
            view, now_s = run.view or view, clock()
            text = ""
            if (event_id := events.following(last, view)) is not None:
                with contextlib.suppress(StoreError):
                    text, last = await _next(history, event_id, view, now_s)
            elif now_s - looked_s >= _REGIONS_EVERY_S or not told:
                looked_s = now_s
                regions = history.regions(view.head.position.version, now_s)
                if (summary := _summary(regions)) != told:
                    text, told = _regions(view, regions), summary
            if not text and now_s - said_s >= keep_alive_s:
                text = events.KEEP_ALIVE
            if text:
                said_s = now_s
                yield text
            else:
                await run.changed.wait(min(_REGIONS_EVERY_S, keep_alive_s))


async def _next(history: History, event_id: EventId, view: View, now_s: float) -> tuple[str, EventId]:
    try:
        answer = await history.answer(event_id.version, view, now_s)
    except (UnknownVersion, FormatError):  # deleted by retention, or damaged: go on where all is there
        head = EventId(view.head.position.version, events.OPENED)
        return _gap(head), head
    name = "opened" if event_id.phase == events.OPENED else answer.state
    return events.encode(name, answer.model_dump_json(), event_id), event_id


def _gap(until: EventId) -> str:
    return events.encode("gap", json.dumps({"until": str(until)}))


def _summary(regions: tuple[RegionVersion, ...]) -> list[tuple[str, int, int, int]]:
    return [(r.region, r.agents, r.staged, r.serving) for r in regions]


def _regions(view: View, regions: tuple[RegionVersion, ...]) -> str:
    event = RegionsEvent(version=view.head.position.version, regions=regions)
    return events.encode("regions", event.model_dump_json())
