"""What must hold during a trainer's walk, beside what the simulation's model says of each change of the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

import codec
from tests.rollout_agent.training import group_bits
from tests.sim.errors import Violation
from tests.sim.model import RUN
from tests.trainer_agent.walk_jobs import WalkLaunch, WalkRank
from tests.trainer_agent.walk_world import SMALL
from trainer_agent.placement import place_groups
from trainer_agent.slots import Slots
from trainer_agent.state import STATE_FILE, unseal
from weight_store.chain import plan_chain
from weight_store.control import Control
from weight_store.keys import ParsedKey, control_key, parse_key, receipt_key, shard_key
from weight_store.manifest import Manifest
from weight_store.position import GENESIS, Position
from weight_store.receipt import Receipt, group_ranges

if TYPE_CHECKING:
    from tests.trainer_agent.walking import Walk

ENDED = frozenset({"fenced", "sidecar-failed"})
"""Codes by which a launch is told that it is over, whatever became of its last version."""
ENDS = frozenset({"", "killed", "closed", "fenced"})
"""Of launches."""
TASKS = 8
"""Of an idle sidecar: the connection, the copy of a full, and what these wait for."""


def explains_full(walk: Walk, manifest: Manifest, weights: Any) -> bool:
    """Whether a rank may send what it has whole: a delta would not be small, or there is nothing to start from."""
    model = walk.world.model
    ranks = [cast("WalkRank", rank) for launch in walk.world.launches for rank in launch.ranks]
    if manifest.parent == GENESIS or walk.unsure_bases or any(rank.unsure for rank in ranks):
        return True
    parent = model._manifest(manifest.parent)
    chain = [link for link in parent.chain if link.version >= parent.full_version]
    layouts = {model._manifest(link.position).layout for link in chain}
    if layouts | {parent.layout} != {manifest.layout}:
        return True
    before = model.sealed[manifest.parent.version].weights
    changed = sum(int(np.count_nonzero(bits != before[name])) for name, bits in weights.items())
    return changed > 2 * SMALL * sum(bits.size for bits in weights.values())


def check_handles(walk: Walk) -> None:
    """What trainers were told is so."""
    for launch in walk.world.launches:
        assert isinstance(launch, WalkLaunch)
        misread = max(walk.world.misread[rank.node] for rank in launch.walkers) if launch.walkers else 0
        excused = misread > 1 or walk.stale or launch.is_of_the_past or walk.former
        if launch.ended not in ENDS and not excused and not (launch.ended == "sidecar-failed" and launch.gave_up):
            raise Violation(f"{launch.name} ends: {launch.ended}")
        for rank in launch.walkers:
            for handle in rank.handles:
                if handle.done:
                    _check_outcome(walk, launch, rank, handle)


def _check_outcome(walk: Walk, launch: WalkLaunch, rank: WalkRank, handle: Any) -> None:
    sealed = walk.versions_of(launch.name, handle.ordinal)
    if handle.error is None:
        if sealed != [handle.version]:
            raise Violation(f"{rank.node} was told that {handle} is sealed; it is {sealed}")
        if handle.stats.damaged_groups and not rank.unsure:
            raise Violation(f"{rank.node} found {handle.stats.damaged_groups} damaged groups in {handle}")
        return
    code = handle.error.code
    walk.told[code, str(handle.error)] += 1
    if sealed and code not in ENDED and not launch.is_of_the_past:
        raise Violation(f"{rank.node} was told that {handle} failed ({code}: {handle.error}); it is {sealed}")
    if code == "weights-damaged" and not rank.unsure:
        raise Violation(f"{rank.node} was told {handle.error}")
    if code == "version-aborted" and "fenced:" in str(handle.error):
        raise Violation(f"{rank.node} was told {handle.error}, and not that its launch is over")
    if code == "sidecar-failed" and not rank.link.gave_up:
        raise Violation(f"{rank.node} was told {handle.error}")


def check_ranks(walk: Walk) -> None:
    """What ranks hold is little, and what their state says of it is so."""
    head = walk.world.model.head
    for launch in walk.launches:
        for rank in launch.walkers:
            more = rank.arena.files.keys() - {"offer", "layout", STATE_FILE}
            if more or len(rank.arena.slots) > 2:
                raise Violation(f"{rank.node} has {sorted(more)} in its arena")
            if not launch.idle or head is None or head.launch != launch.name:
                continue
            state = unseal(rank.arena.files.get(STATE_FILE, b""))
            base = None if state is None else state.base
            if base is not None and base.position == head.position and not rank.unsure:
                slots = Slots(rank.arena, place_groups(launch.layout.owned(rank.rank)))  # type: ignore[arg-type]
                if slots.digests(base.slot) != base.digests:
                    raise Violation(f"{rank.node} says that slot {base.slot} is {base.position}")
            running = [task for task in rank.sidecar.tasks if not task.done()]
            if len(running) > TASKS:
                raise Violation(f"{rank.node} has nothing to do and {len(running)} tasks: {running}")


# ---- the bucket


def check_bucket(walk: Walk) -> None:
    """From the bucket alone a version is what was published: the head's, and another that no collection has touched."""
    model = walk.world.model
    if model.head is None or not model.sealed:
        return
    versions = {model.head.position.version}
    if not walk.collections:
        versions.add(walk.chance.choice(list(model.sealed)))
    for version in sorted(versions):
        sealed = model.sealed[version]
        found = _decoded(walk, sealed.position)
        for name, bits in sealed.weights.items():
            if found[name].tobytes() != np.ascontiguousarray(bits).tobytes():
                raise Violation(f"{name} of version {version} is not what was published")


