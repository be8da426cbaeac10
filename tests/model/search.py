"""The promises, and a breadth-first search for an order of events that breaks one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from tests.model.state import RANKS, Bucket, Task, VersionState, Violation, World
from tests.model.ways import way
from tests.model.world import Model
from weight_store.head import Head
from weight_store.manifest import Manifest
from weight_store.position import Position
from weight_store.receipt import Receipt
from weight_store.records import sha256_hex
from weight_store.version import Open


def check(model: Model, label: str, before: Bucket, after: Bucket) -> None:
    """The invariants, on every change of the bucket. By induction they hold for its whole history."""
    try:
        _check_change(model, before, after)
    except Violation as violation:
        raise Violation(f"{violation}: {label}") from None


def _check_change(model: Model, before: Bucket, after: Bucket) -> None:
    for old, new in zip(before.versions, after.versions, strict=True):
        if (old.opened and new.opened != old.opened) or (old.register and new.register != old.register):
            raise Violation("a version's opening or decision changed")
        if new.aborted_aside and new.register:
            raise Violation("a version was both aborted and decided by a manifest")
        if new.register != old.register:
            _check_manifest(model, new)
        if new.opened != old.opened:
            _check_opening(model, new.opened, after)
    if after.head != before.head and before.head:
        _check_head(model, model.head(before.head), model.head(after.head), after)


def _check_opening(model: Model, number: int, bucket: Bucket) -> None:
    opened = model.numbers[number]
    for state in bucket.versions:
        other = model.numbers[state.opened] if state.opened else None
        if not isinstance(other, Open) or not isinstance(opened, Open) or other.term != opened.term:
            continue
        if other.version != opened.version and (other.version < opened.version) != (other.ordinal < opened.ordinal):
            raise Violation("a publication was opened twice or out of order")


def _check_manifest(model: Model, state: VersionState) -> None:
    manifest, opened = model.numbers[state.register], model.numbers[state.opened]
    if not isinstance(manifest, Manifest) or not isinstance(opened, Open):
        return
    if (manifest.parent, manifest.term, manifest.ordinal) != (opened.parent, opened.term, opened.ordinal):
        raise Violation("a manifest does not describe what was opened")
    by_digest = {sha256_hex(record.to_bytes()): record for record in model.numbers.records}
    for ref in manifest.receipts:
        receipt = by_digest[ref.sha256]
        if not isinstance(receipt, Receipt) or receipt.parent != manifest.parent:
            raise Violation("ranks of one manifest encoded against different parents")


def _check_head(model: Model, before: Head, after: Head, bucket: Bucket) -> None:
    if after.term < before.term or after.position.version < before.position.version:
        raise Violation("the head went back")
    if after.launch != f"launch-{after.term}":
        raise Violation("a launch that had lost the run took it back")
    if after.position == before.position:
        return
    if after.term != before.term:
        raise Violation("a takeover moved the position")
    state = bucket.versions[after.position.version - 1]
    manifest = model.numbers[state.register] if state.register else None
    if not isinstance(manifest, Manifest) or manifest.position(manifest.to_bytes()) != after.position:
        raise Violation("the head names a position that its register does not hold")
    if state.aborted_aside:
        raise Violation("the head names an aborted version")
    if manifest.parent != before.position:
        raise Violation("the head jumped: the sealed version before is not reachable from it")
    if manifest.term != after.term:
        raise Violation("a fenced term moved the head after the takeover")
    publication = (manifest.term, manifest.ordinal)
    for earlier in bucket.versions[: after.position.version - 1]:
        other = model.numbers[earlier.register] if earlier.register else None
        sealed = isinstance(other, Manifest) and other.position(other.to_bytes()) in _links(manifest)
        if sealed and isinstance(other, Manifest) and (other.term, other.ordinal) >= publication:
            raise Violation("a publication was sealed twice or out of order")


def _links(manifest: Manifest) -> set[Position]:
    return {link.position for link in manifest.chain}


def explore(model: Model, limit: int = 3_000_000) -> set[World]:
    """Every world that can be reached, in breadth; ``Violation`` with the shortest way to the first wrong one."""
    model.check = check
    first = model.start()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        try:
            for label, after in model.moves(world):
                if after not in came_from:
                    came_from[after] = (world, label)
                    queue.append(after)
        except Violation as violation:
            raise Violation("\n".join([str(violation), *way(came_from, world)])) from None
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} worlds: make the model smaller")
    return set(came_from)


def dead_ends(model: Model, worlds: set[World]) -> list[Bucket]:
    """Buckets from which a new launch and an empty coordinator, undisturbed, cannot get a version sealed."""
    beyond = replace(
        model, versions=model.versions + 2, late_receipts=False, stray=False, steps=[], step_numbers={}, memory={}
    )
    buckets = [model.buckets[bucket] for bucket in {bucket for bucket, _ in worlds}]
    return [bucket for bucket in buckets if not _recovers(beyond, bucket)]


def _recovers(model: Model, bucket: Bucket) -> bool:
    bucket = bucket._replace(versions=bucket.versions + (VersionState(),) * 2)
    term = model.head(bucket.head).term + 1 if bucket.head else 1
    for task in [Task("take over", term)] * 3 + [Task("open", term)] * 4:
        bucket = model.serve(bucket, task)
    for rank in range(RANKS):
        written = [after for label, after in model.ranks(bucket) if label.startswith(f"rank {rank}")]
        bucket = written[0] if written else bucket
    for _ in range(2):
        bucket = model.serve(bucket, Task("settle"))
    head = model.head(bucket.head)
    manifest = model.current(bucket, head)
    return head.term == term and manifest is not None and manifest.term == term
