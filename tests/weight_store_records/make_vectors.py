"""Write the golden records and the worked example of LAYOUT.md: run by a person when a format changes, never by a test.

    python tests/weight_store_records/make_vectors.py

A vector of an older format version is never written again: readers of today must still read it.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from weight_store.control import Control
from weight_store.grouping import resolve_layout
from weight_store.head import Head
from weight_store.keys import (
    asset_key,
    control_key,
    head_key,
    layout_key,
    manifest_key,
    offer_key,
    open_key,
    receipt_key,
    shard_key,
)
from weight_store.layout import Layout
from weight_store.manifest import seal
from weight_store.offer import Offer
from weight_store.position import GENESIS, Position
from weight_store.receipt import SHARD_MAGIC, Asset, FullRef, Receipt
from weight_store.records import pack, sha256_hex, unpack
from weight_store.version import Abort, Open

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "weight_store" / "LAYOUT.md"
RUN, RUN_ID = "demo", "6f1ff0d2-8a3c-4c55-9f0e-0d6a5b1d7c11"
EXAMPLE = re.compile(r"(<!-- example -->\n```\n).*?(```\n<!-- end of example -->)", re.DOTALL)


def worked_example() -> dict[str, bytes]:
    """Every object of a run of one rank and one version, by key."""
    offer = Offer(
        run_id=RUN_ID,
        term=1,
        rank=0,
        world_size=1,
        names=("w",),
        dtypes=("BF16",),
        itemsizes=(2,),
        shapes=((2,),),
        offsets=((0,),),
        sizes=((2,),),
    )
    layout = resolve_layout([offer])
    opened = _open(layout, 1, GENESIS)
    receipt, shard = _receipt(opened, layout, 0, (b"\x01\x02\x03\x04\x05",), full=(0,))
    manifest = seal(opened, layout, [(receipt, receipt.to_bytes())], None)
    position = manifest.position(manifest.to_bytes())
    head = Head(run_id=RUN_ID, term=1, launch="job-1", position=position, write_id="00000000000000aa")
    return {
        offer_key(RUN, 1, 0): pack(offer.to_bytes()),
        layout_key(RUN, opened.layout): pack(layout.to_bytes()),
        open_key(RUN, 1): opened.to_bytes(),
        shard_key(RUN, 1, 0, receipt.nonce): shard,
        receipt_key(RUN, 1, 0): receipt.to_bytes(),
        manifest_key(RUN, 1): manifest.to_bytes(),
        head_key(RUN): head.to_bytes(),
    }


def second_version() -> dict[str, bytes]:
    """Every field in use: two ranks, a frozen and a tied tensor, a delta, an extra full, assets, an abort."""
    offers = [_offer(rank) for rank in range(2)]
    layout = _two_ranks()
    config = b'{"model_type":"demo"}'
    assets = (Asset(name="config.json", sha256=sha256_hex(config), size=len(config)),)
    states = []
    objects = {offer_key(RUN, 3, rank): pack(offer.to_bytes()) for rank, offer in enumerate(offers)}
    objects[asset_key(RUN, assets[0].sha256)] = config
    fulls: list[tuple[FullRef, ...]] = [(), ()]
    for version in (1, 2, 4):
        parent = states[-1] if states else None
        opened = _open(layout, version, parent[1] if parent else GENESIS, term=3, ordinal=len(states))
        made = []
        for rank in range(2):
            payloads = tuple(bytes([16 * version + i]) * (3 + i) for i in range(len(layout.owned(rank))))
            full = tuple(range(len(payloads))) if parent is None else ()
            more = {"full": full, "fulls": fulls[rank], "assets": assets if parent is None and rank == 0 else ()}
            receipt, shard = _receipt(opened, layout, rank, payloads, **more)
            made.append((receipt, receipt.to_bytes()))
            objects[receipt_key(RUN, version, rank)] = receipt.to_bytes()
            objects[shard_key(RUN, version, rank, receipt.nonce)] = shard
            if version == 2:
                fulls[rank] = (_extra_full(objects, opened, layout, rank),)
        manifest = seal(opened, layout, made, parent)
        states.append((manifest, manifest.position(manifest.to_bytes())))
        objects[open_key(RUN, version)] = opened.to_bytes()
        objects[manifest_key(RUN, version)] = manifest.to_bytes()
    objects[layout_key(RUN, sha256_hex(layout.to_bytes()))] = pack(layout.to_bytes())
    objects[open_key(RUN, 3)] = _open(layout, 3, states[1][1], term=3, ordinal=2).to_bytes()
    objects[manifest_key(RUN, 3)] = Abort(
        run_id=RUN_ID, version=3, term=3, reason="expired", detail="no receipt", missing=(1,), write_id="0" * 16
    ).to_bytes()
    objects[control_key(RUN)] = Control(
        run_id=RUN_ID, targets={"eu-west": 2}, floor=1, write_id="00000000000000cc"
    ).to_bytes()
    objects[head_key(RUN)] = Head(
        run_id=RUN_ID, term=3, launch="job-3", position=states[-1][1], write_id="0" * 16, retired=("job-2", "job-1")
    ).to_bytes()
    return objects


def _two_ranks() -> Layout:
    """A layout of the two offers, spelt out: which groups the ranks form today must not rewrite the vector."""
    return Layout(
        world_size=2,
        names=("embed", "layers.0.scale", "layers.0.w"),
        dtypes=("BF16", "F32", "BF16"),
        itemsizes=(2, 4, 2),
        shapes=((3, 2), (), (2, 4)),
        frozen=(0,),
        aliases={"lm_head": "embed"},
        piece_tensor=(0, 2, 2, 1),
        piece_offsets=((0, 0), (0, 0), (0, 2), ()),
        piece_sizes=((3, 2), (2, 2), (2, 2), ()),
        group_owner=(0, 0, 1, 1),
        group_start=(0, 1, 2, 3),
    )


def _offer(rank: int) -> Offer:
    names = ("embed", "layers.0.w") if rank == 0 else ("embed", "layers.0.w", "layers.0.scale")
    return Offer(
        run_id=RUN_ID,
        term=3,
        rank=rank,
        world_size=2,
        names=names,
        dtypes=("BF16", "BF16", "F32")[: len(names)],
        itemsizes=(2, 2, 4)[: len(names)],
        shapes=((3, 2), (2, 4), ())[: len(names)],
        offsets=((0, 0), (0, 2 * rank), ())[: len(names)],
        sizes=((3, 2), (2, 2), ())[: len(names)],
        frozen=("embed",),
        aliases={"lm_head": "embed"},
    )


def _open(layout: Layout, version: int, parent: Position, *, term: int = 1, ordinal: int = 0) -> Open:
    return Open(
        run_id=RUN_ID,
        version=version,
        term=term,
        step=10 * version,
        ordinal=ordinal,
        parent=parent,
        layout=sha256_hex(layout.to_bytes()),
        world_size=layout.world_size,
        write_id="00000000000000bb",
    )


def _receipt(
    opened: Open, layout: Layout, rank: int, payloads: tuple[bytes, ...], **more: object
) -> tuple[Receipt, bytes]:
    shard = SHARD_MAGIC + b"".join(payloads)
    # The digest of the rebuilt bytes is the codec's to compute; here any 16 bytes will do.
    digests = "".join(hashlib.sha256(payload).hexdigest()[:32] for payload in payloads)
    fields = {
        "run_id": RUN_ID,
        "version": opened.version,
        "rank": rank,
        "parent": opened.parent,
        "layout": opened.layout,
        "nonce": f"{rank + 1:016x}",
        "shard_bytes": len(shard),
        "sizes": tuple(map(len, payloads)),
        "changed": tuple(min(2, group.elements) for group in layout.owned(rank)),
        "digests": digests,
        "blocks": sha256_hex(shard),
    }
    return Receipt(**{**fields, **more}), shard


def _extra_full(objects: dict[str, bytes], opened: Open, layout: Layout, rank: int) -> FullRef:
    payloads = tuple(b"\xff" * group.nbytes for group in layout.owned(rank))
    full = tuple(range(len(payloads)))
    receipt, shard = _receipt(opened, layout, rank, payloads, full=full, extra_full=True)
    data = receipt.to_bytes()
    objects[receipt_key(RUN, opened.version, rank, extra_full=True)] = data
    objects[shard_key(RUN, opened.version, rank, receipt.nonce, extra_full=True)] = shard
    return FullRef(version=opened.version, sha256=sha256_hex(data), size=len(data), shard_bytes=len(shard))


def example_text() -> str:
    """The worked example as LAYOUT.md shows it; packed objects as the JSON inside, since compressors differ."""
    lines = []
    for key, data in worked_example().items():
        packed = data.startswith(b"WCPACK")
        body = unpack(data) if packed else data
        shown = body.hex(" ") if key.endswith(".shard") else body.decode()
        lines += [f"{key}{' (unpacked)' if packed else ''}", *re.findall(".{1,126}", f"{shown}"), ""]
    return "\n".join(lines[:-1]) + "\n"


def main() -> None:
    for name, objects in (("v1-small", worked_example()), ("v1-every-field", second_version())):
        target = HERE / "vectors" / f"{name}.json"
        target.parent.mkdir(exist_ok=True)
        body = {key: data.hex() for key, data in sorted(objects.items())}
        target.write_text(json.dumps(body, indent=1) + "\n")
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(EXAMPLE.sub(lambda found: found[1] + example_text() + found[2], text))
    sums = {path.name: sha256_hex(path.read_bytes()) for path in sorted((HERE / "vectors").glob("v*.json"))}
    (HERE / "vectors" / "SHA256SUMS.json").write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    main()
