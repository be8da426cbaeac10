"""LAYOUT.md says what the code does: fields, limits, and an example that is made again here."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from weight_store import grouping, layout, manifest, offer, receipt, records
from weight_store.control import Control
from weight_store.head import MAX_RETIRED, MAX_TERM, Head
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.offer import Offer
from weight_store.receipt import Receipt
from weight_store.records import Record
from weight_store.version import Abort, AbortReason, Open

HERE = Path(__file__).parent
DOCUMENT = (HERE.parents[1] / "weight_store" / "LAYOUT.md").read_text()
KINDS = [Head, Control, Offer, Layout, Open, Receipt, Manifest, Abort]


@pytest.fixture(scope="module")
def make_vectors() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_vectors", HERE / "make_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("make_vectors", None)


def table(kind: type[Record]) -> dict[str, bool]:
    """Fields of the kind's table, in order: name to whether it may be absent."""
    section = re.search(rf"^### \w+: `{re.escape(kind.FORMAT)}`.*?\n\n\|(.*?)\n\n", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert section is not None, f"LAYOUT.md has no table of {kind.FORMAT}"
    rows = [row.split("|")[1:3] for row in section[1].splitlines()[2:]]
    return {name.strip(): kind_.strip().startswith("?") for name, kind_ in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_listed_in_order(kind: type[Record]) -> None:
    optional = {name: not about.is_required() for name, about in kind.model_fields.items()}
    assert list(table(kind).items()) == list(optional.items())


def test_the_worked_example_is_what_the_code_writes(make_vectors: ModuleType) -> None:
    found = make_vectors.EXAMPLE.search(DOCUMENT)
    assert found is not None
    assert found[0] == found[1] + make_vectors.example_text() + found[2]


def test_the_vectors_are_what_the_code_writes(make_vectors: ModuleType) -> None:
    for name, made in (("v1-small", make_vectors.worked_example()), ("v1-every-field", make_vectors.second_version())):
        stored = json.loads((HERE / "vectors" / f"{name}.json").read_text())
        assert set(made) == set(stored)
        for key, data in made.items():
            packed = data.startswith(b"WCPACK")
            unpacked = records.unpack(bytes.fromhex(stored[key])) if packed else bytes.fromhex(stored[key])
            assert unpacked == (records.unpack(data) if packed else data), key


def test_limits_are_those_of_the_code() -> None:
    limits = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in DOCUMENT.splitlines() if "| " in row}
    assert limits["a record"] == f"{records.MAX_RECORD_BYTES >> 20} MiB"
    assert limits["a layout or offer, unpacked"] == f"{records.MAX_COLUMNS_BYTES >> 20} MiB"
    assert limits["a tensor"] == f"2^{offer.MAX_TENSOR_BYTES.bit_length() - 1} bytes"
    assert limits["the tensors of a run"] == f"2^{grouping.MAX_MODEL_BYTES.bit_length() - 1} bytes"
    assert limits["axes"] == str(offer.MAX_AXES)
    assert limits["a group"] == f"{layout.MAX_GROUP_BYTES >> 20} MiB"
    assert limits["a payload"] == f"its group + {receipt.GROUP_OVERHEAD_BYTES} bytes"
    assert limits["ranks"] == f"{records.MAX_RANKS:,}"
    assert (limits["terms"], limits["versions"]) == ("10^8 - 1", "10^12 - 1")
    assert (MAX_TERM, records.MAX_VERSION) == (10**8 - 1, 10**12 - 1)


@pytest.mark.parametrize(
    "text",
    [
        f"{receipt.BLOCK_BYTES >> 20} MiB block",
        f"at most 2^{layout.MAX_SPANS.bit_length() - 1} combs",
        f"at most {MAX_RETIRED}",
        f"at most {manifest.MAX_CHAIN:,}",
        f"at most {manifest.OLDER_LINKS} links before",
        f"until {grouping.GROUP_BYTES >> 20} MiB are",
        f"boxes above {grouping.PIECE_BYTES >> 20} MiB",
        *(f"`{reason}`" for reason in get_args(AbortReason)),
    ],
)
def test_numbers_in_the_text_are_those_of_the_code(text: str) -> None:
    assert text in DOCUMENT


def test_magics_are_those_of_the_code() -> None:
    assert receipt.SHARD_MAGIC == b"WCSHARD\x01"
    assert records.pack(b"{}")[:8] == b"WCPACK\x01\x00"
    assert '`"WCSHARD" 0x01`' in DOCUMENT
    assert '`"WCPACK" 0x01 0x00`' in DOCUMENT
