"""Any number of collections, killed anywhere and arbitrarily late, beside launches that come and go: every order.

A collection is the real :class:`~weight_store.gc.Collector` on a copy of the bucket, in one state of the world or
across one of its moves. What it would delete is condemned from then on: each of those deletions may arrive at any later
moment, once, twice or never. So one growing set stands for all collections together, paused, killed, and with requests
that were believed lost. A promise is broken as soon as a condemned object is one that somebody needs.

The world is one run of a tiny model: launches of one rank or two, each with its own layout and asset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tests.model.retention_records import (
    NONCE,
    RUN,
    Launch,
    Objects,
    head_of,
    in_order,
    layout_of,
    manifest_bytes,
    manifest_of,
    parsed_receipt,
    parsed_register,
    receipts_of,
    run,
    training_of,
    with_shards,
    with_shared,
)
from tests.model.state import Violation
from tests.model.ways import way
from weight_store.chain import plan_chain
from weight_store.control import Control
from weight_store.gc import Collector, Wish
from weight_store.head import Head
from weight_store.keys import (
    asset_key,
    control_key,
    head_key,
    layout_key,
    manifest_key,
    open_key,
    parse_key,
    receipt_key,
    shard_key,
)
from weight_store.manifest import Manifest
from weight_store.memory import MemoryStore
from weight_store.position import GENESIS, Position
from weight_store.version import Abort, Open


class World(NamedTuple):
    """``objects``: sorted; ``condemned``: what a collection may still delete."""

    objects: tuple[tuple[str, bytes], ...]
    launch: Launch
    zombie: Launch | None = None
    condemned: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Model:
    """The transition system. ``sizes``: of launches, the first one last. ``forgets_shared``: collections also delete
    layouts and assets that no record names."""

    terms: int = 3
    versions: int = 2
    sizes: tuple[int, ...] = (1, 2)
    forgets_shared: bool = False

    def start(self) -> World:
        """A launch has just begun the run."""
        head = Head(run_id=training_of(1).run_id, term=1, launch="launch-1", position=GENESIS, write_id=NONCE)
        return World(((head_key(RUN), head.to_bytes()),), Launch(1, self.sizes[-1]))

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """What may happen next."""
        objects = dict(world.objects)
        yield from self._launch_moves(world, objects)
        yield from self._zombie_moves(world, objects)
        landed = {key: data for key, data in objects.items() if key not in world.condemned}
        if landed != objects:
            yield "deletions arrive", _with(world, landed)
        raised = collect(world.objects, world.objects)[1]
        if raised is not None and objects.get(control_key(RUN)) != raised:
            yield "a collection raises the floor", _with(world, {**objects, control_key(RUN): raised})

    def _launch_moves(self, world: World, objects: Objects) -> Iterator[tuple[str, World]]:
        launch, head = world.launch, head_of(objects)
        if head.term < self.terms:
            # A sealed register that the head has not come to is finished first, as decisions.take_over asks.
            ready = _sealing(objects, head)
            position = head.position if ready is None else ready
            after = head.model_copy(update={"term": head.term + 1, "position": position, "launch": f"l{head.term}"})
            taken = in_order({**objects, head_key(RUN): after.to_bytes()})
            zombie = launch if launch.opened else None
            for size in self.sizes:
                new = world._replace(objects=taken, launch=Launch(after.term, size), zombie=zombie)
                yield f"a launch of {size} takes over", new
        if not launch.settled:
            yield (
                "it settles its layout and asset",
                _with(world, with_shared(objects, launch), launch._replace(settled=True)),
            )
        elif not launch.opened:
            yield from self._opens(world, objects, head)
        else:
            yield from _decided(world, objects, launch, head)
        version = head.position.version
        if launch.settled and version and version not in launch.fulls and not launch.fulls:
            manifest = manifest_of(objects, head.position)
            if manifest.term == launch.term and open_key(RUN, version) in objects:
                found = with_shards(objects, version, launch, extra=True)
                yield "it uploads a full", _with(world, found, launch._replace(fulls=(version,)))

    def _opens(self, world: World, objects: Objects, head: Head) -> Iterator[tuple[str, World]]:
        number = head.position.version + 1
        while _is_dead(objects, number, head.term):
            number += 1
        if number > self.versions:
            return
        data = objects.get(open_key(RUN, number))
        if data is not None:
            opened = Open.parse(data)
            if opened.term < head.term and manifest_key(RUN, number) not in objects:
                abort = Abort(
                    run_id=opened.run_id, version=number, term=opened.term, reason="fenced", detail="", write_id=NONCE
                )
                yield "it aborts the older one", _with(world, {**objects, manifest_key(RUN, number): abort.to_bytes()})
            return
        launch = world.launch
        _, _, sha256 = layout_of(launch.world)
        opened = Open(
            run_id=head.run_id,
            version=number,
            term=launch.term,
            step=launch.published,
            ordinal=launch.published,
            parent=head.position,
            layout=sha256,
            world_size=launch.world,
            write_id=NONCE,
        )
        found = with_shards({**objects, open_key(RUN, number): opened.to_bytes()}, number, launch)
        after = launch._replace(opened=number, published=launch.published + 1)
        yield f"it sends version {number}", _with(world, found, after)

    def _zombie_moves(self, world: World, objects: Objects) -> Iterator[tuple[str, World]]:
        zombie = world.zombie
        if zombie is None or open_key(RUN, zombie.opened) not in objects:
            return
        if manifest_key(RUN, zombie.opened) not in objects and (sealed := manifest_bytes(objects, zombie)) is not None:
            yield "the old one is sealed, too late", _with(world, {**objects, manifest_key(RUN, zombie.opened): sealed})

    # ---- what collections condemn, and what may not be

    def condemned(self, before: World, after: World) -> frozenset[str]:
        """What collections condemn that look at the bucket across this move, or at once (``before`` is ``after``)."""
        found = collect(before.objects, after.objects)[0]
        return found | _unnamed(dict(after.objects)) if self.forgets_shared else found

    def check(self, world: World) -> None:
        """``Violation`` if something condemned is needed, or something needed is not there."""
        objects = dict(world.objects)
        needed = _needed(objects, world.launch)
        for key in sorted(needed):
            if key in world.condemned:
                raise Violation(f"{key} is needed, and a collection may still delete it")
            if key not in objects:
                raise Violation(f"{key} is needed and not there")


def explore(model: Model, limit: int = 200_000) -> int:
    """How many worlds can be reached; ``Violation`` with a shortest way to one that breaks a promise."""
    first = model.start()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        for label, after in model.moves(world):
            condemned = world.condemned | model.condemned(world, after) | model.condemned(after, after)
            after = after._replace(condemned=condemned)
            if after in came_from:
                continue
            came_from[after] = (world, label)
            queue.append(after)
            try:
                model.check(after)
            except Violation as violation:
                raise Violation("\n".join([str(violation), *way(came_from, after)])) from None
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} worlds: make the model smaller")
    return len(came_from)


def _with(world: World, objects: Objects, launch: Launch | None = None) -> World:
    return world._replace(objects=in_order(objects), launch=launch or world.launch)


def _sealing(objects: Objects, head: Head) -> Position | None:
    """The position of a manifest of the head's term that it has not come to."""
    for key, data in objects.items():
        if parse_key(key).kind == "manifest" and (parse_key(key).version or 0) > head.position.version:
            found = parsed_register(data)
            if isinstance(found, Manifest) and (found.term, found.parent) == (head.term, head.position):
                return found.position(data)
    return None


