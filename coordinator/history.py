"""What became of a version: one answer for each number, undecided, sealed or aborted."""

from __future__ import annotations

from coordinator.cache import Recent
from coordinator.decisions import Sealing, Slot, View
from coordinator.errors import UnknownVersion
from coordinator.fleet import progress
from coordinator.runs import Run, Times
from coordinator.wire import RegionVersion, VersionAnswer
from weight_store.manifest import Manifest
from weight_store.position import Position
from weight_store.version import Abort, Open


def undecided(run: str, opened: Open, missing: list[int], times: Times) -> VersionAnswer:
    """The answer for a version that waits for receipts."""
    return VersionAnswer(
        run=run,
        run_id=opened.run_id,
        version=opened.version,
        term=opened.term,
        step=opened.step,
        ordinal=opened.ordinal,
        state="undecided",
        parent=opened.parent,
        layout=opened.layout,
        world_size=opened.world_size,
        missing=tuple(missing),
        receipts=opened.world_size - len(missing),
        encode_s=times.encode_s,
        upload_s=times.upload_s,
    )


def sealed(run: str, manifest: Manifest, position: Position) -> VersionAnswer:
    """The answer for a version that the head has come to."""
    return VersionAnswer(
        run=run,
        run_id=manifest.run_id,
        version=manifest.version,
        term=manifest.term,
        step=manifest.step,
        ordinal=manifest.ordinal,
        state="sealed",
        parent=manifest.parent,
        layout=manifest.layout,
        world_size=manifest.world_size,
        position=position,
        receipts=manifest.world_size,
        payload_bytes=manifest.payload_bytes,
        changed=manifest.changed,
        elements=manifest.elements,
        weight_bytes=manifest.weight_bytes,
        full_version=manifest.full_version,
    )


def aborted(run: str, opened: Open, decision: Abort | Sealing) -> VersionAnswer:
    """The answer for a version that was given up, or whose manifest was stranded by a takeover."""
    answer = undecided(run, opened, [], Times())
    if isinstance(decision, Sealing):
        reason = f"fenced: another launch took over before the head came to version {opened.version}"
        return answer.model_copy(update={"state": "aborted", "reason": reason})
    update = {
        "state": "aborted",
        "reason": f"{decision.reason}: {decision.detail}",
        "missing": decision.missing,
        "receipts": 0,
    }
    return answer.model_copy(update=update)


class History:
    """Answers for the versions of one run. What is decided is remembered, what is not is read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._decided: Recent[tuple[str, int], VersionAnswer] = Recent(4096)

    async def answer(self, version: int, view: View, now_s: float) -> VersionAnswer:
        """One version as of ``view``; ``UnknownVersion`` if it was not opened, or was deleted."""
        answer = await self._state(version, view)
        times = self._run.times(version)
        opened_s, sealed_s = times.opened_s, times.sealed_s
        return answer.model_copy(
            update={
                "encode_s": times.encode_s,
                "upload_s": times.upload_s,
                "seal_s": 0.0 if opened_s is None or sealed_s is None else round(sealed_s - opened_s, 3),
                "regions": self.regions(version, now_s) if answer.state == "sealed" else (),
            }
        )

    def regions(self, version: int, now_s: float) -> tuple[RegionVersion, ...]:
        """How far each region is with a sealed version."""
        sealed_s = self._run.times(version).sealed_s
        age_s = 0.0 if sealed_s is None else now_s - sealed_s
        return progress(self._run.agents.values(), version, age_s, now_s)

    async def _state(self, version: int, view: View) -> VersionAnswer:
        name, run_id = self._run.name, view.head.run_id
        if version == view.slot.version and view.slot.opened is not None:
            return undecided(name, view.slot.opened, self._run.waiting_for(version), self._run.times(version))
        if not 0 < version < view.slot.version:
            raise UnknownVersion(f"run {name} has no version {version}: the newest is {view.slot.version - 1}")
        known = self._decided.get((run_id, version))
        if known is None:
            known = self._decided.put((run_id, version), await self._read(version, view))
        return known

    async def _read(self, version: int, view: View) -> VersionAnswer:
        name = self._run.name
        if view.current is not None and version == view.head.position.version:
            return sealed(name, view.current, view.head.position)
        slot = await self._run.bucket.slot(view.head.run_id, version)
        if slot.opened is None or slot.decision is None:
            raise UnknownVersion(f"version {version} of run {name} is no longer in the bucket")
        if isinstance(slot.decision, Sealing) and await self._was_head(slot.decision, view):
            return sealed(name, slot.decision.manifest, slot.decision.position)
        return aborted(name, slot.opened, slot.decision)

    async def _was_head(self, decision: Sealing, view: View) -> bool:
        """Whether the head ever came to ``decision``: then, and only then, the next number was opened on it.

        Numbers are opened without gaps, each on the head of its time.
        """
        version = decision.manifest.version
        if version >= view.head.position.version:
            return decision.position == view.head.position
        after: Slot = await self._run.bucket.slot(view.head.run_id, version + 1)
        return after.opened is not None and after.opened.parent == decision.position
