"""Carries a collection out: raise the floor, wait, look again, delete.

May be stopped anywhere and started again, and any number may run at once: what one proves dead stays dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weight_store.control import Control
from weight_store.errors import FormatError, PreconditionFailed, StoreRefused, StoreUnavailable
from weight_store.gc.evidence import (
    ControlSeen,
    Witness,
    follow_links,
    parallel,
    read_control,
    read_listing,
    read_run,
    read_targets,
)
from weight_store.gc.floor import Raise, Wish, check_floor, decide_floor, wanted_floor
from weight_store.gc.plan import Facts, Verdict, judge
from weight_store.head import Head
from weight_store.keys import DOCTOR_PREFIX, GC_PREFIX, check_run, control_key
from weight_store.store import MultipartStore, Store

_RAISE_ATTEMPTS = 10
_WAIT_STEP_S = 60.0
_TELL_EVERY = 1000
_LEFT_BEHIND_S = 3600.0
"""No collection needs its probe, and no doctor its place, for so long."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was done, or (``dry_run``) would be. ``pending``: the raised floor has not aged, nothing below it went."""

    run: str
    head_version: int
    floor: Raise
    dry_run: bool
    pending: bool
    verdicts: tuple[Verdict, ...]

    @property
    def doomed(self) -> list[Verdict]:
        """What was deleted."""
        return [verdict for verdict in self.verdicts if verdict.delete]


@dataclass(frozen=True, slots=True)
class _Look:
    oldest: int
    control: ControlSeen
    facts: Facts
    floor: Raise


