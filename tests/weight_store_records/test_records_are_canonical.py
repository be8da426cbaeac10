"""Equal facts have equal bytes, whoever writes them and in whatever order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store.control import Control
from weight_store.errors import FormatError, UnknownFormatVersion
from weight_store.head import Head
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.offer import Offer
from weight_store.position import GENESIS
from weight_store.receipt import Receipt
from weight_store.records import Record, pack, record_format, unpack
from weight_store.version import Abort, Open

KINDS = [Head, Control, Open, Abort, Receipt, Manifest, Layout, Offer]


@pytest.fixture(scope="session")
def examples(make) -> dict[type[Record], Record]:
    layout = make.layout()
    opened = make.opened(layout)
    manifest, position = make.seal(layout)
    return {
        Head: Head(run_id=make.run_id, term=1, launch="job-1:a", position=position, write_id="0" * 16),
        Control: Control(run_id=make.run_id, targets={"eu-west": 3, "ap": 1}, floor=2, write_id="1" * 16),
        Open: opened,
        Abort: Abort(
            run_id=make.run_id, version=1, term=1, reason="expired", detail="é", missing=(1,), write_id="2" * 16
        ),
        Receipt: make.receipt(opened, layout, 0, make.shard(layout, 0)),
        Manifest: manifest,
        Layout: layout,
        Offer: make.offer(0, 1, make.rows("w", (2, 3)), frozen=("w",), aliases={"lm_head": "w", "a": "w"}),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_parsing_undoes_writing(kind: type[Record], examples: dict[type[Record], Record]) -> None:
    data = examples[kind].to_bytes()
    assert kind.parse(data) == examples[kind]
    assert kind.parse(data).to_bytes() == data
    assert record_format(data) == kind.FORMAT


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_sorted_ascii_without_spaces(kind: type[Record], examples: dict[type[Record], Record]) -> None:
    data = examples[kind].to_bytes()
    again = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert data == again.encode("ascii")


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_spacing_of_what_is_read_do_not_matter(
    kind: type[Record], examples: dict[type[Record], Record]
) -> None:
    body = json.loads(examples[kind].to_bytes())
    shuffled = json.dumps(dict(reversed(body.items())), indent=2).encode()
    assert kind.parse(shuffled).to_bytes() == examples[kind].to_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_a_later_release_are_ignored(kind: type[Record], examples: dict[type[Record], Record]) -> None:
    body = json.loads(examples[kind].to_bytes()) | {"signature": {"by": ["somebody"]}}
    assert kind.parse(json.dumps(body).encode()) == examples[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 2, 2**31 - 1])
def test_another_format_version_is_its_own_error(
    kind: type[Record], version: int, examples: dict[type[Record], Record]
) -> None:
    body = json.loads(examples[kind].to_bytes()) | {"format_version": version}
    with pytest.raises(UnknownFormatVersion, match=f"run/x has format version {version} of {kind.FORMAT}.*upgrade"):
        kind.parse(json.dumps(body).encode(), key="run/x")


def test_another_kind_is_named(examples: dict[type[Record], Record]) -> None:
    with pytest.raises(FormatError, match=r"run/head.json is a 'weightcast.open' object, expected 'weightcast.head'"):
        Head.parse(examples[Open].to_bytes(), key="run/head.json")


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_checked_for_its_type(kind: type[Record], examples: dict[type[Record], Record]) -> None:
    body = json.loads(examples[kind].to_bytes())
    for field in body.keys() - {"format", "format_version"}:
        for wrong in (None, 1.5, [[[]]], {"x": 1}, True):
            if type(wrong) is type(body[field]) and not isinstance(wrong, list):
                continue
            with pytest.raises(FormatError, match=kind.FORMAT):
                kind.parse(json.dumps(body | {field: wrong}).encode())


@given(st.binary(max_size=5000))
def test_packing_is_undone_exactly(raw: bytes) -> None:
    assert unpack(pack(raw)) == raw


def test_records_cannot_be_changed(examples: dict[type[Record], Record]) -> None:
    with pytest.raises(ValueError, match="frozen"):
        examples[Head].position = GENESIS  # type: ignore[attr-defined]


def test_bytes_that_were_parsed_before_are_told_from_all_others(examples) -> None:
    """Small records are remembered by their bytes: whatever came before, another kind or key gets its own answer."""
    data = examples[Head].to_bytes()
    assert Head.parse(data) is Head.parse(bytearray(data))
    for key in ("one", "other"):
        with pytest.raises(FormatError, match=key):
            Control.parse(data, key=key)
    changed = data.replace(b'"term":1', b'"term":2')
    assert (Head.parse(data).term, Head.parse(changed).term) == (1, 2)
