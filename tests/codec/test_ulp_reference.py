"""Promise: the native ulp_v1, its portable kernels and the reference written from FORMAT-ulp.md give the same bytes."""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import codec
from codec import dtypes, reference_ulp, reference_ulp_encoder, ulp
from tests.codec.kinds import fields

FLOATS = tuple(d.name for d in dtypes.DTYPES if ulp.applies_to(d.name))
PAGE = (Path(codec.__file__).parent / "FORMAT-ulp.md").read_text()


def check(dtype, base, new):
    """All encoders give one body, all decoders one result."""
    coded = ulp.encode_counted(base, new, dtype)
    assert coded == ulp.encode_counted(base, new, dtype, portable=True)
    assert coded.changed == np.count_nonzero(base != new)
    assert coded.body == reference_ulp_encoder.encode(base, new, fields(dtype))
    assert np.array_equal(reference_ulp.decode(base, coded.body, fields(dtype)), new)
    check_decoders(dtype, base, new, coded.body)


def check_decoders(dtype, base, new, body):
    for portable in (False, True):
        change = ulp.decode(base, body, dtype, base.size, portable=portable)
        assert change.digest == codec.digest(new)
        assert np.array_equal(change.index, np.flatnonzero(base != new))
        assert np.array_equal(change.bits, new[change.index])


def weights(dtype, count, rng):
    """Weights 0.02 wide in a float dtype, by way of the float that holds it."""
    values = rng.normal(0, 0.02, count)
    wide = {"BF16": np.float32, "F16": np.float16, "F32": np.float32}.get(dtype, np.float16)
    bits = values.astype(wide).view(f"u{np.dtype(wide).itemsize}")
    info = dtypes.find(dtype)
    return (bits >> 8 * (bits.itemsize - info.item_bytes)).astype(info.bits)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_pair(data, pairs, dtype):
    pair = data.draw(pairs(names=(dtype,)))
    check(dtype, pair.base, pair.new)


@pytest.mark.parametrize(
    ("dtype", "count", "share"),
    [("BF16", count, share) for count in (255, 256, 257, 4095, 4096, 4097, 8200) for share in (0.003, 0.2)]
    + [("F32", 4097, 0.05), ("F8_E4M3", 8193, 0.05), ("F16", 4100, 1), ("BF16", 12300, 0.05)],
)
def test_across_blocks_segments_and_lanes(dtype, count, share):
    rng = np.random.default_rng(count)
    base = weights(dtype, count, rng)
    new = base.copy()
    where = np.flatnonzero(rng.random(count) < share)
    new[where] += rng.choice([1, 1, 1, -1, 7, 300], where.size).astype(np.int64).astype(new.dtype)
    check(dtype, base, new)


def test_weights_that_an_update_replaces():
    """Small weights under large updates: mode exponent, escapes, wide steps."""
    rng = np.random.default_rng(1)
    base = weights("BF16", 3000, rng)
    base[::3] = rng.integers(0, 40 << 7, 1000)
    base[1::30] = 0
    new = base.copy()
    new[::3] = weights("BF16", 1000, rng)
    new[1::30] ^= np.uint16(0x8000)
    new[:4] = [0x7FC1, 0xFF80, 0x0001, 0x8000]
    check("BF16", base, new)


def test_a_sampled_chunk():
    """Above 2^19 weights the model comes from a sample, and classes that it missed must still be codable."""
    rng = np.random.default_rng(2)
    base = weights("F8_E5M2", (1 << 19) + 777, rng)
    new = base.copy()
    new[300:500:7] += np.uint8(1)
    body = ulp.encode_counted(base, new, "F8_E5M2").body
    assert body == ulp.encode_counted(base, new, "F8_E5M2", portable=True).body
    assert body == reference_ulp_encoder.encode(base, new, fields("F8_E5M2"))
    check_decoders("F8_E5M2", base, new, body)


@pytest.mark.parametrize("chunk_log2", [12, 13, 16])
def test_chunks_of_any_size_are_read(chunk_log2):
    rng = np.random.default_rng(3)
    base = weights("BF16", 30000, rng)
    new = base.copy()
    new[rng.random(30000) < 0.01] -= np.uint16(1)
    body = reference_ulp_encoder.encode(base, new, fields("BF16"), chunk_log2=chunk_log2)
    check_decoders("BF16", base, new, body)
    assert np.array_equal(reference_ulp.decode(base, body, fields("BF16")), new)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(4))
