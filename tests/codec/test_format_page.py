"""Promise: FORMAT.md describes the bytes that are written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import codec
from codec import dtypes, header, methods, streams

PAGE = (Path(codec.__file__).parent / "FORMAT.md").read_text()


def table(first_cells):
    """Rows of the table whose heading is ``first_cells``, as lists of cells."""
    heading = "| " + " | ".join(first_cells) + " |\n"
    lines = PAGE.split(heading)[1].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_element_types():
    rows = table(["code", "name", "bytes", "exponent bits", "mantissa bits"])
    stated = [(name, *map(int, (code, size, exponent, mantissa))) for code, name, size, exponent, mantissa in rows]
    assert stated == [(d.name, d.code, d.item_bytes, d.exponent_bits, d.mantissa_bits) for d in dtypes.DTYPES]


def test_methods():
    rows = [row for row in table(["method", "name", "needs the base", "body"]) if row[0].isdigit()]
    stated = {int(number): (name, needs == "yes") for number, name, needs, _ in rows}
    built = {m.id: (m.name, m.needs_base) for m in methods.METHODS}
    assert built.items() <= stated.items()


def test_compressors_and_their_ratios():
    rows = [row for row in table(["compressor", "stored bytes"]) if row[0].isdigit()]
    assert [int(row[0]) for row in rows] == [streams.STORED, streams.ZSTD, streams.DEFLATE, streams.BZIP2]
    stated = re.search(r"1 byte a byte for compressor 0, (\d+) for 1, (\d+) for 2", PAGE)
    assert tuple(map(int, stated.groups())) == (streams._MAX_RATIO[streams.ZSTD], streams._MAX_RATIO[streams.DEFLATE])


def test_frame_offsets():
    rows = table(["offset", "size", "field", "value"])
    fixed = [(int(offset), int(size), field) for offset, size, field, _ in rows if offset.isdigit()]
    sizes = [size for _, size, _ in fixed]
    assert [offset for offset, _, _ in fixed] == [sum(sizes[:i]) for i in range(len(sizes))]
    check_at = next(offset for offset, _, field in fixed if field == "check")
    assert check_at == header.PREAMBLE.size
    assert {field: size for _, size, field in fixed}["check"] == header.CHECK.size
    assert bytes.fromhex(rows[0][3][:11]) == header.MAGIC
    assert rows[1][3] == str(header.FORMAT_VERSION)


def test_kinds_of_frames():
    (kinds,) = [value for _, _, field, value in table(["offset", "size", "field", "value"]) if field == "kind"]
    stated = {name: int(number) for number, name in re.findall(r"(\d) ([a-z ]+)", kinds.split("; from")[0])}
    assert stated == {
        "full": header.FULL,
        "delta": header.DELTA,
        "stored full": header.STORED_FULL,
        "stored delta": header.STORED_DELTA,
        "more": header.BY_CHUNK,
    }


def test_limits():
    assert "at most 2^42" in PAGE
    assert header.MAX_FRAME_ELEMENTS == 2**42
    assert "Chunks are 2^24 elements" in PAGE
    assert header.CHUNK_N == 2**24
    assert f"number of dimensions, at most {header.MAX_DIMS}" in PAGE
    assert codec.MAX_ELEMENTS == 2**31 - 1


def test_worked_example():
    base = np.full(32, 0x3F80, np.uint16)
    new = base.copy()
    new[[3, 20, 31]] = 0x3F81, 0x3F7F, 0x3F82
    (example,) = re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)[:1]
    frame = bytes.fromhex(example)
    assert codec.encode_delta(base, new, method="fields_v1", dtype="BF16") == frame
    codec.apply_delta(base, frame)
    assert np.array_equal(base, new)


@pytest.mark.parametrize(
    ("value", "written"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**63 - 1, "ff" * 8 + "7f")]
)
def test_varint(value, written):
    assert streams.varint(value).hex() == written
    assert streams.Reader(memoryview(bytes.fromhex(written))).varint(2**63) == value
