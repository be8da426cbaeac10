"""Targets: what both agents read: logs, safetensors files and indexes, shards, socket messages, names and patterns."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save

import codec
from codec import Change
from rollout_agent.changelog import LogHead, LogWriter, changes, scan
from rollout_agent.errors import DamagedObject, NothingSelected
from rollout_agent.fetching import Fetcher
from rollout_agent.selection import compile_patterns
from rollout_agent.source import LoadedHop
from tests.fuzz.codec_targets import base_of, changed
from tests.fuzz.record_targets import POSITION, VERSION
from tests.fuzz.reshaping import repaired, reshape_json, within
from tests.fuzz.target import Target, require
from tests.weight_store_records.make_vectors import RUN, RUN_ID
from trainer_agent import messages
from trainer_agent.checkpoint import INDEX_FILE, open_checkpoint
from trainer_agent.errors import InvalidPieces
from trainer_agent.piece import Piece, make_casting
from trainer_agent.watching import step_of
from weight_store.chain import Hop
from weight_store.errors import FormatError, LayoutError
from weight_store.grouping import layer_of, layer_order, resolve_layout
from weight_store.keys import shard_key
from weight_store.memory import MemoryStore
from weight_store.offer import Offer
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Receipt, group_ranges
from weight_store.records import sha256_hex

HEAD = LogHead(run_id=RUN_ID, base=POSITION, to=VERSION)


class _Paper:
    """As much of a disk as a log needs, in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def append(self, path: Path) -> _Paper:
        return self

    def sync_dir(self, path: Path) -> None:
        pass

    def write(self, data: Any) -> None:
        self.data += data

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _written(head: LogHead, items: list[tuple[int, Change]]) -> bytes:
    paper = _Paper()
    writer = LogWriter(paper, Path("/log"), head)  # type: ignore[arg-type]
    for group, change in items:
        writer.add(group, change)
    writer.commit()
    return bytes(paper.data)


def _log(data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    found = scan(array)
    if found is None:
        return
    items = list(changes(array, found))
    require(len(items) == len(found.groups), "a group of the log is missing")
    again = _written(found.head, items)
    second = scan(np.frombuffer(again, np.uint8))
    require(second is not None and second.head == found.head, "a log that is written again cannot be read")
    require(_written(found.head, list(changes(np.frombuffer(again, np.uint8), second))) == again, "not stable")  # type: ignore[arg-type]


def repair_log(data: bytes) -> bytes:
    """Put every checksum of a log right, and the number of its records."""
    out, chain, records = bytearray(data), xxhash.xxh3_128(), 0

    def check(at: int, *parts: bytes | bytearray) -> None:
        out[at : at + 8] = xxhash.xxh3_64_digest(b"".join(parts))[::-1]
        chain.update(bytes(out[at : at + 8]))

    at = 16 + int.from_bytes(out[8:16], "little")
    at += -at % 8
    check(at, out[:at])
    at += 8
    while out[at : at + 4] == b"WCGR" and at < len(out):
        kind, itemsize = (int.from_bytes(out[at + i : at + i + 4], "little") for i in (8, 12))
        count = int.from_bytes(out[at + 16 : at + 24], "little")
        values = count * itemsize + -(count * itemsize) % 8
        end = at + 48 + values + (0 if kind == 2 else 4 * count + -4 * count % 8)
        if end > len(out):
            break
        check(at + 40, out[at : at + 40], out[at + 48 : end])
        at, records = end, records + 1
    if out[at : at + 4] == b"WCOK":
        out[at + 8 : at + 32] = records.to_bytes(8, "little") + chain.digest()
        check(at + 32, out[at : at + 32])
    return bytes(out)


def _log_seeds() -> Iterator[bytes]:
    yield _written(HEAD, [])
    index, bits = np.array([1, 5], np.uint32), np.array([7, 9], np.uint16)
    sparse = Change(index, bits, None, b"d" * 16)
    whole = Change(np.empty(0, np.uint32), np.empty(0, np.uint8), np.arange(11, dtype=np.uint8), b"e" * 16)
    yield _written(HEAD, [(0, sparse), (3, whole)])


# Safetensors


@cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="weightcast-fuzz-")
    _folder_owner.append(made)
    return Path(made.name)


_folder_owner: list[Any] = []
"""Keeps the directory until the process ends; in a fuzzing child, which ends without ado, it lies in its scratch."""


