"""Targets: every record of the bucket and of both agents' own directories, and the chain and file rules over them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_agent.changelog import LogHead
from rollout_agent.disk import Stamp
from rollout_agent.errors import RolloutError
from rollout_agent.state import Owner, Serving, State, Syncing, Told, Version, Whole, kept_groups, load, seal, table_of
from rollout_agent.statedir import held_by
from tests.fuzz.reshaping import either, repaired, reshape_json, within
from tests.fuzz.target import MIB, Target, require
from tests.weight_store_records.make_vectors import RUN, RUN_ID, second_version, worked_example
from trainer_agent.notes import Notes
from trainer_agent.placement import place_groups
from trainer_agent.state import SLOTS, Base, Waiting, unseal
from trainer_agent.state import State as SidecarState
from trainer_agent.state import seal as seal_sidecar
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
from weight_store.records import MAX_COLUMNS_BYTES, Record, pack, record_format, sha256_hex, unpack
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


class _File:
    """A disk with this one small file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, path: Path, *, max_bytes: int) -> bytes:
        require(max_bytes <= MAX_COLUMNS_BYTES, "a record is read without a bound")
        return self._data


@contextmanager
def _short_lines(logger: str) -> Iterator[None]:
    """What the readers say of a file that they refuse must not repeat it at length, and goes nowhere."""

    class Reads(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = record.getMessage()
            require(len(said) < 1000, f"a line of {len(said)} characters in the log repeats the input")
            said.encode()

    log, reads = logging.getLogger(logger), Reads()
    before, log.propagate = log.propagate, False
    log.addHandler(reads)
    try:
        yield
    finally:
        log.removeHandler(reads)
        log.propagate = before


def _sealed(data: bytes) -> bytes | None:
    """What is under the seal, if that is right: the SHA-256 of all that follows the first line, in it."""
    if data[64:65] == b"\n" and hashlib.sha256(data[65:]).hexdigest().encode() == data[:64]:
        return data[65:]
    return None


def _opened(kind: type[Record], found: Record | None, data: bytes) -> None:
    """``found`` is what a reader made of a sealed file: all that it says if the seal is right, else nothing."""
    body = _sealed(data)
    require(
        found == (None if body is None else parsed(kind, body)), "a reader takes what it must refuse, or the reverse"
    )


def _replica_record(data: bytes) -> None:
    """Any of the small files in an agent's directories, as each of their readers takes it."""
    with _short_lines("rollout_agent.state"):
        for kind in _LOCAL:
            found = load(_File(data), Path("fuzz"), kind)  # type: ignore[arg-type]
            _opened(kind, found, data)
            if found is not None:
                require(load(_File(seal(found)), Path("fuzz"), kind) == found, "a seal changes a record")  # type: ignore[arg-type]


_LOCAL: tuple[type[Record], ...] = (Owner, Whole, Serving, Told, Syncing, State)


def _sidecar_state(data: bytes) -> None:
    """``state.json`` of the arena."""
    with _short_lines("trainer_agent.state"):
        found = unseal(data)
        _opened(SidecarState, found, data)
        if found is None:
            return
        require(unseal(seal_sidecar(found)) == found, "a seal changes a record")
    for held in (found.base, found.waiting, found.full_due):
        require(held is None or held.slot in range(SLOTS), "a slot that there is not")
        require(held is None or not held.digest(len(held.digests) // 32), "the last digest is cut")


def _under_seal(data: bytes) -> bytes:
    return data.partition(b"\n")[2]


def _reseal(data: bytes, body: bytes) -> bytes:
    return sha256_hex(body).encode() + b"\n" + body


_SEALED = either(within(_under_seal, reshape_json, _reseal), repaired(lambda data: _reseal(data, _under_seal(data))))
"""Damages the record, as JSON or as bytes, under a seal that is right. The seal is damaged where bytes anywhere are."""


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
    stamps = {"model-00001-of-00001.safetensors": Stamp(size=64, mtime_ns=1, ctime_ns=2, inode=3)}
    whole = Whole(run=RUN, run_id=RUN_ID, position=POSITION, step=4, boot_id=BOOT, stamps=stamps)
    base = Base(slot=1, position=POSITION, ordinal=3, digests="cd" * 32)
    waiting = Waiting(slot=0, ordinal=4, digests="ef" * 32)
    fulls = Receipt.parse(stored(Receipt)[-1]).fulls
    sidecar = SidecarState(run_id=RUN_ID, layout="e" * 64, base=base, waiting=waiting, full_due=base, fulls=fulls)
    owner, serving = Owner(run=RUN, run_id=RUN_ID), Serving(run_id=RUN_ID, position=POSITION, boot_id=BOOT)
    told, syncing = Told(run_id=RUN_ID, position=POSITION, boot_id=BOOT), Syncing(boot_id=BOOT)
    notes = Notes(run_id=RUN_ID, version=7, done=((3, "step_3", 1), (4, "step_4", 2)), pending=(5, "step_5", 3))
    rows: list[tuple[str, type[Record], Callable[[bytes], None] | None, Callable[[], list[bytes]]]] = [
        ("head", Head, None, lambda: stored(Head)),
        ("control", Control, None, lambda: stored(Control)),
        ("open", Open, None, lambda: stored(Open)[-2:]),
        ("abort", Abort, None, lambda: stored(Abort)),
        ("manifest", Manifest, _manifest, lambda: stored(Manifest)),
        ("receipt", Receipt, _receipt, lambda: stored(Receipt)),
        ("layout", Layout, _layout, lambda: stored(Layout)),
        ("offer", Offer, _offer, lambda: stored(Offer)),
        ("replica-owner", Owner, None, _local(owner)),
        ("replica-whole", Whole, None, _local(whole)),
        ("replica-serving", Serving, None, _local(serving)),
        (
            "replica-state",
            State,
            _replica_state,
            _local(_state(include=("model.*",), checkpoint="checkpoint-" + "1" * 12)),
        ),
        ("replica-log-head", LogHead, None, _local(LogHead(run_id=RUN_ID, base=POSITION, to=VERSION))),
        ("replica-told", Told, None, _local(told)),
        ("replica-syncing", Syncing, None, _local(syncing)),
        ("watcher-notes", Notes, None, _local(notes)),
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
        _replica_record,
        lambda: [seal(record) for record in (owner, whole, serving, told, syncing, _state())],
        _SEALED,
        _words(Whole),
        covers=("rollout_agent.state.load",),
    )
    yield Target(
        "sidecar-state",
        _sidecar_state,
        lambda: [seal_sidecar(sidecar), seal_sidecar(SidecarState(run_id=RUN_ID, layout="e" * 64))],
        _SEALED,
        _words(SidecarState),
        covers=("trainer_agent.state.unseal",),
    )


TARGETS = tuple(_record_targets())
