"""Whatever bytes lie under a key: a typed error with a short sentence, in bounded memory, or a valid record."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weight_store.control import Control
from weight_store.errors import FormatError, LayoutError, ObjectTooLarge, UnknownFormatVersion, WeightStoreError
from weight_store.grouping import resolve_layout
from weight_store.head import Head
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.offer import Offer
from weight_store.receipt import Asset, Receipt
from weight_store.records import MAX_COLUMNS_BYTES, Record, pack, record_format, unpack
from weight_store.version import Abort, Open

KINDS = [Head, Control, Open, Abort, Receipt, Manifest, Layout, Offer]
MAGIC = b"WCPACK\x01\x00"


def body_of(record: Record) -> dict[str, object]:
    found = json.loads(record.to_bytes())
    assert isinstance(found, dict)
    return found


def parse(kind: type[Record], body: dict[str, object]) -> Record:
    return kind.parse(json.dumps(body).encode())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes(kind: type[Record], data: bytes) -> None:
    with pytest.raises(FormatError):
        kind.parse(data)
    with pytest.raises(FormatError):
        unpack(data)


@pytest.mark.parametrize("kind", [Open, Receipt, Manifest, Layout, Offer])
def test_every_truncation_and_every_flipped_bit_is_an_error_or_a_record(kind: type[Record], make) -> None:
    layout = make.layout(world_size=1, layers=1)
    opened = make.opened(layout)
    records = [
        opened,
        make.receipt(opened, layout, 0, make.shard(layout, 0)),
        make.seal(layout)[0],
        layout,
        make.offer(0, 1, make.rows("w", (2, 3))),
    ]
    data = next(record for record in records if isinstance(record, kind)).to_bytes()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            kind.parse(data[:end])
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with contextlib.suppress(FormatError):  # any other error fails the test
                kind.parse(bytes(changed))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"format":"weightcast.head","format_version":' + b"9" * 100_000 + b"}",
        b'{"format":"weightcast.head","format_version":1e400}',
        b'{"format":"weightcast.head","format_version":true}',
        b'{"format":"weightcast.head","format_version":-1}',
        b'{"format":' + b'"x' * 1 + b"x" * 10_000_000 + b'","format_version":1}',
        b'{"format":"weightcast.head","format_version":1,"run_id":"' + b"0" * 10_000_000 + b'"}',
        b'{"format":"weightcast.head","format_version":1,"position":' + b"[" * 1_000_000,
        b"\xff\xfe{}",
        b"null",
        b"",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_absurd_json(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        Head.parse(data, key="run/head.json")
    assert len(str(caught.value)) < 500
    with pytest.raises(FormatError):
        Head.parse(data)


def test_a_number_beyond_its_field_is_refused(make) -> None:
    layout = make.layout()
    opened = body_of(make.opened(layout))
    for field in ("version", "term", "step", "ordinal", "world_size"):
        for wrong in (-1, 2**63, 2**64, 10**400, 1.0, "1"):
            with pytest.raises(FormatError, match=field):
                parse(Open, opened | {field: wrong})
    receipt = body_of(make.receipt(make.opened(layout), layout, 0, make.shard(layout, 0)))
    for wrong in ([2**63, 0], [-1, 0], [2**62, 2**62]):
        with pytest.raises(FormatError):
            parse(Receipt, receipt | {"sizes": wrong})


def peak_bytes(call: object) -> int:
    assert callable(call)
    tracemalloc.start()
    try:
        with pytest.raises(WeightStoreError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_packed_record_that_claims_a_terabyte_takes_no_memory() -> None:
    raw = zstandard.compress(b"x" * 1000)
    claim = MAGIC + struct.pack("<Q", 1 << 40) + raw
    with pytest.raises(ObjectTooLarge, match="claims 1099511627776 bytes"):
        unpack(claim, key="run/layouts/x")
    assert peak_bytes(lambda: unpack(claim)) < 1 << 20
    just_inside = MAGIC + struct.pack("<Q", MAX_COLUMNS_BYTES) + raw
    assert peak_bytes(lambda: unpack(just_inside)) < 1 << 20


def test_a_zstd_bomb_takes_no_more_than_its_header_says() -> None:
    bomb = zstandard.compress(b"\0" * (64 << 20))
    assert len(bomb) < 10_000
    assert peak_bytes(lambda: unpack(MAGIC + struct.pack("<Q", 1000) + bomb)) < 1 << 20
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * (8 << 20))
    for claim in (0, 1000, 8 << 20):
        assert peak_bytes(lambda claim=claim: unpack(MAGIC + struct.pack("<Q", claim) + without_size)) < 1 << 20


def test_damaged_packing_is_refused() -> None:
    packed = pack(b"{}" * 500)
    for end in range(len(packed)):
        with pytest.raises(FormatError):
            unpack(packed[:end])
    with pytest.raises(FormatError):
        unpack(packed + b"\0")
    with pytest.raises(FormatError):
        unpack(packed + zstandard.compress(b"more"))
    with pytest.raises(UnknownFormatVersion, match="upgrade"):
        unpack(b"WCPACK\x02\x00" + packed[8:])


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a\x00b", "a\nb", "é", "\ud800", "a" * 513, "x" * 10_000_000],
    ids=lambda name: ascii(name[:10]),
)
def test_tensor_names_are_short_printable_ascii(name: str, make) -> None:
    offer = body_of(make.offer(0, 1, make.rows("w", (2, 3))))
    for changed in ({"names": [name]}, {"frozen": [name]}, {"aliases": {name: "w"}}, {"aliases": {"a": name}}):
        with pytest.raises(FormatError) as caught:
            parse(Offer, offer | changed)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/etc/passwd", "a\\b", "a\x00", ".hidden", "a..b", "a" * 129, "a\n"],
    ids=ascii,
)
def test_asset_names_stay_in_their_directory(name: str) -> None:
    with pytest.raises(ValueError, match=r"asset|pattern"):
        Asset(name=name, sha256="0" * 64, size=1)


@pytest.mark.parametrize(
    "name",
    [
        *("m.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"),
        *("modeling_policy.py", "MODELING.PY", "x.pyc", "libx.so", "setup.sh"),
        *("pytorch_model.bin", "a.pt", "a.pth", "a.ckpt", "tokenizer.pkl"),
        "config.json.tmp",
    ],
)
def test_no_asset_is_weights_code_a_pickle_or_an_agents_temporary_file(make, name: str) -> None:
    with pytest.raises(ValueError, match="may not be the name of an asset"):
        Asset(name=name, sha256="0" * 64, size=1)
    layout = make.layout()
    receipt = body_of(make.receipt(make.opened(layout), layout, 0, make.shard(layout, 0)))
    with pytest.raises(FormatError, match="may not be the name of an asset"):
        parse(Receipt, receipt | {"assets": [{"name": name, "sha256": "0" * 64, "size": 1}]})


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer.model", "chat_template.jinja", "README.md"])
def test_configuration_and_tokenizers_are_assets(name: str) -> None:
    assert Asset(name=name, sha256="0" * 64, size=1).name == name


def test_an_offer_must_be_consistent(make) -> None:
    offer = body_of(make.offer(1, 2, make.rows("w", (4, 6))))
    for changed, sentence in [
        ({"dtypes": []}, "differ in length"),
        ({"sizes": [[4, 7]]}, r"box \[0:4, 0:7\] of w lies outside its shape \[4, 6\]"),
        ({"sizes": [[4]]}, "lies outside"),
        ({"offsets": [[2**48, 0]]}, "lies outside"),
        ({"offsets": [[2**48 + 1, 0]]}, "offsets"),
        ({"shapes": [[1] * 9]}, "shapes"),
        ({"shapes": [[2**48, 2**48]], "sizes": [[1, 1]]}, r"tensor w .* has more than 2\*\*50 bytes"),
        ({"rank": 2}, "rank 2 of a world of 2"),
        ({"itemsizes": [0]}, "itemsizes"),
        ({"dtypes": ["bf16"]}, "dtypes"),
    ]:
        with pytest.raises(FormatError, match=sentence):
            parse(Offer, offer | changed)


def test_a_short_offer_cannot_ask_for_millions_of_pieces(make) -> None:
    rows = [row for i in range(40) for row in make.rows(f"w{i}", (2**40,))]
    offers = make.offers(rows)

    def resolve() -> None:
        resolve_layout(offers)

    with pytest.raises(LayoutError, match="more than the 70368744177664 a run may have"):
        resolve()
    assert peak_bytes(resolve) < 1 << 20


def test_only_the_formats_name_is_needed_to_tell_a_manifest_from_an_abort(make) -> None:
    manifest, _ = make.seal(make.layout())
    assert record_format(manifest.to_bytes()) == "weightcast.manifest"
    with pytest.raises(FormatError, match="run/v/x is not a weightcast record"):
        record_format(b"{}", key="run/v/x")


def test_no_sentence_repeats_what_was_found_in_a_field(make) -> None:
    opened = body_of(make.opened(make.layout()))
    with pytest.raises(FormatError) as caught:
        parse(Open, opened | {"run_id": "AKIA-SECRET"})
    assert "SECRET" not in str(caught.value)


def test_text_that_json_cannot_carry_never_enters_a_record(make) -> None:
    with pytest.raises(ValueError, match="detail"):
        Abort(run_id=make.run_id, version=1, term=1, reason="refused", detail="\ud800", write_id="0" * 16)
