"""Server-sent events of a run. Pure: names, order and wire form.

The life of a run is one sequence, the same at every coordinator: opened 1, decided 1, opened 2, decided 2, and so on.
An event's id, ``<version>.<phase>``, is its place in it; so a client resumes at any coordinator, also at one that has
just started. Events that are no part of it (``regions``, ``gap``) carry no id and leave the client's last id as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.decisions import View

OPENED, DECIDED = 1, 2
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, so that proxies keep the connection and a dead client is noticed."""
MAX_REPLAY = 1000
"""A client that missed more versions than this is told of a gap instead; it can list the versions."""

_ID = re.compile(r"(0|[1-9][0-9]{0,11})\.([12])")


@dataclass(frozen=True, slots=True, order=True)
class EventId:
    """A place in the life of a run: ``phase`` 1 is the opening of ``version``, 2 its decision."""

    version: int
    phase: int

    def __str__(self) -> str:
        return f"{self.version}.{self.phase}"

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """Parse an id that we gave out; None for anything else."""
        match = _ID.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


def newest(view: View) -> EventId:
    """The last event that has happened."""
    if view.slot.opened is not None:
        return EventId(view.slot.version, OPENED)
    return EventId(view.slot.version - 1, DECIDED)


def start(view: View, after: EventId | None) -> tuple[EventId, EventId | None]:
    """Where a stream begins: the id after which events are sent, and the end of a gap, if one must be told.

    Without ``after`` the stream begins with the sealing of the head. An id from the future (of another run of the
    same name) begins there too.
    """
    fresh = EventId(view.head.position.version, OPENED) if view.head.position.version else EventId(0, DECIDED)
    if after is None or after > newest(view):
        return fresh, None
    oldest = view.slot.version - MAX_REPLAY
    return (fresh, fresh) if after.version < oldest else (after, None)


def following(last: EventId, view: View) -> EventId | None:
    """The event after ``last``, or None if it has not happened yet."""
    after = EventId(last.version, DECIDED) if last.phase == OPENED else EventId(last.version + 1, OPENED)
    return after if after <= newest(view) else None


def encode(name: str, data: str, event_id: EventId | None = None) -> str:
    """One event in the form of the HTML standard; ``data`` is JSON without line breaks."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {data}\n\n"
