"""The sidecar's work for one rank: takes the term, settles the layout, holds slots and state.

What to do next is decided in session.py and decisions.py; here and in publication.py it is done.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from coordinator.client import CoordinatorClient
from coordinator.errors import UnknownRun
from coordinator.wire import LayoutAnswer, OfferReport, TermAnswer, TermRequest
from trainer_agent.arena import Arena
from trainer_agent.assets import upload_assets
from trainer_agent.background import FullUpload
from trainer_agent.decisions import wants_extra_full
from trainer_agent.encoding import Encoder
from trainer_agent.errors import ArenaTooSmall, SetupRefused, SidecarFailed
from trainer_agent.messages import AskServing, Attach, Attached, Event, Failed, FullDone, LayoutReady, Publish, Served
from trainer_agent.patience import EXPECTED, Patience
from trainer_agent.placement import place_groups
from trainer_agent.publication import Publication
from trainer_agent.session import Progress
from trainer_agent.signs import Movement
from trainer_agent.slots import Slots
from trainer_agent.state import STATE_FILE, Base, State, Waiting, seal, unseal
from weight_store.errors import FormatError, LayoutError, ObjectNotFound
from weight_store.keys import offer_key
from weight_store.layout import Layout
from weight_store.offer import Offer
from weight_store.reading import read_head, read_layout, read_manifest
from weight_store.receipt import Asset
from weight_store.records import MAX_COLUMNS_BYTES, pack, sha256_hex, unpack
from weight_store.register import Existing, create_or_read
from weight_store.store import Store

T = TypeVar("T")

_log = logging.getLogger(__name__)

LAYOUT_WAIT_S = 10.0
TERM_WAIT_S = 20.0
_SHOWN_RANKS = 10
_LAYOUT_READINGS = 3
STORE_LOOKS = 3
"""Looks at the head, a second and then two apart, before the store is taken for another one than the coordinator's."""


def _nonce() -> str:
    return secrets.token_hex(8)


def _missing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (", …" if len(ranks) > _SHOWN_RANKS else "")
    who, have = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
    return f"{who} {shown} {have} not offered any pieces yet: every rank publishes; look at the log of the missing ones"