def _checkpoint(data: bytes) -> None:
    folder = _folder()
    (folder / INDEX_FILE).unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(data)
    casting = make_casting(torch.bfloat16, ())
    try:
        tensors = dict(open_checkpoint(folder))
        for name, tensor in tensors.items():
            casting.row(Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor))
    except InvalidPieces:
        return
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # before the file that they map is replaced
    (folder / "model.safetensors").write_bytes(save(copies))
    again = dict(open_checkpoint(folder))
    same = (codec.digest(codec.to_bits(again[name])) == codec.digest(codec.to_bits(t)) for name, t in copies.items())
    require(again.keys() == tensors.keys() and all(same), "a checkpoint changes when it is written and read again")


def _checkpoint_seeds() -> Iterator[bytes]:
    yield save({"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "layers.0.b": torch.zeros(0, 4)})
    yield save({"q": torch.ones(3, dtype=torch.float8_e4m3fn), "s": torch.tensor(1.5), "i": torch.arange(2)})


def _safetensors_header(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _with_header(data: bytes, header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data[8 + int.from_bytes(data[:8], "little") :]


def _index(data: bytes) -> None:
    folder = _folder()
    (folder / INDEX_FILE).write_bytes(data)
    (folder / "model.safetensors").write_bytes(b"")
    try:
        found = open_checkpoint(folder)
    except InvalidPieces as error:
        str(error).encode()  # a sentence that cannot be printed helps nobody
        return
    require(all(path.parent == folder for path in found.files), "an index leads out of its directory")


def _index_seeds() -> Iterator[bytes]:
    yield json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}).encode()


# Shards


@cache
def _shard_parts() -> tuple[Any, tuple[bytes, ...], tuple[Any, ...]]:
    """A layout of three groups of other dtypes, the payloads of a delta, and what they make."""
    rows = (("layers.0.w", "BF16", 2, 600), ("layers.1.w", "F32", 4, 90), ("layers.2.i", "I64", 8, 40))
    offer = Offer(
        run_id=RUN_ID,
        term=1,
        rank=0,
        world_size=1,
        names=tuple(row[0] for row in rows),
        dtypes=tuple(row[1] for row in rows),
        itemsizes=tuple(row[2] for row in rows),
        shapes=tuple((row[3],) for row in rows),
        offsets=((0,),) * len(rows),
        sizes=tuple((row[3],) for row in rows),
    )
    layout = resolve_layout([offer])
    encoded = []
    for group in layout.groups:
        base = base_of(group.dtype, 2, group.elements)
        if base is None:
            raise AssertionError("kind 2 is a base")
        encoded.append(codec.encode_group(base, changed(base, 8), group.dtype))
    return layout, tuple(one.payload for one in encoded), tuple(encoded)


def _shard(data: bytes) -> None:
    """Sizes of three groups (u16), a flag of fulls, then the shard's payloads."""
    layout, _, encoded = _shard_parts()
    sizes = tuple(int.from_bytes(data[i : i + 2], "little") for i in (0, 2, 4))
    full = tuple(i for i in range(3) if data[6:7] and data[6] >> i & 1)
    stored = SHARD_MAGIC + data[7:]
    claimed = len(SHARD_MAGIC) + sum(sizes)
    blocks = "".join(hashlib.sha256(stored[i : i + BLOCK_BYTES]).hexdigest() for i in range(0, claimed, BLOCK_BYTES))
    receipt = Receipt(
        run_id=RUN_ID,
        version=VERSION.position.version,
        rank=0,
        parent=POSITION,
        layout=sha256_hex(layout.to_bytes()),
        nonce="0" * 16,
        shard_bytes=claimed,
        sizes=sizes,
        changed=(0, 0, 0),
        digests="".join(one.digest.hex() for one in encoded),
        full=full,
        blocks=blocks,
    )
    try:
        ranges = {item.group.index: item for item in group_ranges(receipt, layout)}
    except FormatError:
        return
    hop = LoadedHop(Hop(POSITION, "delta", claimed), VERSION, layout, (receipt,), ranges)
    taken: dict[int, bytes] = {}

    def take(group: Any, change: Change) -> None:
        result = _base(group).copy()
        codec.apply_change(result, change)
        taken[group.index] = codec.digest(result)

    async def fetch() -> None:
        store = MemoryStore()
        await store.create(shard_key(RUN, receipt.version, 0, receipt.nonce), stored)
        with ThreadPoolExecutor(1) as pool:
            await Fetcher(store, RUN, pool).run(hop, set(ranges), _base, take)

    try:
        asyncio.run(fetch())
    except (DamagedObject, FormatError):
        pass
    else:
        require(len(taken) == 3, "a group was left out")
    require(all(encoded[i].digest == digest for i, digest in taken.items()), "a wrong group was taken")


def _base(group: Any) -> Any:
    return base_of(group.dtype, 2, group.elements)


def _shard_seeds() -> Iterator[bytes]:
    _, payloads, _ = _shard_parts()
    yield b"".join(len(payload).to_bytes(2, "little") for payload in payloads) + b"\0" + b"".join(payloads)


# Messages, names, patterns


def _message(parse: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            message = parse(data)
        except ValueError:
            return
        line = message.to_line()
        require(line.count(b"\n") == 1 and line.endswith(b"\n"), "a message takes more than one line")
        require(parse(line).to_line() == line, "a message changes on its way")

    return run


def _requests() -> Iterator[bytes]:
    where = {"arena": "/dev/shm/weightcast-0-1", "run": RUN, "store": "file:///x", "coordinator": "http://h:1"}
    yield messages.Attach(**where, rank=0, world_size=2, launch="job-1", term=3, run_id=RUN_ID).to_line()
    yield messages.Offered().to_line()
    yield messages.Publish(ordinal=1, step=2, slot=0, resumed=True, version=7).to_line()
    yield messages.AskServing(id=1, version=2, regions=("eu-west",), quorum=0.5, timeout_s=3.5).to_line()
    yield messages.Close(grace_s=1.5).to_line()


def _events() -> Iterator[bytes]:
    yield messages.Attached(run_id=RUN_ID, term=1, base_slot=None, full_slot=1).to_line()
    yield messages.LayoutReady(sha256="0" * 64).to_line()
    yield messages.Sealed(ordinal=1, version=2, position=POSITION, base_slot=0, full_slot=None, encode_s=0.5).to_line()
    yield messages.Failed(ordinal=None, code="x", message="why").to_line()
    yield messages.Served(id=1, reached=True).to_line()


def _patterns(data: bytes) -> None:
    patterns = data.decode("utf-8", "surrogateescape").split("\n")
    try:
        found = compile_patterns(patterns)
    except NothingSelected as error:
        str(error)
        return
    if not any(pattern.startswith("re:") for pattern in patterns):  # a regular expression may take its user's time
        for name in ("model.layers.3.mlp.weight", "lm_head", ""):
            expected = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            require(any(one.fullmatch(name) for one in found) == expected, f"{name!r} is selected wrongly")


def _names(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    step = step_of(text)
    require(step is None or 0 <= step < 10**18, "a step is out of bounds")
    try:
        piece = Piece(text, (1,), (0,), torch.zeros(1))
    except InvalidPieces as error:
        str(error)
        return
    require(isinstance(layer_order(text), tuple) and layer_of(text) == layer_of(piece.name), "no layer")
    offer = Offer(
        run_id=RUN_ID,
        term=1,
        rank=0,
        world_size=1,
        names=(text,),
        dtypes=("U8",),
        itemsizes=(1,),
        shapes=((1,),),
        offsets=((0,),),
        sizes=((1,),),
    )
    try:
        require(resolve_layout([offer]).names == (text,), "a name changes")
    except LayoutError:
        return


def _targets() -> Iterator[Target]:
    yield Target("replica-log", _log, _log_seeds, repaired(repair_log), (b"WCGR", b"WCOK"), covers=("changelog.scan",))
    yield Target(
        "checkpoint-file",
        _checkpoint,
        _checkpoint_seeds,
        within(_safetensors_header, reshape_json, _with_header),
        (b'"F8_E8M0"', b'"F4"', b'"U64"', b'"C64"', b'"BOOL"', b'"I16"', b'"__metadata__"'),
        covers=("trainer_agent.checkpoint",),
        ci_runs=400,
    )
    yield Target(
        "checkpoint-index", _index, _index_seeds, reshape_json, (b'"weight_map":',), covers=("open_checkpoint",)
    )
    yield Target("shard", _shard, _shard_seeds, covers=("Fetcher.run", "fetch_groups"), ci_runs=400)
    yield Target(
        "sidecar-request", _message(messages.parse_request), _requests, reshape_json, covers=("parse_request",)
    )
    yield Target("sidecar-event", _message(messages.parse_event), _events, reshape_json, covers=("parse_event",))
    yield Target(
        "include-patterns",
        _patterns,
        lambda: [b"model.layers.[0-3].*", b"*\nlm_head", b"re:model\\.(a|b)+\nre:(?P<n>x)"],
        None,
        (b"re:", b"(?i)", b"(?P<a>", b"(?P=a)", b"\\1", b"{1,99999999999}", b"[!", b"[[", b"*", b"\n"),
        covers=("compile_patterns",),
        max_bytes=300,
    )
    yield Target(
        "names",
        _names,
        lambda: [b"model.layers.10.w", b"step_000123", b"lm_head.weight", "\u0663\u00b2".encode()],
        covers=("Piece", "layer_order", "step_of"),
        max_bytes=600,
    )


TARGETS = tuple(_targets())