def test_models_that_our_encoder_does_not_choose_are_read(dtype, seed):
    """Also those whose ``top`` puts exponents below 0: written with another, read by the reference."""
    rng, f = np.random.default_rng(seed), fields(dtype)
    base = weights(dtype, 700 if seed else 4500, rng)
    new = base.copy()
    where = np.flatnonzero(rng.random(base.size) < 0.1)
    new[where] ^= rng.integers(1, 1 << min(f.width, 16), where.size).astype(new.dtype)
    model = drawn_model(f, rng)
    body = reference_ulp_encoder.join_chunks(
        24, [reference_ulp_encoder.write_chunk(base.tolist(), new.tolist(), model)]
    )
    assert np.array_equal(reference_ulp.decode(base, body, f), new)
    check_decoders(dtype, base, new, body)
    header = written(model)
    for value in model.values:
        value.top = int(rng.integers(1 << f.exponent)) if value.mode else 0
    assert body.count(header) == 1
    other = body.replace(header, written(model))
    check_decoders(dtype, base, reference_ulp.decode(base, other, f), other)


def drawn_model(f, rng):
    """A hazard for every class, and value models of both modes in which every symbol has a frequency."""
    model = reference_ulp.Model(f, lowest=int(rng.integers(1 << f.exponent)))
    model.code = rng.integers(1, reference_ulp.CODES, reference_ulp.CLASSES).tolist()
    model.value_of = [c // 6 for c in range(reference_ulp.CLASSES)]
    for _ in range(model.value_of[-1] + 1):
        mode = int(rng.integers(2))
        last = reference_ulp.SYMBOLS - 1 if mode else reference_ulp.SYMBOLS - 2
        frequency = [*rng.integers(1, 16, last + 1).tolist(), *[0] * (1 - mode)]
        rest = int(rng.integers(last + 1))
        frequency[rest] += (1 << reference_ulp.TOTAL_BITS) - sum(frequency)
        top = int(rng.integers(1 << f.exponent)) if mode else 0
        model.values.append(reference_ulp.ValueModel(mode, top, rest, frequency))
    return model


def written(model):
    writer = reference_ulp_encoder.Writer()
    reference_ulp_encoder.write_model(writer, model)
    return bytes(writer.data)


def test_several_native_chunks():
    rng = np.random.default_rng(4)
    count = (1 << 22) + 5000
    base = rng.integers(0, 256, count, dtype=np.uint8)
    new = base ^ (rng.random(count) < 0.04).astype(np.uint8)
    body = ulp.encode_counted(base, new, "F8_E4M3").body
    assert body[1] == 22
    assert body == ulp.encode_counted(base, new, "F8_E4M3", portable=True).body
    check_decoders("F8_E4M3", base, new, body)


def test_tables_are_what_the_page_says():
    with localcontext(prec=60):
        exact = {bits: [int(Decimal(2) ** (31 - Decimal(i) / 2**bits)) for i in range(1024)] for bits in (10, 20)}
    for bits, table in exact.items():
        assert [reference_ulp.power(i, bits) for i in range(1024)] == table
    for name, i, value in re.findall(r"([AB])\[(1|1023)\] = (\d+)", PAGE):
        assert exact[10 if name == "A" else 20][int(i)] == int(value)


def test_survival_falls_strictly():
    """Every hazard has a width, however long the stretch before it."""
    near = [*range(3000), *range(reference_ulp.LIMIT - 3000, reference_ulp.LIMIT + 1)]
    edges = [x for step in range(1, 8 << 10) for x in (1024 * step - 1, 1024 * step)]
    for xs in (near[:3000], near[3000:], edges):
        assert all(reference_ulp.survival(a) > reference_ulp.survival(b) for a, b in pairwise(xs))
    assert reference_ulp.survival(0) == 1 << 29
    assert reference_ulp.survival(reference_ulp.LIMIT) == 1 << 21


def test_worked_example():
    base = np.array([0x3F80] * 12 + [0x3C00] * 12, np.uint16)
    new = base.copy()
    new[13], new[20] = 0x3C01, 0x3BFF
    shown = bytes.fromhex(re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL).group(1))
    assert ulp.encode_counted(base, new, "BF16").body == shown
    assert np.array_equal(reference_ulp.decode(base, shown, fields("BF16")), new)
