"""A link to a sidecar that is not there, so that a test says what it tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from trainer_agent.arena import Arena
from trainer_agent.desk import Desk
from trainer_agent.link import Link
from trainer_agent.messages import Attach, Attached, Event


class Silent:
    """Stands for the link to a sidecar: the test says what the sidecar tells."""

    def __init__(self, socket_path: object, *, on_event: Callable[[Event], None], **_: Any) -> None:
        self.tell = on_event
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def note_progress(self) -> None:
        pass


def attached_desk(folder: Path) -> tuple[Desk, Arena, Callable[[Event], None]]:
    """A desk whose sidecar is there, its arena, and how to have the sidecar tell something."""
    links: list[Silent] = []

    def make(*args: Any, **callbacks: Any) -> Link:
        links.append(Silent(*args, **callbacks))
        return cast("Link", links[0])

    arena = Arena.create(folder)
    attach = Attach(
        arena=str(arena.path), run="r", store="file:///x", coordinator="http://c", rank=0, world_size=1, launch="l"
    )
    desk = Desk(arena, attach, make_link=make)
    links[0].tell(Attached(run_id="x", term=1, base_slot=None, full_slot=None))
    return desk, arena, links[0].tell