class Collector:
    """Collects one run. ``min_age_s`` counts by the store's clock, which is read from objects that this writes.

    ``tell`` is given a line of progress at a time; ``nonce`` makes 16 fresh hex digits; ``sleep`` waits seconds.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        min_age_s: float = 3600.0,
        tell: Callable[[str], None] = lambda _: None,
        nonce: Callable[[], str] = lambda: secrets.token_hex(8),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._run = check_run(run)
        self._min_age_s = min_age_s
        self._tell = tell
        self._nonce = nonce
        self._sleep = sleep

    async def preview(self, wish: Wish, now_s: float) -> Report:
        """Return what :meth:`collect` would delete once the floor has aged. Writes nothing, not even a probe: ``now_s``
        (Unix seconds) stands in for the store's clock.
        """
        look = await self._look(wish, now_s, as_if_raised=True)
        return self._report(look, judge(look.facts), look.floor, dry_run=True)

    async def collect(self, wish: Wish, *, wait: bool = True) -> Report:
        """Raise the floor as far as ``wish`` and safety allow, wait for it to age, delete what is dead.

        Without ``wait`` a floor that has not aged is left for a later call, and not raised again before it has.
        Raises ``ObjectNotFound`` if the run does not exist, ``StoreRefused``, ``StoreUnavailable``, ``FormatError``.
        """
        now_s = await self._store_clock()
        look = await self._look(wish, now_s)
        if not wait:
            # Deleted first: raising the floor makes what the present one has condemned wait again.
            verdicts = await self._delete(look.facts)
            aged = self._aged(look)
            floor = await self._raise(wish, look) if aged else Raise(look.floor.before, look.floor.before)
            return self._report(look, verdicts, floor, pending=not aged or floor.after > floor.before)
        floor = await self._raise(wish, look)
        if look.oldest < floor.after:  # else nothing lies below it that readers would have to be waited for
            look = await self._aged_look(wish)
        return self._report(look, await self._delete(look.facts), floor)

    def _report(
        self, look: _Look, verdicts: Sequence[Verdict], floor: Raise, *, dry_run: bool = False, pending: bool = False
    ) -> Report:
        return Report(self._run, look.facts.head.position.version, floor, dry_run, pending, tuple(verdicts))

    # ---- looking

    async def _look(self, wish: Wish, now_s: float, *, as_if_raised: bool = False) -> _Look:
        listing = await read_listing(self._store, self._run)
        seen = await read_control(self._store, self._run)
        head, manifest = await read_run(self._store, self._run)
        _check_same_run(head, seen)
        control = seen.control
        check_floor(control, manifest)
        old = control.floor if control is not None and now_s - seen.modified_s >= self._min_age_s else 0
        oldest = min(listing.versions, default=head.position.version)
        down_to = max(old, min([oldest, *(control.targets.values() if control is not None else ())]))
        line = await follow_links(self._store, self._run, head, manifest, down_to=down_to)
        targets = await read_targets(self._store, self._run, control, line, head)
        floor = decide_floor(control, wanted_floor(wish, sorted(line.sealed)), manifest, targets)
        witness = Witness(self._store, self._run, listing, head, manifest)
        effective = floor.after if as_if_raised else old
        facts = await witness.facts(line, floor=effective, now_s=now_s, min_age_s=self._min_age_s)
        return _Look(oldest, seen, facts, floor)

    def _aged(self, look: _Look) -> bool:
        control = look.control.control
        return control is None or control.floor == look.facts.floor

    async def _aged_look(self, wish: Wish) -> _Look:
        """Look again once the floor has aged. Looks at the control object alone while it waits."""
        while True:
            now_s = await self._store_clock()
            seen = await read_control(self._store, self._run)
            left_s = self._min_age_s - (now_s - seen.modified_s)
            if seen.control is None or seen.control.floor == 0 or left_s <= 0:
                return await self._look(wish, now_s)
            self._tell(f"floor {seen.control.floor} has to age {left_s:.0f} s more before anything below it goes")
            # The store's clock may tick in whole seconds.
            await self._sleep(min(left_s + 1.0, _WAIT_STEP_S))

    async def _store_clock(self) -> float:
        """The store's time (Unix seconds), from an object written now."""
        key = f"{GC_PREFIX}{self._nonce()}"
        await self._store.create(key, b"")
        seen = [entry for _ in range(2) async for entry in self._store.list(GC_PREFIX) if entry.key == key]
        await self._store.delete(key)
        if not seen:
            raise StoreUnavailable(
                f"the store does not list {key} right after it was written, so its clock cannot be read", key=key
            )
        now_s = min(entry.modified_s for entry in seen)  # the earlier one errs on the side of keeping
        await self._sweep(now_s - max(_LEFT_BEHIND_S, self._min_age_s))
        return now_s

    async def _sweep(self, until_s: float) -> None:
        """Remove what killed collections and doctors left behind before ``until_s``, as far as that is permitted."""
        with contextlib.suppress(StoreRefused):
            for prefix in (GC_PREFIX, DOCTOR_PREFIX):
                for entry in [entry async for entry in self._store.list(prefix)]:
                    if entry.modified_s <= until_s:
                        await self._store.delete(entry.key)
                if isinstance(self._store, MultipartStore):
                    for upload in [upload async for upload in self._store.list_uploads(prefix)]:
                        if upload.started_s <= until_s:
                            await self._store.abort_upload(upload)

    # ---- raising

    async def _raise(self, wish: Wish, look: _Look) -> Raise:
        """Compare-and-set the floor; looks again when somebody else changed the control object first."""
        for _ in range(_RAISE_ATTEMPTS):
            floor, seen = look.floor, look.control
            if floor.after <= floor.before:
                return floor
            old = seen.control or Control(run_id=look.facts.head.run_id, write_id=self._nonce())
            data = old.model_copy(update={"floor": floor.after, "write_id": self._nonce()}).to_bytes()
            try:
                if seen.control is None:
                    await self._store.create(control_key(self._run), data)
                else:
                    await self._store.replace(control_key(self._run), data, etag=seen.etag)
            except PreconditionFailed:
                look = await self._look(wish, look.facts.now_s)
                continue
            self._tell(f"floor raised from version {floor.before} to {floor.after}")
            return floor
        raise StoreUnavailable(f"{control_key(self._run)} keeps changing: try again", key=control_key(self._run))

    # ---- deleting

    async def _delete(self, facts: Facts) -> list[Verdict]:
        verdicts = judge(facts)
        doomed = [verdict for verdict in verdicts if verdict.delete]
        for stage in _stages(doomed):
            for start in range(0, len(stage), _TELL_EVERY):
                await parallel(self._delete_one, stage[start : start + _TELL_EVERY])
                self._tell(f"deleted {min(start + _TELL_EVERY, len(stage))} of {len(stage)}")
        return verdicts

    async def _delete_one(self, verdict: Verdict) -> None:
        if verdict.upload is None:
            await self._store.delete(verdict.key)
        elif isinstance(self._store, MultipartStore):
            await self._store.abort_upload(verdict.upload)


def _stages(doomed: Sequence[Verdict]) -> list[list[Verdict]]:
    """Manifests first, so that a version vanishes whole for whoever begins to read it; openings last."""
    stages: tuple[list[Verdict], list[Verdict], list[Verdict]] = ([], [], [])
    for verdict in doomed:
        name = verdict.key.rpartition("/")[2]
        stages[{"manifest.json": 0, "open.json": 2}.get(name, 1)].append(verdict)
    return [stage for stage in stages if stage]


def _check_same_run(head: Head, seen: ControlSeen) -> None:
    if seen.control is not None and seen.control.run_id != head.run_id:
        raise FormatError(
            f"control.json belongs to run {seen.control.run_id}, the head to run {head.run_id}: an earlier run of this "
            "name left it behind; delete it, or use another run name"
        )
