"""Promise: whatever the bytes, ulp_v1 refuses them or its digest tells that the result is another; it never crashes."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import reference_ulp, reference_ulp_encoder, ulp
from codec.errors import CodecError, CorruptFrame, InvalidInput, TruncatedFrame, UnsupportedFrame
from tests.codec import kinds


@pytest.fixture(scope="module")
def small():
    """A body with both lanes, several classes, skips, and values of every kind: (base, new, body)."""
    rng = np.random.default_rng(7)
    base = (rng.normal(0, 0.02, 4400).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    base[:300:3] = rng.integers(0, 1 << 7, 100)
    new = base.copy()
    new[1:300:3] += np.uint16(1)
    new[:210:3] = base[1:211:3]
    new[[3700, 4000, 4097, 4200]] -= np.uint16(1)
    new[[30, 50, 4300]] = [0x0123, 0x3F80, 0x8000]
    body = ulp.encode_counted(base, new, "BF16").body
    assert set(kinds.kinds_of(base, body, "BF16")) == set(kinds.KINDS) - {"exponent below 0"}
    return base, new, body


def outcome(base, new, body, dtype="BF16"):
    """None if refused, True if the result is right, False if it is another; only a digest may tell the last two."""
    before = base.copy()
    base.flags.writeable = False
    try:
        change = ulp.decode(base, body, dtype, base.size)
    except (CorruptFrame, UnsupportedFrame):
        return None
    finally:
        base.flags.writeable = True
        assert np.array_equal(base, before)
    result = base.copy()
    codec.apply_change(result, change)
    assert change.digest == codec.digest(result)
    return bool(np.array_equal(result, new))


def test_every_truncation_is_refused(small):
    base, new, body = small
    assert outcome(base, new, body) is True
    assert [outcome(base, new, body[:size]) for size in range(len(body))] == [None] * len(body)


def test_every_bit_flip_is_refused_or_gives_another_digest(small):
    base, new, body = small
    refused = 0
    for at in range(len(body)):
        for bit in range(8):
            bad = bytearray(body)
            bad[at] ^= 1 << bit
            refused += outcome(base, new, bytes(bad)) is None
    # States must come back to where the encoder began, so little is left to the digest: another chunk size or the
    # hazard of a class without weights changes nothing; raw bits, here a sixth, and directions change the result.
    assert refused > 0.75 * 8 * len(body)


def steps(rest, **frequency):
    """A model of steps of two and of three; frequencies by symbol."""
    model = reference_ulp.ValueModel(mode=0, rest=rest)
    for symbol, width in {"s1": 2048, "s2": 1024, **frequency}.items():
        model.frequency[int(symbol[1:])] = width
    return model


def exponents(top):
    """A model of exponents below ``top`` for weights whose exponent is 11."""
    symbol = 2 * (top - 11)
    model = reference_ulp.ValueModel(mode=1, top=top, rest=symbol)
    model.frequency[symbol] = 4096
    return model


USUAL = steps(0, s0=1024)
CODES = [80] * reference_ulp.CLASSES
# Where a chunk's head has a byte of its own: behind the number of changes, with a hazard for each class.
LOW_AND_HIGH, LAST_SYMBOL = 2, 3 + reference_ulp.CLASSES


def written(values):
    writer = reference_ulp_encoder.Writer()
    reference_ulp_encoder.write_model(writer, reference_ulp.Model(kinds.fields("F16"), 0, CODES, [values]))
    return bytes(writer.data)


def put(chunk, at, *data, instead_of=1):
    return chunk[:at] + bytes(data) + chunk[at + instead_of :]


def as_it_is(chunk):
    return chunk


MODELS = {
    "as usual": (True, 0, CODES, USUAL, as_it_is),
    "the highest exponent": (True, 31, CODES, USUAL, as_it_is),
    "an exponent that is none": (False, 40, CODES, USUAL, as_it_is),
    "the highest hazard": (True, 0, [175, *CODES[1:]], USUAL, as_it_is),
    "a hazard that is none": (False, 0, [200, *CODES[1:]], USUAL, as_it_is),
    "no hazard in the first class": (False, 0, [0, *CODES[1:]], USUAL, lambda chunk: put(chunk, LOW_AND_HIGH, 0xF0, 0)),
    "no hazard in the last class": (
        False,
        0,
        [*CODES[1:], 0],
        USUAL,
        lambda chunk: put(put(chunk, LOW_AND_HIGH, 0xF0), 18, 0, instead_of=0),
    ),
    "the highest top": (True, 0, CODES, exponents(31), as_it_is),
    "a top that is no exponent": (False, 0, CODES, exponents(40), as_it_is),
    "the last step": (True, 0, CODES, steps(0, s0=1022, s123=2), as_it_is),
    "an escape among steps": (False, 0, CODES, steps(0, s0=1022, s124=2), as_it_is),
    "a rest at the end": (True, 0, CODES, steps(3, s3=1024), as_it_is),
    "a rest behind the end": (False, 0, CODES, steps(3, s3=1024), lambda chunk: put(chunk, LAST_SYMBOL, 2 << 1)),
    "nothing left for the rest": (False, 0, CODES, steps(0, s2=2048), as_it_is),
    "a longer varint": (False, 0, CODES, USUAL, lambda chunk: put(chunk, 0, chunk[0] | 128, 0)),
    "bits behind the model": (
        False,
        0,
        CODES,
        USUAL,
        lambda chunk: put(chunk, len(written(USUAL)), written(USUAL)[-1] | 128),
    ),
}


@pytest.mark.parametrize(("allowed", "lowest", "code", "values", "alter"), MODELS.values(), ids=MODELS)
def test_a_model_that_the_page_does_not_allow_is_refused(allowed, lowest, code, values, alter):
    """Although it could be read, and every weight would come out right: one model has one form."""
    base = np.full(100, 0x2C00, np.uint16)
    new = base + np.resize(np.array([0, 2, 3], np.uint16), 100)
    model = reference_ulp.Model(kinds.fields("F16"), lowest, code, [values])
    chunk = reference_ulp_encoder.write_chunk(base.tolist(), new.tolist(), model)
    body = reference_ulp_encoder.join_chunks(24, [alter(chunk)])
    assert (outcome(base, new, body, "F16") is True) == allowed
    if allowed:
        assert np.array_equal(reference_ulp.decode(base, body, model.fields), new)
    else:
        with pytest.raises(CorruptFrame, match=r"range|no rest|longer|not zero"):
            reference_ulp.decode(base, body, model.fields)


def test_bytes_behind_the_end_are_refused(small):
    base, new, body = small
    for more in (b"\0", b"\0" * 4, b"\0" * 8, body):
        assert outcome(base, new, body + more) is None


def test_another_base_is_refused_or_gives_another_digest(small):
    base, new, body = small
    other = base.copy()
    other[1000:1500] ^= np.uint16(1 << 9)
    assert outcome(other, new, body) in (None, False)


def test_a_longer_or_shorter_base_is_refused(small):
    base, _, body = small
    with pytest.raises(InvalidInput):
        ulp.decode(base[:-1], body, "BF16", base.size)
    with pytest.raises(CodecError):
        ulp.decode(base[:4096], body, "BF16", 4096)


def test_versions_flags_and_chunk_sizes():
    base = np.zeros(10, np.uint16)
    for first in range(1, 256):
        with pytest.raises(UnsupportedFrame):
            ulp.decode(base, bytes([first, 24, 0]), "BF16", 10)
    for log in (0, 11, 25, 64, 255):
        with pytest.raises(CorruptFrame):
            ulp.decode(base, bytes([0, log, 0]), "BF16", 10)
    assert ulp.decode(base, bytes([0, 24, 0]), "BF16", 10).index.size == 0


@pytest.mark.parametrize("dtype", ["I16", "F64", "F4"])
def test_a_payload_of_a_dtype_that_it_does_not_code_is_the_payloads_fault(dtype):
    base = np.zeros(10, codec.dtypes.find(dtype).bits)
    with pytest.raises(CorruptFrame, match=dtype):
        codec.decode_group(base, bytes([4, 0, 24, 0]), dtype, 10)


def test_claims_beyond_the_body_take_no_memory():
    """A chunk cannot have more changes than weights, a body not more chunks than bytes, a stream not more words."""
    base = np.zeros(1 << 20, np.uint8)
    huge = b"\xff" * 8 + b"\x7f"
    for body in (b"\0\x18" + huge, b"\0\x18\1" + huge, b"\0\x0c" + huge * 3):
        with pytest.raises(CorruptFrame):
            ulp.decode(base, body, "F8_E4M3", base.size)
    with pytest.raises(TruncatedFrame):
        ulp.decode(base, b"\0\x0c\1\1", "F8_E4M3", base.size)


@given(tail=st.binary(max_size=200), count=st.integers(0, 9000))
def test_any_bytes(tail, count):
    base = np.full(count, 0x3C00, np.uint16)
    for body in (tail, b"\0\x18" + tail, b"\0\x18\2" + tail, b"\0\x18\2\0" + tail):
        try:
            change = ulp.decode(base, body, "BF16", count)
        except CodecError:
            continue
        assert np.array_equal(
            reference_ulp.decode(base, body, reference_ulp.Fields(16, 8, 7))[change.index], change.bits
        )


def output(*command):
    run = subprocess.run(
        command,
        timeout=200,
        capture_output=True,
        text=True,
        env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_under_sanitizers(sanitized):
    """Bodies of ours and of other encoders, whole and damaged, under AddressSanitizer and UBSan.

    Arrays are blocks of exactly their size. Three cases are so large that our encoder makes several chunks.
    """
    assert output(sanitized / "hostile", "1", "200") == "8280 bodies\n"


def test_the_fuzzers_target_under_sanitizers(sanitized, tmp_path):
    """Its seeds are accepted, and what is damaged is refused or decodes alike; guided runs are ``make fuzz``."""
    assert int(output(sanitized / "fuzz_ulp").removesuffix(" inputs\n")) > 2000
    finding = tmp_path / "finding"
    finding.write_bytes(bytes(40))
    assert output(sanitized / "fuzz_ulp", finding) == "1 inputs\n"
