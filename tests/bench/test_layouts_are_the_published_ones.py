"""The layouts of other projects are written byte for byte as published, and they round-trip."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from safetensors.torch import load

from weightcast.measure import layouts
from weightcast.measure.coders import LAYOUTS, Delta
from weightcast.measure.pairs import Pair, groups

SHAPES = [(1,), (700,), (30, 50), (3, 4, 5), (2, 70_000), (100_000, 1), ()]


def _pair_of(name: str, shape: tuple[int, ...], changes: dict[int, int]) -> Pair:
    base = np.zeros(int(np.prod(shape)), np.uint16)
    new = base.copy()
    for at, bits in changes.items():
        new[at] = bits
    return Pair(name, "BF16", shape, base, new)


@pytest.mark.parametrize("coder", LAYOUTS, ids=lambda coder: coder.name)
@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_every_layout_gives_back_the_new_bits(coder: layouts.Any, share: float, make_pair: Callable[..., Pair]) -> None:
    pairs = [
        make_pair(f"t{i}", shape, int(share * np.prod(shape, dtype=int)), seed=i) for i, shape in enumerate(SHAPES)
    ]
    delta = Delta(pairs, groups(pairs))
    coded = coder.encode(delta, coder.before_encode(delta))
    decoded = coder.decode(delta, coded, coder.before_decode(delta))
    assert all(np.array_equal(new, found) for new, found in coder.decoded(delta, decoded))


def test_pulsesync_is_one_zstd_frame_of_header_gaps_and_absolute_values() -> None:
    # (row, column): (0, 2), (0, 5), (2, 1), (2, 3); then a vector, where each element is a row of its own
    matrix = _pair_of("m", (3, 10), {2: 0x3F80, 5: 0x4000, 21: 0xBF80, 23: 1})
    vector = _pair_of("v", (5,), {1: 7, 4: 8})
    unchanged = _pair_of("u", (5,), {})
    plain = zstandard.ZstdDecompressor().decompress(layouts.pulsesync_encode([vector, unchanged, matrix]))
    (size,) = struct.unpack_from("<I", plain)
    header = json.loads(plain[4 : 4 + size])
    assert plain[4 : 4 + size] == json.dumps(header, separators=(",", ":")).encode()
    assert header["version"] == 31
    assert header["tensors"] == [
        {
            "name": "m",
            "shape": [3, 10],
            "num_nonzero": 4,
            "value_dtype": "bfloat16",
            "row_dtype": "uint8",
            "col_dtype": "uint16",
            "indices_offset": 0,
            "indices_size": 12,
            "rows_size": 4,
            "cols_size": 8,
            "values_offset": 12,
            "values_size": 8,
        },
        {
            "name": "v",
            "shape": [5],
            "num_nonzero": 2,
            "value_dtype": "bfloat16",
            "row_dtype": "uint8",
            "col_dtype": "uint16",
            "indices_offset": 20,
            "indices_size": 6,
            "rows_size": 2,
            "cols_size": 4,
            "values_offset": 26,
            "values_size": 4,
        },
    ]
    assert plain[4 + size :] == bytes.fromhex(
        "00 00 02 00"  # row gaps
        "0200 0300 0100 0200"  # column gaps: absolute where the row is new
        "803f 0040 80bf 0100"
        "01 03"
        "0000 0000"
        "0700 0800"
    )


def test_pulsesync_takes_wider_gaps_where_it_must() -> None:
    wide = _pair_of("w", (2, 70_000), {69_999: 1})
    tall = _pair_of("t", (70_000,), {300: 1, 69_000: 2})
    plain = zstandard.ZstdDecompressor().decompress(layouts.pulsesync_encode([wide, tall]))
    (size,) = struct.unpack_from("<I", plain)
    tall_header, wide_header = json.loads(plain[4 : 4 + size])["tensors"]
    assert (wide_header["row_dtype"], wide_header["col_dtype"]) == ("uint8", "int32")
    assert (tall_header["row_dtype"], tall_header["col_dtype"]) == ("int32", "uint16")


def test_the_trl_draft_is_a_safetensors_file_of_positions_and_values() -> None:
    blob = layouts.trl_encode([_pair_of("m", (3, 10), {2: 0x3F80, 21: 0xBF80}), _pair_of("u", (5,), {})], step=9)
    tensors = load(blob)
    assert {name: (str(t.dtype), t.tolist()) for name, t in tensors.items()} == {
        "m.indices": ("torch.int32", [2, 21]),
        "m.values": ("torch.bfloat16", [1.0, -1.0]),
    }
    (size,) = struct.unpack_from("<Q", blob)
    about = json.loads(blob[8 : 8 + size])["__metadata__"]
    assert about.pop("sparsity") == str(1 - 2 / 35)
    assert about == {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": "9",
        "num_changed_params": "1",
        "total_changed_elements": "2",
        "total_elements": "35",
        "changed_params": '["m"]',
    }
    assert len(blob) - 8 - size == 2 * layouts.TRL_BITS_PER_CHANGE // 8
