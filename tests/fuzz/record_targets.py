"""Targets: every record of the bucket and of both agents' own directories, and the chain and file rules over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from rollout_agent.changelog import LogHead
from rollout_agent.errors import RolloutError
from rollout_agent.state import Owner, Serving, State, Version, Whole, kept_groups, seal, table_of
from rollout_agent.statedir import held_by
from tests.fuzz.reshaping import either, repaired, reshape_json, within
from tests.fuzz.target import MIB, Target, require
from tests.weight_store_records.make_vectors import RUN, RUN_ID, second_version, worked_example
from trainer_agent.placement import place_groups
from trainer_agent.state import Base
from trainer_agent.state import State as SidecarState
from weight_store.boxes import spans
from weight_store.chain import plan_chain, receipts_of
from weight_store.control import Control
from weight_store.errors import FormatError, LayoutError, ObjectTooLarge, UnknownFormatVersion
from weight_store.grouping import resolve_layout
from weight_store.head import Head
from weight_store.keys import head_key
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.offer import Offer
from weight_store.position import Position
from weight_store.receipt import Receipt, group_ranges
from weight_store.records import Record, pack, record_format, sha256_hex, unpack
from weight_store.version import Abort, Open

OBJECTS = worked_example() | second_version()
BOOT = "00000000-0000-4000-8000-0000000000b0"
MAX_PLANNED = 1 << 16
"""Of derived things that one input may make; a layout of a million pieces is legal and slow."""


def stored(kind: type[Record]) -> list[bytes]:
    """The JSON of every golden object of this kind."""
    found = []
    for data in OBJECTS.values():
        raw = unpack(data) if data[:6] == b"WCPACK" else data
        if raw[:1] == b"{" and json.loads(raw).get("format") == kind.FORMAT:
            found.append(raw)
    return found


LAYOUT = Layout.parse(stored(Layout)[-1])
POSITION = Head.parse(OBJECTS[head_key(RUN)]).position
VERSION = Version(position=POSITION, term=3, step=40, layout=sha256_hex(LAYOUT.to_bytes()))


def _local(record: Record) -> Callable[[], list[bytes]]:
    return lambda: [record.to_bytes()]


def _state(**more: object) -> State:
    fields = {"run": RUN, "run_id": RUN_ID, "version": VERSION, "digests": "ab" * 16 * len(LAYOUT.groups), **more}
    return State(**fields)  # type: ignore[arg-type]


def parsed(kind: type[Record], data: bytes) -> Record | None:
    """The record in ``data``, or None if it is refused as it should be. What parses is the same when read again."""
    try:
        record = kind.parse(data, key="fuzz")
    except FormatError as error:
        require(len(str(error)) < 1000, f"a sentence of {len(str(error))} characters repeats the input")
        return None
    again = record.to_bytes()
    require(kind.parse(again) == record, "a record changes when it is written and read again")
    require(kind.parse(again).to_bytes() == again, "the canonical form is not stable")
    require(record_format(data) == kind.FORMAT, "the envelope says something else than the record")
    return record


def _parse_only(kind: type[Record]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        parsed(kind, data)

    return run


def _layout(data: bytes) -> None:
    layout = parsed(Layout, data)
    if not isinstance(layout, Layout) or len(layout.piece_tensor) > MAX_PLANNED:
        return
    require(layout.elements == sum(g.elements for g in layout.groups), "groups do not hold the model")
    for rank in {group.owner for group in layout.groups}:
        place_groups(layout.owned(rank))
    for group in layout.groups:
        for piece in group.pieces:
            found = spans(piece.box, piece.tensor.shape)
            require(sum(s.run * s.rows for s in found) == piece.box.elements, "spans miss elements of a box")
    files = table_of(layout, frozenset(layout.names), 1 << 20).files
    require(sum(len(file.tensors) for file in files) == len(layout.names), "a tensor is in no file")


def _receipt(data: bytes) -> None:
    receipt = parsed(Receipt, data)
    if not isinstance(receipt, Receipt):
        return
    try:
        ranges = group_ranges(receipt, LAYOUT)
    except FormatError:
        return
    ends = [item.offset + item.size for item in ranges]
    require(all(a <= b.offset for a, b in zip(ends, ranges[1:], strict=False)), "groups overlap in the shard")
    require(not ends or ends[-1] == receipt.shard_bytes, "a shard ends elsewhere than its last group")
    require(all(len(item.digest) == 16 for item in ranges), "a digest is short")


def _manifest(data: bytes) -> None:
    manifest = parsed(Manifest, data)
    if not isinstance(manifest, Manifest):
        return
    target = manifest.position(data)
    held: Iterable[Position | None] = (None, manifest.parent, *(link.position for link in manifest.chain[:3]), target)
    for start in held:
        hops = plan_chain(start, manifest, target)
        require((hops[-1].position if hops else start) == target, "a plan leads elsewhere")
    try:
        receipts_of(plan_chain(None, manifest, target)[0], manifest, RUN)
    except FormatError:
        return


def _offer(data: bytes) -> None:
    offer = parsed(Offer, data)
    if not isinstance(offer, Offer) or offer.world_size != 1:
        return
    try:
        layout = resolve_layout([offer])
    except LayoutError:
        return
    require(Layout.parse(layout.to_bytes()) == layout, "a layout that was settled cannot be read")


def _packed(data: bytes) -> None:
    try:
        raw = unpack(data, key="fuzz")
    except (FormatError, ObjectTooLarge, UnknownFormatVersion):
        return
    require(unpack(pack(raw)) == raw, "what was unpacked does not come back")
    if len(raw) <= MIB:
        _layout(raw)


def _replica_state(data: bytes) -> None:
    state = parsed(State, data)
    if isinstance(state, State):
        held = held_by(state, LAYOUT)
        require(all(len(d) == 16 for d in held.digests), "a digest is short")
        groups = kept_groups(state, LAYOUT)
        require({g.index for g in groups} <= set(range(len(LAYOUT.groups))), "a kept group is not there")
        try:
            table_of(LAYOUT, frozenset(state.selected or LAYOUT.names), state.file_bytes)
        except RolloutError:
            return


def _sealed(data: bytes) -> None:
    """A local record with the SHA-256 of itself in its first line."""
    digest, _, body = data.partition(b"\n")
    if sha256_hex(body).encode() == digest:
        record = parsed(Whole, body)
        require(record is None or seal(record).partition(b"\n")[2] == record.to_bytes(), "a seal changes a record")


def _reseal(data: bytes, body: bytes) -> bytes:
    return sha256_hex(body).encode() + b"\n" + body


def _repack(data: bytes, raw: bytes) -> bytes:
    return pack(raw)


def _relength(data: bytes) -> bytes:
    """The same frame with the length that it claims itself in front."""
    import zstandard

    size = zstandard.frame_content_size(data[16:])
    return data[:8] + (size % 2**64).to_bytes(8, "little") + data[16:]


def _words(kind: type[Record]) -> tuple[bytes, ...]:
    names = [f'"{name}":'.encode() for name in kind.model_fields]
    return (*names, kind.FORMAT.encode(), b"null", b"[]", b"{}", b"9223372036854775807", b"1e999", b"NaN", b'"\\u0000"')


def _record_targets() -> Iterator[Target]:
    whole = Whole(
        run=RUN, run_id=RUN_ID, position=POSITION, step=4, boot_id=BOOT, files={"model-00001-of-00001.safetensors": 64}
    )
    base = Base(slot=1, position=POSITION, ordinal=3, digests="cd" * 32)
    fulls = Receipt.parse(stored(Receipt)[-1]).fulls
    sidecar = SidecarState(run_id=RUN_ID, layout="e" * 64, base=base, full_due=base, fulls=fulls)
    rows: list[tuple[str, type[Record], Callable[[bytes], None] | None, Callable[[], list[bytes]]]] = [
        ("head", Head, None, lambda: stored(Head)),
        ("control", Control, None, lambda: stored(Control)),
        ("open", Open, None, lambda: stored(Open)[-2:]),
        ("abort", Abort, None, lambda: stored(Abort)),
        ("manifest", Manifest, _manifest, lambda: stored(Manifest)),
        ("receipt", Receipt, _receipt, lambda: stored(Receipt)),
        ("layout", Layout, _layout, lambda: stored(Layout)),
        ("offer", Offer, _offer, lambda: stored(Offer)),
        ("replica-owner", Owner, None, _local(Owner(run=RUN, run_id=RUN_ID))),
        ("replica-whole", Whole, None, _local(whole)),
        ("replica-serving", Serving, None, _local(Serving(run_id=RUN_ID, position=POSITION, boot_id=BOOT))),
        (
            "replica-state",
            State,
            _replica_state,
            _local(_state(include=("model.*",), checkpoint="checkpoint-" + "1" * 12)),
        ),
        ("replica-log-head", LogHead, None, _local(LogHead(run_id=RUN_ID, base=POSITION, to=VERSION))),
        ("sidecar-state", SidecarState, None, _local(sidecar)),
    ]
    for name, kind, run, seeds in rows:
        yield Target(
            name, run or _parse_only(kind), seeds, reshape_json, _words(kind), covers=(f"{kind.__name__}.parse",)
        )
    yield Target(
        "packed-record",
        _packed,
        lambda: [data for data in OBJECTS.values() if data[:6] == b"WCPACK"],
        either(within(unpack, reshape_json, _repack), repaired(_relength)),
        # Legal by the bound of a layout, and read before anything says that it is none.
        memory_bytes=1600 * MIB,
        covers=("records.unpack",),
        ci_runs=800,
    )
    yield Target(
        "sealed-record",
        _sealed,
        lambda: [seal(whole)],
        within(lambda data: data.partition(b"\n")[2], reshape_json, _reseal),
        covers=("rollout_agent.state.load",),
        ci_runs=500,
    )


TARGETS = tuple(_record_targets())