def _decided(world: World, objects: Objects, launch: Launch, head: Head) -> Iterator[tuple[str, World]]:
    """The version that the launch has sent is sealed, in two steps, or given up."""
    key = manifest_key(RUN, launch.opened)
    if key not in objects:
        sealed = manifest_bytes(objects, launch)
        if sealed is None:
            raise Violation(f"version {launch.opened} cannot be sealed: part of it is gone")
        yield "its register is written", _with(world, {**objects, key: sealed})
        opened = Open.parse(objects[open_key(RUN, launch.opened)])
        abort = Abort(
            run_id=opened.run_id, version=opened.version, term=opened.term, reason="expired", detail="", write_id=NONCE
        )
        yield "it is given up", _with(world, {**objects, key: abort.to_bytes()}, launch._replace(opened=0))
        return
    position = _sealing(objects, head)
    if position is not None:
        after = head.model_copy(update={"position": position})
        idle = launch._replace(opened=0)
        yield "the head moves", _with(world, {**objects, head_key(RUN): after.to_bytes()}, idle)


def _is_dead(objects: Objects, number: int, term: int) -> bool:
    data = objects.get(manifest_key(RUN, number))
    if data is None:
        return False
    found = parsed_register(data)
    return isinstance(found, Abort) or found.term < term


