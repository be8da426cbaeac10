"""What a rank of the training job tells the demo: lines of JSON in a file of its own, read while they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Warming:
    """The policy is being warmed up: ``done`` of ``total`` supervised steps, with the loss of rank 0."""

    done: int
    total: int
    loss: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """An optimiser step changed ``changed`` of ``elements`` published weights; ``reward`` is None without a task."""

    step: int
    changed: int
    elements: int
    step_s: float
    reward: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """SHA-256 (hashlib) of the bytes that a rank publishes at ``step``, tensor after tensor."""

    rank: int
    step: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """A publication became a version; sizes are those of all ranks, times those of rank 0.

    ``at_s`` is when, by ``time.monotonic``, which all processes of one machine share.
    """

    step: int
    version: int
    payload_bytes: int
    weight_bytes: int
    copy_s: float
    encode_s: float
    upload_s: float
    seal_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The rank has taken its last step and written its part of the proof."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank gave up; the sentence says why."""

    rank: int
    message: str


Event = Warming | Stepped | Exported | Sealed | Finished | Failed
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Warming, Stepped, Exported, Sealed, Finished, Failed)
}


class EventLog:
    """The writing end. Each event is in the file when :meth:`add` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def add(self, event: Event) -> None:
        """Append one line, in one write: threads may do so at the same time."""
        self._file.write((json.dumps({"kind": type(event).__name__, **asdict(event)}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventTail:
    """The reading end: :meth:`new` yields the events appended since the last call, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Event]:
        """Yield new events; none if the file is not there yet."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                fields = json.loads(line)
                yield _KINDS[fields.pop("kind")](**fields)