@dataclass(slots=True)
class Worker:
    """One rank's. ``emit`` hands events to the trainer; ``clock`` is monotonic seconds, ``nonce`` 16 hex digits.

    ``fulls``: the store through which extra fulls go, if not ``store``. ``movement`` hears what ``store`` carries.
    """

    config: Attach
    arena: Arena
    store: Store
    coordinator: CoordinatorClient
    emit: Callable[[Event], None]
    patience: Patience = field(default_factory=Patience)
    fulls: Store | None = None
    clock: Callable[[], float] = time.monotonic
    nonce: Callable[[], str] = _nonce
    encoder: Encoder = field(default_factory=Encoder)
    movement: Movement = field(default_factory=Movement)
    term: int = 0
    run_id: str = ""
    full: FullUpload | None = None
    _seen_term: int | None = None
    _layout: tuple[str, Layout] | None = None
    _state: State | None = None
    _slots: Slots | None = None
    _assets: tuple[Asset, ...] | None = None

    async def attach(self) -> None:
        """Take the term, or confirm the one that an earlier sidecar of this launch took; pick up the arena's state.

        Raises what the coordinator raises for good.
        """
        config = self.config
        if config.term is None or config.run_id is None:
            answer = await self.patience(f"taking over run {config.run}", self._take_term)
            self.term, self.run_id = answer.term, answer.run_id
            await self._check_store()
        else:
            self.term, self.run_id = config.term, config.run_id
        if config.layout is not None:
            await self._resume(config.layout)
        base = self._state.base if self._state else None
        self.emit(
            Attached(
                run_id=self.run_id,
                term=self.term,
                base_slot=base.slot if base else None,
                full_slot=self.full_slot,
            )
        )

    async def _take_term(self) -> TermAnswer:
        run, launch = self.config.run, self.config.launch
        if self.config.rank != 0:
            return await self.coordinator.takeover(run, TermRequest(launch=launch, takeover=False, wait_s=TERM_WAIT_S))
        if self._seen_term is None:
            self._seen_term = await self._look_at_term()
        # From the term seen first, however often this is repeated: a launch that was quicker keeps the run.
        return await self.coordinator.takeover(run, TermRequest(launch=launch, expected_term=self._seen_term))

    async def _look_at_term(self) -> int:
        try:
            return (await self.coordinator.run(self.config.run)).term
        except UnknownRun:
            return 0

    async def _check_store(self) -> None:
        """``SetupRefused`` unless our store is the one in which the coordinator keeps the run."""
        sentence = ""
        for look in range(1, STORE_LOOKS + 1):
            try:
                head, _ = await self.patience("looking at the head", lambda: read_head(self.store, self.config.run))
                if head.run_id == self.run_id:
                    return
                sentence = self._another_store(f"another run of the name {self.config.run}")
            except ObjectNotFound:
                sentence = self._another_store(f"no run {self.config.run}")
            except FormatError as error:
                sentence = f"{error}: it is damaged, or altered on its way"
            if look < STORE_LOOKS:
                await self.patience.sleep(look)
        raise SetupRefused(sentence)

    def _another_store(self, held: str) -> str:
        return (
            f"the store of this trainer holds {held}, and the coordinator has it in term {self.term}: they use "
            "different stores; give the Publisher the store URL that the coordinator was started with"
        )

    async def _resume(self, sha256: str) -> None:
        raw, stored = self.arena.read("layout"), self.arena.read(STATE_FILE)
        if raw is not None and sha256_hex(raw) == sha256:
            layout = Layout.parse(raw, key="layout")
        else:
            # Another layout would read the slots otherwise, and no digest that is taken of that would tell.
            _log.warning("the layout in %s is gone or damaged: it is read from the bucket again", self.arena.path)
            layout = await self._read_layout(sha256)
            with contextlib.suppress(ArenaTooSmall):  # the next sidecar would have to read it too
                self.arena.write("layout", layout.to_bytes())
        self._use_layout(sha256, layout)
        found = None if stored is None else unseal(stored)
        if found is not None and (found.run_id, found.layout) == (self.run_id, sha256):
            self._state = found
            if found.full_due is not None:
                self._start_full(found.full_due)

    def _use_layout(self, sha256: str, layout: Layout) -> None:
        self._layout = (sha256, layout)
        self._state = State(run_id=self.run_id, layout=sha256)

    @property
    def known_layout(self) -> tuple[str, Layout]:
        """SHA-256 and layout of this term. ``SidecarFailed`` before it was settled, like the next two."""
        return self._known(self._layout)

    @property
    def layout_sha256(self) -> str:
        """SHA-256 of the layout."""
        return self.known_layout[0]

    @property
    def state(self) -> State:
        """What a restart would find."""
        return self._known(self._state)

    @property
    def slots(self) -> Slots:
        """The arena's weights."""
        if self._slots is None:
            self._slots = Slots(self.arena, place_groups(self.known_layout[1].owned(self.config.rank)))
        return self._slots

    @property
    def another_run(self) -> str:
        """What to say where the coordinator answers for another run by this name."""
        return (
            f"run {self.run_id}, which this launch took over, is gone, and another one is called {self.config.run}: "
            "start the training job anew to publish into that one"
        )

    @staticmethod
    def _known(value: T | None) -> T:
        if value is None:
            raise SidecarFailed("a publication came before the layout was settled")
        return value

    # -- layout --

    async def settle_layout(self) -> None:
        """Offer the arena's pieces, wait for all ranks, and put the layout into the arena."""
        try:
            sha256 = await self._agree(await self.patience("offering the pieces", self._offer))
            layout = await self._read_layout(sha256)
            self.arena.write("layout", layout.to_bytes())
        except EXPECTED as error:
            self.emit(Failed(ordinal=None, code=error.code, message=str(error)))
            return
        self._use_layout(sha256, layout)
        self.emit(LayoutReady(sha256=sha256))

    async def _offer(self) -> LayoutAnswer:
        raw = self.arena.read("offer") or b""
        offer = Offer.parse(raw, key="offer")
        key = offer_key(self.config.run, self.term, offer.rank)
        found = await create_or_read(self.store, key, pack(raw), MAX_COLUMNS_BYTES)
        if isinstance(found, Existing) and unpack(found.data, key=key) != raw:
            raise LayoutError(
                f"rank {offer.rank} offered other pieces earlier in term {self.term}; a launch offers once: "
                "start the training job again"
            )
        report = OfferReport(world_size=offer.world_size)
        return await self.coordinator.report_offer(self.config.run, self.term, offer.rank, report)

    async def _read_layout(self, sha256: str) -> Layout:
        store, run = self.store, self.config.run
        left = _LAYOUT_READINGS
        while True:
            try:
                return await self.patience("reading the layout", lambda: read_layout(store, run, sha256))
            except FormatError as error:
                left -= 1
                if not left:
                    raise
                _log.warning("the layout is read again: %s", error)

    async def _agree(self, answer: LayoutAnswer) -> str:
        run, world_size = self.config.run, self.config.world_size

        async def ask() -> LayoutAnswer:
            return await self.coordinator.layout(run, self.term, world_size, wait_s=LAYOUT_WAIT_S)

        while answer.layout is None:
            self.patience.tell(_missing(answer.missing))
            await self.patience.sleep(0.1)
            answer = await self.patience("agreeing on a layout", ask)
        return answer.layout

    # -- publications --

    async def publish(self, request: Publish) -> None:
        """Carry one publication through until it is sealed or has failed, and tell the trainer."""
        waiting = await self._note_waiting(request)
        progress = Progress(request.ordinal, request.step, request.slot, self.state.base, version=request.version)
        await Publication(self, progress, waiting, resumed=request.resumed).carry_through()

    async def _note_waiting(self, request: Publish) -> Waiting:
        """What the slot must still hold when it is encoded, which may be long after the copy."""
        known = self.state.waiting
        if known is not None and (known.slot, known.ordinal) == (request.slot, request.ordinal):
            return known
        digests = b"".join(await self.encoder.digests(self.slots.views(request.slot))).hex()
        waiting = Waiting(slot=request.slot, ordinal=request.ordinal, digests=digests)
        self.save(self.state.model_copy(update={"waiting": waiting}))
        return waiting

    async def ask_serving(self, request: AskServing) -> None:
        """Put the trainer's question to the coordinator."""
        try:
            answer = await self.coordinator.wait(
                self.config.run,
                request.version,
                regions=request.regions,
                quorum=request.quorum,
                timeout_s=request.timeout_s,
            )
        except EXPECTED as error:
            self.emit(Served(id=request.id, reached=False, error=str(error)))
            return
        ours = answer.run_id in (None, self.run_id)
        self.emit(Served(id=request.id, reached=answer.reached and ours, error="" if ours else self.another_run))

    def save(self, state: State) -> None:
        """Make ``state`` the one that a restart finds, if there is room for it.

        What it finds otherwise is older: its base is not the parent any more, and is rebuilt from the bucket.
        """
        self._state = state
        try:
            self.arena.write(STATE_FILE, seal(state))
        except ArenaTooSmall as error:
            _log.warning("a restart of the sidecar would have to read its base from the bucket: %s", error)

    async def own_assets(self) -> tuple[Asset, ...]:
        """The assets that rank 0 lists in its receipts; uploaded once a launch."""
        if self._assets is None:
            wanted = self.config.rank == 0 and self.config.assets_dir is not None
            directory = Path(self.config.assets_dir or "")
            self._assets = await upload_assets(self.store, self.config.run, directory) if wanted else ()
        return self._assets

    # -- extra fulls --

    @property
    def full_slot(self) -> int | None:
        """The slot that a background upload reads."""
        return self.full.slot if self.full else None

    async def consider_full(self) -> None:
        """Begin an extra full of the position just sealed, if all ranks do."""
        base = self.state.base
        if self.full is not None or base is None:
            return
        if any(ref.version == base.position.version for ref in self.state.fulls):
            return  # sealed and told for a second time, after a restart: its full is there
        manifest = await read_manifest(self.store, self.config.run, base.position)
        if wants_extra_full(manifest, self.config.full_every):
            self.save(self.state.model_copy(update={"full_due": base}))
            self._start_full(base)

    def _start_full(self, base: Base) -> None:
        self.full = FullUpload(
            store=self.fulls or self.store,
            config=self.config,
            run_id=self.run_id,
            layout=self.layout_sha256,
            slots=self.slots,
            base=base,
            nonce=self.nonce,
            clock=self.clock,
            patience=self.patience,
        )
        self.full.start(self._full_ended)

    def _full_ended(self) -> None:
        full = self.full
        if full is None:
            return
        fulls = (*self.state.fulls, full.result) if full.result else self.state.fulls
        self.save(self.state.model_copy(update={"full_due": None, "fulls": fulls}))
        self.full = None
        self.emit(FullDone(slot=full.slot))

    async def drop_full(self) -> None:
        """Give a background upload up: its slot is needed."""
        if self.full is not None:
            await self.full.cancel()

    async def close(self) -> None:
        """Release what the worker holds."""
        await self.drop_full()
        self.encoder.close()
        await self.coordinator.close()
        await self.store.close()
        if self.fulls is not None:
            await self.fulls.close()
