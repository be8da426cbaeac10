"""What trainer and sidecar say to each other: one JSON object a line over the Unix socket, bounded.

Bulk never travels here: offer, layout and weights lie in the arena.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from weight_store.position import Position

MAX_LINE_BYTES = 1 << 20


class Message(BaseModel):
    """Both ends are the same release: unknown fields are an error."""

    # A time-out may be infinite; the default writes it as null, which the other end cannot read.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def to_line(self) -> bytes:
        """One line of JSON with its newline."""
        return self.model_dump_json().encode() + b"\n"


class Attach(Message):
    """First message of a connection. ``term`` once known: a launch takes a run over one time only."""

    kind: Literal["attach"] = "attach"
    arena: str
    run: str
    store: str
    coordinator: str
    rank: int
    world_size: int
    launch: str
    term: int | None = None
    run_id: str | None = None
    layout: str | None = None
    full_every: int = 50
    assets_dir: str | None = None


class Offered(Message):
    """The arena's ``offer`` file is there: agree on a layout."""

    kind: Literal["offered"] = "offered"


class Publish(Message):
    """A slot holds publication ``ordinal``. ``resumed``: sent again, to a restarted sidecar; ``version`` if the one
    before it had opened it.
    """

    kind: Literal["publish"] = "publish"
    ordinal: int
    step: int
    slot: int
    resumed: bool = False
    version: int | None = None


class AskServing(Message):
    """Wait until regions serve a version; answered by :class:`Served` with the same ``id``."""

    kind: Literal["ask_serving"] = "ask_serving"
    id: int
    version: int
    regions: tuple[str, ...]
    quorum: float
    timeout_s: float


class Close(Message):
    """No more publications; finish background uploads within ``grace_s``, then end."""

    kind: Literal["close"] = "close"
    grace_s: float


class Attached(Message):
    """The term is ours. Slots in use: the base's, and one from which an extra full is being uploaded."""

    kind: Literal["attached"] = "attached"
    run_id: str
    term: int
    base_slot: int | None
    full_slot: int | None


class LayoutReady(Message):
    """The arena's ``layout`` file holds the layout of this SHA-256."""

    kind: Literal["layout_ready"] = "layout_ready"
    sha256: str


class Opened(Message):
    """A publication has its version number."""

    kind: Literal["opened"] = "opened"
    ordinal: int
    version: int


class Sealed(Message):
    """A publication became a version. Times are this rank's, in seconds; sizes and counts those of all ranks."""

    kind: Literal["sealed"] = "sealed"
    ordinal: int
    version: int
    position: Position | None
    base_slot: int | None
    full_slot: int | None
    changed: int = 0
    elements: int = 0
    payload_bytes: int = 0
    weight_bytes: int = 0
    encode_s: float = 0
    upload_s: float = 0
    seal_s: float = 0
    damaged_groups: int = 0


class Failed(Message):
    """A publication (or, without ``ordinal``, everything from now on) failed for the reason given."""

    kind: Literal["failed"] = "failed"
    ordinal: int | None
    code: str
    message: str


class Waiting(Message):
    """What the sidecar waits for and why, in words for people; empty once it no longer does."""

    kind: Literal["waiting"] = "waiting"
    reason: str


class BaseRebuilt(Message):
    """The base was made from the bucket; None: it cannot be. Told at once: its version may yet be given up."""

    kind: Literal["base_rebuilt"] = "base_rebuilt"
    base_slot: int | None


class FullDone(Message):
    """The background upload from a slot ended: the slot may be written again."""

    kind: Literal["full_done"] = "full_done"
    slot: int


class Served(Message):
    """Answer to :class:`AskServing`; ``error`` if the question could not be put."""

    kind: Literal["served"] = "served"
    id: int
    reached: bool
    error: str = ""


Request = Annotated[Attach | Offered | Publish | AskServing | Close, Field(discriminator="kind")]
Event = Annotated[
    Attached | LayoutReady | Opened | BaseRebuilt | Sealed | Failed | Waiting | FullDone | Served,
    Field(discriminator="kind"),
]

_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def parse_request(line: bytes) -> Request:
    """A request from one line; ``ValueError`` if it is none."""
    return _REQUEST.validate_json(line)


def parse_event(line: bytes) -> Event:
    """An event from one line; ``ValueError`` if it is none."""
    return _EVENT.validate_json(line)
