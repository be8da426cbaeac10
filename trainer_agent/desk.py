"""Between the Publisher and its sidecar: what is undecided, which slots are in use, what has to be told again."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from trainer_agent.arena import Arena
from trainer_agent.errors import (
    Fenced,
    Misuse,
    PublicationFailed,
    SidecarFailed,
    StillUndecided,
    TrainerError,
    Unreachable,
    by_code,
)
from trainer_agent.handle import Handle, Stats
from trainer_agent.link import Link
from trainer_agent.messages import (
    AskServing,
    Attach,
    Attached,
    BaseRebuilt,
    Close,
    Event,
    Failed,
    FullDone,
    LayoutReady,
    Offered,
    Opened,
    Publish,
    Sealed,
    Served,
    Waiting,
)
from weight_store.layout import Layout
from weight_store.offer import Offer
from weight_store.records import sha256_hex

_log = logging.getLogger(__name__)

_QUIET_S = 1.0
"""How long closing waits without a word."""
_REUNION_S = 5.0
"""How long a step waits at least once a publication was given up: perhaps the ranks left out different ones. Each gives
up what the other published alone; learned only once the next one is left out too, they would take turns for ever.
"""


class _Pending:
    """The publication that is undecided."""

    def __init__(self, handle: Handle, slot: int, copy_s: float) -> None:
        self.handle = handle
        self.slot = slot
        self.copy_s = copy_s
        self.waited_s = 0.0
        """How long it has held up training."""


class Desk:
    """State shared by training code and the link's thread, under one condition. ``make_link`` makes that thread."""

    def __init__(self, arena: Arena, attach: Attach, make_link: Callable[..., Link] = Link) -> None:
        self._arena = arena
        self._attach = attach
        self._changed = threading.Condition()
        self._connected = False
        self._ready = False
        self._trouble = ""
        self._offered: bytes | None = None
        self._layout: Layout | None = None
        self._pending: _Pending | None = None
        self._base_slot: int | None = None
        self._full_slot: int | None = None
        self._failure: TrainerError | None = None
        self._apart = False
        """Whether the last publication that was decided was given up."""
        self._questions: dict[int, AskServing] = {}
        self._answers: dict[int, Served] = {}
        self._ids = itertools.count()
        self._link = make_link(
            arena.socket_path,
            on_connect=self._on_connect,
            on_event=self._on_event,
            on_loss=self._on_loss,
            on_end=self._on_end,
        )

    @property
    def sidecar_pid(self) -> int | None:
        """The sidecar's process, while it runs."""
        return self._link.pid

    def start(self) -> None:
        """Start the sidecar."""
        self._link.start()

    # -- called by training code --

    def new_handle(self, ordinal: int, step: int) -> Handle:
        """A handle that this desk will complete."""
        return Handle(ordinal, step, self._changed, self._ask_serving, lambda: self._trouble)

    def fail(self, handle: Handle, error: TrainerError) -> None:
        """The publication ends before it reached the sidecar."""
        with self._changed:
            handle.note_failed(error)

    def check_alive(self) -> None:
        """Raise what ended this launch's publishing for good, if anything did."""
        with self._changed:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait_attached(self, deadline_s: float) -> tuple[str, int]:
        """Run UUID and term. Raises ``Unreachable`` after ``deadline_s`` (monotonic)."""
        with self._changed:
            self._wait_until(lambda: self._ready, deadline_s, f"this launch has not begun run {self._attach.run}")
            if self._attach.run_id is None or self._attach.term is None:
                raise SidecarFailed("the sidecar attached without a term")
            return self._attach.run_id, self._attach.term

    def settle(self, offer: Offer, deadline_s: float) -> Layout:
        """Offer, and wait for the layout of all ranks."""
        data = offer.to_bytes()
        with self._changed:
            if self._offered is None:
                self._arena.write("offer", data)
                self._offered = data
                if self._ready:
                    self._link.send(Offered())
            elif self._offered != data:
                raise Misuse("the pieces differ from those already offered in this launch: start the job again")
            self._wait_until(lambda: self._layout is not None, deadline_s, "the ranks have not agreed on a layout")
            if self._layout is None:
                raise SidecarFailed("the sidecar settled no layout")
            return self._layout

    def _wait_until(self, ready: Callable[[], bool], deadline_s: float, sentence: str) -> None:
        self._changed.wait_for(lambda: self._failure is not None or ready(), max(0.0, deadline_s - time.monotonic()))
        self._raise_failure()
        if not ready():
            raise Unreachable(
                f"{sentence}: {self._why_not()}. The sidecar goes on trying, and so does the next publication"
            )

    def _why_not(self) -> str:
        if self._trouble:
            return self._trouble
        if not self._connected:
            return "the sidecar has not started yet; its messages are in the trainer's error output"
        return f"neither the coordinator at {self._attach.coordinator} nor the store has answered yet"

    def wait_for_slot(self, max_wait_s: float) -> int:
        """The slot for the next copy, once it is free.

        Raises ``StillUndecided`` once it has waited ``max_wait_s`` for the publication before, so that an outage holds
        up training once and not at every step; a few seconds at least where the last one that was decided was given up.
        """
        with self._changed:
            if self._apart:
                max_wait_s = max(max_wait_s, _REUNION_S)
            pending = self._pending
            if pending is not None:
                # Not counted from its copy: where a step of training takes longer than that, nothing would be waited
                # for, and two ranks of which each left out what the other publishes would take turns for ever.
                started_s = time.monotonic()
                left_s = max(0.0, max_wait_s - pending.waited_s)
                self._changed.wait_for(lambda: self._pending is None or self._failure is not None, left_s)
                pending.waited_s += time.monotonic() - started_s
            self._raise_failure()
            if self._pending is not None:
                why = f": {self._trouble}" if self._trouble else ""
                raise StillUndecided(
                    f"step {self._pending.handle.step} is still undecided after it held up training for "
                    f"{max_wait_s:g} s, and this step is dropped{why}"
                )
            self._changed.wait_for(lambda: self._free_slot() is not None or self._failure is not None, max_wait_s)
            self._raise_failure()
            slot = self._free_slot()
            if slot is None:
                raise StillUndecided(f"a full is still being uploaded after {max_wait_s:g} s; this step is dropped")
            return slot

    def _free_slot(self) -> int | None:
        if self._base_slot is not None:
            slot = 1 - self._base_slot
            return None if slot == self._full_slot else slot
        return 1 if self._full_slot == 0 else 0

    def publish(self, handle: Handle, slot: int, copy_s: float) -> None:
        """The slot is filled: hand it to the sidecar."""
        with self._changed:
            handle.note_copied()
            self._raise_failure()
            self._pending = _Pending(handle, slot, copy_s)
            if self._ready:
                self._link.send(Publish(ordinal=handle.ordinal, step=handle.step, slot=slot))

    def _ask_serving(self, version: int, regions: Sequence[str], quorum: float, timeout_s: float) -> bool:
        wanted = tuple(regions)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                left_s = max(0.0, deadline_s - time.monotonic())
                served = self._ask_once(version, wanted, quorum, min(left_s, 30.0))
                if served is not None and served.reached:
                    return True
                if time.monotonic() >= deadline_s:
                    return False
                self._raise_failure()
                if served is not None and served.error:
                    _log.info("serving of version %d: %s", version, served.error)
                    self._changed.wait(min(1.0, max(0.0, deadline_s - time.monotonic())))

    def _ask_once(self, version: int, regions: tuple[str, ...], quorum: float, timeout_s: float) -> Served | None:
        question = AskServing(id=next(self._ids), version=version, regions=regions, quorum=quorum, timeout_s=timeout_s)
        self._questions[question.id] = question
        if self._ready:
            self._link.send(question)
        self._changed.wait_for(lambda: question.id in self._answers or self._failure is not None, timeout_s + 1.0)
        self._questions.pop(question.id, None)
        return self._answers.pop(question.id, None)

    def close(self, timeout_s: float) -> None:
        """Wait for what is undecided, then end the sidecar; both within about ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._wait_decided(timeout_s)
            left_s = max(0.0, deadline_s - time.monotonic()) if self._pending is None else 0.0
            self._link.send(Close(grace_s=left_s))
        self._link.close(left_s + 5.0)
        with self._changed:
            if self._pending is not None:
                error = PublicationFailed("the Publisher was closed before this publication was decided")
                self._pending.handle.note_failed(error)
                self._pending = None
            self._failure = self._failure or Misuse("the Publisher is closed")
            self._changed.notify_all()

    def _wait_decided(self, timeout_s: float) -> None:
        def decided() -> bool:
            return self._pending is None or self._failure is not None

        quiet_s = min(timeout_s, _QUIET_S)
        if self._changed.wait_for(decided, quiet_s) or timeout_s <= quiet_s or self._pending is None:
            return
        _log.warning(
            "waiting up to %.0f s until step %d is decided%s; Ctrl-C gives it up",
            timeout_s - quiet_s,
            self._pending.handle.step,
            f" ({self._trouble})" if self._trouble else "",
        )
        self._changed.wait_for(decided, timeout_s - quiet_s)

    # -- called by the link's thread --

    def _on_connect(self) -> None:
        self._link.send(self._attach)
        with self._changed:
            self._connected, self._trouble = True, ""

    def _on_loss(self) -> None:
        with self._changed:
            self._connected = self._ready = False

    def _on_end(self, error: SidecarFailed) -> None:
        with self._changed:
            self._end(error)

    def _end(self, error: TrainerError) -> None:
        self._failure = error
        if self._pending is not None:
            self._pending.handle.note_failed(error)
            self._pending = None
        self._changed.notify_all()

    def _on_event(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, Attached):
                self._attached(event)
            elif isinstance(event, LayoutReady):
                self._layout_ready(event)
            elif isinstance(event, Opened):
                if self._is_pending(event.ordinal) and self._pending is not None:
                    self._pending.handle.note_opened(event.version)
            elif isinstance(event, BaseRebuilt):
                self._base_slot = event.base_slot
            elif isinstance(event, Sealed):
                self._sealed(event)
            elif isinstance(event, Failed):
                self._failed(event)
            elif isinstance(event, Waiting):
                self._trouble = event.reason
            elif isinstance(event, FullDone):
                self._trouble = ""
                if self._full_slot == event.slot:
                    self._full_slot = None
            elif event.id in self._questions:
                self._answers[event.id] = event
            self._changed.notify_all()

    def _is_pending(self, ordinal: int) -> bool:
        return self._pending is not None and self._pending.handle.ordinal == ordinal

    def _attached(self, event: Attached) -> None:
        self._attach = self._attach.model_copy(update={"run_id": event.run_id, "term": event.term})
        self._base_slot, self._full_slot = event.base_slot, event.full_slot
        self._ready, self._trouble = True, ""
        if self._offered is not None and self._layout is None:
            self._link.send(Offered())
        if self._pending is not None:
            handle, slot = self._pending.handle, self._pending.slot
            self._link.send(
                Publish(ordinal=handle.ordinal, step=handle.step, slot=slot, resumed=True, version=handle.version)
            )
        for question in self._questions.values():
            self._link.send(question)

    def _layout_ready(self, event: LayoutReady) -> None:
        raw = self._arena.read("layout")
        # Another one would have the pieces copied to other places, and no digest that is taken of those would tell.
        if raw is None or sha256_hex(raw) != event.sha256:
            state = "missing from" if raw is None else "damaged in"
            self._end(SidecarFailed(f"the layout is {state} {self._arena.path}: start the training job again"))
            return
        self._layout = Layout.parse(raw, key="layout")
        self._attach = self._attach.model_copy(update={"layout": event.sha256})
        self._trouble = ""
        self._link.note_progress()

    def _sealed(self, event: Sealed) -> None:
        self._base_slot, self._full_slot = event.base_slot, event.full_slot
        self._trouble = ""
        self._link.note_progress()
        if not self._is_pending(event.ordinal) or self._pending is None:
            return
        stats = Stats(
            changed=event.changed,
            elements=event.elements,
            payload_bytes=event.payload_bytes,
            weight_bytes=event.weight_bytes,
            copy_s=self._pending.copy_s,
            encode_s=event.encode_s,
            upload_s=event.upload_s,
            seal_s=event.seal_s,
            damaged_groups=event.damaged_groups,
        )
        self._apart = False
        self._pending.handle.note_sealed(event.version, stats)
        self._pending = None

    def _failed(self, event: Failed) -> None:
        error = by_code(event.code, event.message, starting=event.ordinal is None)
        if event.ordinal is None or isinstance(error, Fenced):
            self._end(error)
            return
        self._trouble = ""
        self._link.note_progress()
        if self._is_pending(event.ordinal) and self._pending is not None:
            self._apart = True
            self._pending.handle.note_failed(error)
            self._pending = None
