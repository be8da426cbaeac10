"""The Publisher: what training code calls. It copies weights into shared memory and leaves the rest to the sidecar."""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from trainer_agent.arena import DEFAULT_ROOT, SOCKET_PATH_BYTES, Arena
from trainer_agent.copying import SlotWriter
from trainer_agent.desk import Desk
from trainer_agent.errors import (
    Misuse,
    TrainerError,
    Unreachable,
)
from trainer_agent.handle import Handle
from trainer_agent.launching import resolve_launch, resolve_ranks
from trainer_agent.messages import Attach
from trainer_agent.offering import make_offer
from trainer_agent.piece import DEFAULT_KEEP_DTYPE, Casting, make_casting
from trainer_agent.placement import CopyPlan, place_groups, plan_copies, slot_bytes
from trainer_agent.sources import Source, as_source, stage
from trainer_agent.state import SLOTS
from weight_store.errors import FormatError
from weight_store.keys import check_run

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes the weights of one rank. Make one on every rank, at the same point of the program.

    ``rank``, ``world_size`` and ``launch`` come from torch.distributed where it is initialised; making a Publisher is
    then a collective call. ``assets_dir``: config and tokenizer to publish beside the weights (rank 0's counts).
    ``full_every``: upload a full in the background every so many versions, for late joiners. ``strict``: ``publish``
    raises what fails before it returns instead of leaving it in ``handle.error``. ``max_wait_s``: how long training may
    be held up by one undecided publication; a few seconds more where the one before was given up, so that ranks meet
    again.
    ``start_timeout_s``: how long the first one waits for coordinator and ranks.
    ``shm_dir``: a tmpfs instead of ``/dev/shm`` (also: the environment's ``WEIGHTCAST_SHM_DIR``).
    """

    def __init__(
        self,
        *,
        run: str,
        store: str,
        coordinator: str,
        rank: int | None = None,
        world_size: int | None = None,
        launch: str | None = None,
        assets_dir: str | os.PathLike[str] | None = None,
        strict: bool = False,
        full_every: int = 50,
        max_wait_s: float = 600.0,
        start_timeout_s: float = 120.0,
        shm_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        try:
            check_run(run)
        except FormatError as error:
            raise Misuse(str(error)) from None
        if full_every < 0:
            raise Misuse("full_every is a number of versions, or 0 for fulls only when the chain has become long")
        self._rank, self._world_size = resolve_ranks(rank, world_size)
        launch = resolve_launch(launch, self._rank, self._world_size)
        self._strict = strict
        self._max_wait_s = max_wait_s
        self._start_timeout_s = start_timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ordinal = 0
        self._closed = False
        self._plan: CopyPlan | None = None
        self._writers: list[SlotWriter] = []
        self._arena = _make_arena(Path(shm_dir or os.environ.get("WEIGHTCAST_SHM_DIR") or DEFAULT_ROOT))
        self._desk = Desk(
            self._arena,
            Attach(
                arena=str(self._arena.path),
                run=run,
                store=store,
                coordinator=coordinator,
                rank=self._rank,
                world_size=self._world_size,
                launch=launch,
                full_every=full_every,
                assets_dir=None if assets_dir is None else str(Path(assets_dir).absolute()),
            ),
        )
        atexit.register(self._at_exit)
        self._desk.start()

    def __repr__(self) -> str:
        return f"Publisher(rank={self._rank}, world_size={self._world_size}, published={self._ordinal})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever pressed Ctrl-C has waited long enough; what is undecided is given up.
        self.close(0.0 if kind is not None and issubclass(kind, KeyboardInterrupt) else 30.0)

    @property
    def sidecar_pid(self) -> int | None:
        """The sidecar's process, while it runs."""
        return self._desk.sidecar_pid

    def attach(self, timeout: float) -> None:
        """Wait until this launch has the run, as the first ``publish`` does: from then on nothing of an earlier one is
        sealed. Raises ``Unreachable`` after ``timeout`` seconds, and whatever ended the launch.
        """
        self._desk.wait_attached(time.monotonic() + timeout)

    def publish(
        self,
        pieces: Any,
        step: int,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        keep_dtype: str | Sequence[str] = DEFAULT_KEEP_DTYPE,
        frozen: str | Sequence[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> Handle:
        """Publish this rank's ``pieces`` as the next version; call it on all ranks alike. Returns after one copy.

        ``pieces``: a state dict (plain tensors, or DTensors of which the local box is taken), pieces, or pairs of name
        and full tensor that every rank iterates alike. ``step`` is the trainer's label; it may repeat or go
        back. Floats of 16 bits and more are cast to ``dtype`` (None: as they are) unless ``keep_dtype`` matches
        their name. ``frozen``: patterns of names that never change; ``aliases``: tied name -> stored name, beside
        those found.

        Waits while an earlier publication is undecided. The first one raises whatever is wrong (misuse, an impossible
        layout, a refusing store, too little shared memory) but ``Unreachable``, after which the next counts as the
        first. That and any later failure is logged and found in ``handle.error``, unless ``strict``.
        """
        with self._lock:
            first = self._plan is None
            handle = self._desk.new_handle(self._ordinal, _count(step))
            self._ordinal += 1
            try:
                if self._closed:
                    raise Misuse("the Publisher is closed")
                if handle.step < 0:
                    raise Misuse(f"step is a count from 0 to 2**63 - 1, not {step!r}")
                casting = make_casting(dtype, keep_dtype)
                source = as_source(pieces, self._rank, self._world_size)
                patterns = (frozen,) if isinstance(frozen, str) else tuple(frozen)
                self._publish(handle, source, casting, patterns, {**source.aliases, **(aliases or {})})
            except TrainerError as error:
                self._desk.fail(handle, error)
                if self._strict or (first and not isinstance(error, Unreachable)):
                    raise
                _log.warning("step %s is not published: %s", step, error)
            return handle

    def _publish(
        self, handle: Handle, source: Source, casting: Casting, frozen: Sequence[str], aliases: Mapping[str, str]
    ) -> None:
        self._desk.check_alive()
        if self._plan is None:
            source = self._begin(source, casting, frozen, aliases)
        slot = self._desk.wait_for_slot(self._max_wait_s)
        started_s = time.monotonic()
        self._writers[slot].copy(self._known_plan(), source, casting)
        self._desk.publish(handle, slot, time.monotonic() - started_s)

    def _known_plan(self) -> CopyPlan:
        if self._plan is None:
            raise Misuse("there is no layout yet")
        return self._plan

    def _begin(self, source: Source, casting: Casting, frozen: Sequence[str], aliases: Mapping[str, str]) -> Source:
        """First publication: agree with the other ranks on who owns what, and take the memory for it."""
        deadline_s = time.monotonic() + self._start_timeout_s
        if source.once:
            source = stage(source, casting)
        rows = [casting.row(piece) for piece in source]
        run_id, term = self._desk.wait_attached(deadline_s)
        offer = make_offer(
            rows,
            run_id=run_id,
            term=term,
            rank=self._rank,
            world_size=self._world_size,
            frozen=frozen,
            aliases=aliases,
        )
        layout = self._desk.settle(offer, deadline_s)
        placed = place_groups(layout.owned(self._rank))
        self._arena.allocate_slots(slot_bytes(placed))
        self._writers = [SlotWriter(self._arena.map(f"slot{slot}")) for slot in range(SLOTS)]
        self._plan = plan_copies(offer, placed)
        return source

    def close(self, timeout: float = 30.0) -> None:
        """Wait for what is undecided, ``timeout`` seconds at most; end the sidecar; free the shared memory.

        Ctrl-C while it waits gives up what is undecided; the rest is done before it is raised.
        """
        if self._closed or os.getpid() != self._pid:  # a forked worker of the trainer owns none of this
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._desk.close(timeout)
        except KeyboardInterrupt:
            self._desk.close(0.0)
            raise
        finally:
            self._writers.clear()
            self._arena.remove()

    def _at_exit(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # nobody is left to handle it
            self.close()


def _make_arena(root: Path) -> Arena:
    arena = Arena.create(root)
    length = len(os.fsencode(arena.socket_path))
    if length > SOCKET_PATH_BYTES:
        arena.remove()
        raise Misuse(
            f"{root} is too long a path: the sidecar's socket in it would have a name of {length} bytes, and at most "
            f"{SOCKET_PATH_BYTES} are possible; choose another shm_dir"
        )
    return arena


def _count(step: object) -> int:
    """A trainer's step as an int: numpy's and torch's integers too; -1 for what is none or too large to be told."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        return -1
    return number if number < 1 << 63 else -1
