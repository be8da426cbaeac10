"""What ``publish`` returns: how far one publication is, usable from plain synchronous training code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_agent.errors import TrainerError


@dataclass(frozen=True, slots=True)
class Stats:
    """Of a sealed version: weights that changed, all weights, bytes uploaded and bytes of all weights, over all ranks;
    seconds of this rank for the copy, encoding (summed over threads), uploading and waiting for the seal;
    ``damaged_groups`` of this rank whose base in shared memory had changed by itself, and which were sent whole.
    """

    changed: int
    elements: int
    payload_bytes: int
    weight_bytes: int
    copy_s: float
    encode_s: float
    upload_s: float
    seal_s: float
    damaged_groups: int = 0


AskServing = Callable[[int, Sequence[str], float, float], bool]


def _no_trouble() -> str:
    return ""


class Handle:
    """One publication. Safe to read from any thread."""

    def __init__(
        self,
        ordinal: int,
        step: int,
        changed: threading.Condition,
        ask: AskServing,
        trouble: Callable[[], str] = _no_trouble,
    ) -> None:
        self.ordinal = ordinal
        self.step = step
        self._changed = changed
        self._ask = ask
        self._trouble = trouble
        self._copied = False
        self._version: int | None = None
        self._sealed = False
        self._error: TrainerError | None = None
        self._stats: Stats | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "sealed" if self._sealed else "undecided"
        return f"Handle(step={self.step}, version={self._version}, {state})"

    @property
    def copied(self) -> bool:
        """True once the weights are copied: the optimiser may go on. ``publish`` returns after that."""
        return self._copied

    @property
    def version(self) -> int | None:
        """The version's number once it is opened; it exists for readers only once :meth:`sealed` returned."""
        return self._version

    @property
    def error(self) -> TrainerError | None:
        """Why the publication failed, or None."""
        return self._error

    @property
    def stats(self) -> Stats | None:
        """Sizes and times once sealed."""
        return self._stats

    @property
    def done(self) -> bool:
        """True once it is sealed or has failed."""
        return self._sealed or self._error is not None

    @property
    def trouble(self) -> str:
        """What the sidecar waits for and why, in words for people; empty where it knows of nothing."""
        return self._trouble()

    def sealed(self, timeout: float | None = None) -> int:
        """Wait until the version is sealed and return its number.

        Raises the publication's error, or ``TimeoutError`` after ``timeout`` seconds (None: wait until decided), which
        says what the sidecar waits for if it knows.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                why = f": {self.trouble}" if self.trouble else ""
                raise TimeoutError(f"step {self.step} is not decided after {timeout:g} s{why}")
            if self._error is not None:
                raise self._error
            if self._version is None:
                raise TimeoutError(f"step {self.step} has no version")
            return self._version

    def serving(self, regions: Sequence[str] = (), quorum: float = 1.0, timeout: float = 60.0) -> bool:
        """Wait until the version is served: in ``regions`` (none: all that are known), by the share ``quorum`` of the
        agents of each. False if it is not after ``timeout`` seconds. Raises the publication's error.
        """
        deadline_s = time.monotonic() + timeout
        try:
            version = self.sealed(timeout)
        except TimeoutError:
            return False
        return self._ask(version, regions, quorum, max(0.0, deadline_s - time.monotonic()))

    # Called by the Publisher, which holds the condition.

    def note_copied(self) -> None:
        """The weights are in the slot."""
        self._copied = True

    def note_opened(self, version: int) -> None:
        """The version has its number."""
        self._version = version
        self._changed.notify_all()

    def note_sealed(self, version: int, stats: Stats) -> None:
        """The version is sealed."""
        self._version, self._stats, self._sealed = version, stats, True
        self._changed.notify_all()

    def note_failed(self, error: TrainerError) -> None:
        """The publication failed."""
        self._error = error
        self._changed.notify_all()