def _decoded(walk: Walk, position: Position) -> dict[str, Any]:
    """All weights at a position, as a reader who has nothing makes them."""
    model = walk.world.model
    weights = {name: np.zeros_like(bits) for name, bits in walk.first.items()}
    for hop in plan_chain(None, model._manifest(position), position):
        manifest = model._manifest(hop.position)
        layout = model._layout(manifest.layout)
        for rank, ref in enumerate(hop.extra_full or manifest.receipts):
            receipt = model._receipt(hop.position.version, rank, ref, extra_full=bool(hop.extra_full))
            _apply(model, receipt, layout, weights)
    return weights


def _apply(model: Any, receipt: Receipt, layout: Any, weights: dict[str, Any]) -> None:
    shard = model._bytes(shard_key(RUN, receipt.version, receipt.rank, receipt.nonce, extra_full=receipt.extra_full))
    for item in group_ranges(receipt, layout):
        group, payload = item.group, shard[item.offset : item.offset + item.size]
        bits = group_bits(group, weights)
        change = codec.decode_group(bits if codec.needs_base(payload) else None, payload, group.dtype, group.elements)
        codec.apply_change(bits, change)
        at = 0
        for piece in group.pieces:
            box = tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
            part = weights[piece.tensor.name][box]
            part[...] = bits[at : at + part.size].reshape(part.shape)
            at += part.size


def check_tidy(walk: Walk) -> None:
    """After collections nothing is left that leads nowhere."""
    model, bucket = walk.world.model, walk.world.bucket
    left = [upload.key for upload in bucket.uploads.list() if model.is_waste(upload.key)]
    raw = bucket.read(control_key(RUN))
    floor = 0 if raw is None else Control.parse(raw).floor
    left += [entry.key for entry in bucket.list(f"{RUN}/") if _is_waste(model, parse_key(entry.key), floor)]
    if left:
        raise Violation(f"left behind: {left}")


def _is_waste(model: Any, parsed: ParsedKey, floor: int) -> bool:
    if parsed.kind == "offer":
        return bool((parsed.term or 0) < model.head.term)
    if parsed.version is None:
        return False
    if parsed.version < floor:
        return True
    if parsed.version not in model.sealed:
        return model.decided.get(parsed.version) == "abort" and parsed.kind not in ("open", "manifest")
    if parsed.kind == "sign":
        return True
    if parsed.kind != "shard":
        return False
    raw = model.bucket.read(receipt_key(RUN, parsed.version, parsed.rank or 0, extra_full=parsed.extra_full))
    if raw is None:
        return not model.may_become_visible(parsed)
    return bool(Receipt.parse(raw).nonce != parsed.nonce)