def _needed(objects: Objects, launch: Launch) -> set[str]:
    """What readers of the head need who hold nothing, or anything from the floor on; and what the launch counts on."""
    head = head_of(objects)
    needed = {head_key(RUN)}
    if launch.settled:
        needed |= with_shared({}, launch).keys()
    if launch.opened:
        needed.add(open_key(RUN, launch.opened))
        for rank, (receipt, _) in enumerate(receipts_of(objects[open_key(RUN, launch.opened)], launch, False)):
            needed |= {receipt_key(RUN, launch.opened, rank), shard_key(RUN, launch.opened, rank, receipt.nonce)}
    if head.position == GENESIS:
        return needed
    target = manifest_of(objects, head.position)
    needed |= {asset_key(RUN, asset.sha256) for asset in target.assets} | {manifest_key(RUN, target.version)}
    data = objects.get(control_key(RUN))
    floor = Control.parse(data).floor if data is not None else 0
    for held in [None, *(link.position for link in target.chain if link.version >= floor)]:
        for hop in plan_chain(held, target, head.position):
            needed |= _of_hop(objects, hop.position, bool(hop.extra_full))
    return needed


def _of_hop(objects: Objects, position: Position, extra: bool) -> set[str]:
    manifest = manifest_of(objects, position)
    needed = {manifest_key(RUN, position.version), layout_key(RUN, manifest.layout)}
    for rank in range(manifest.world_size):
        key = receipt_key(RUN, position.version, rank, extra_full=extra)
        needed.add(key)
        if key in objects:
            receipt = parsed_receipt(objects[key])
            needed.add(shard_key(RUN, position.version, rank, receipt.nonce, extra_full=extra))
    return needed


def _unnamed(objects: Objects) -> frozenset[str]:
    """Layouts and assets that no record from the floor on names, once the present launch has sealed a version."""
    head = head_of(objects)
    if head.position == GENESIS or manifest_of(objects, head.position).term != head.term:
        return frozenset()
    data = objects.get(control_key(RUN))
    floor = Control.parse(data).floor if data is not None else 0
    text = b"".join(
        data for key, data in objects.items() if (parse_key(key).version or -1) >= floor and not key.endswith(".shard")
    )
    shared = [key for key in objects if parse_key(key).kind in {"layout", "asset"}]
    return frozenset(key for key in shared if key.rpartition("/")[2].encode() not in text)


class _Watched(MemoryStore):
    """A copy of the bucket that becomes another one after the listing; what was deleted stays so."""

    def __init__(self, before: tuple[tuple[str, bytes], ...], after: tuple[tuple[str, bytes], ...]) -> None:
        super().__init__(clock=lambda: 0.0)
        self._objects = {key: (data, 0.0) for key, data in before}
        self.after: dict[str, tuple[bytes, float]] | None = {key: (data, 0.0) for key, data in after}
        self.deleted: set[str] = set()

    async def list(self, prefix: str) -> Any:
        async for entry in super().list(prefix):
            yield entry
        if prefix == f"{RUN}/" and self.after is not None:
            self._objects, self.after = self.after, None

    async def delete(self, key: str) -> None:
        await super().delete(key)
        if key.startswith(RUN):
            self.deleted.add(key)


@cache
def collect(
    before: tuple[tuple[str, bytes], ...], after: tuple[tuple[str, bytes], ...]
) -> tuple[frozenset[str], bytes | None]:
    """What a collection deletes that lists ``before`` and reads ``after``, and the control object that it writes."""
    store = _Watched(before, after)
    collector = Collector(store, RUN, min_age_s=0.0, nonce=lambda: NONCE)
    run(collector.collect(Wish(keep_versions=1), wait=False))
    found = store._objects.get(control_key(RUN))
    return frozenset(store.deleted), None if found is None else found[0]
