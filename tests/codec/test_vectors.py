"""Promise: what any released version wrote, every later one reads.

The files are never written by a test; make_vectors.py says how they came to be and how one is added.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import codec
from codec import dtypes, header, methods, reference, reference_ulp, ulp
from tests.codec import kinds, several

FOLDER = Path(__file__).parent / "vectors"
MANIFEST = json.loads((FOLDER / "MANIFEST.json").read_text())

FRAMES = [n for n in MANIFEST if "frame" in n and "several" not in n]

SHAPES = {
    "v1-frame-full-f32": (40, 1, 30),
    "v1-frame-full-scalar": (),
    "v1-frame-full-empty": (0, 7),
    "v1-frame-stored-full-i32": (3, 1, 20),
    "v1-frame-stored-full-scalar": (),
    "v1-frame-stored-full-dims": (1,) * 24 + (3, 1, 1, 9, 1, 1, 2, 1),
}
"""Of the fulls."""


def load(name, suffix):
    info = dtypes.find(MANIFEST[name]["dtype"])
    path = FOLDER / f"{name}.{suffix}"
    return np.frombuffer(path.read_bytes(), info.bits) if path.name in MANIFEST[name]["files"] else None


def test_every_file_is_the_one_that_was_written():
    listed = {file: digest for entry in MANIFEST.values() for file, digest in entry["files"].items()}
    present = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in FOLDER.iterdir() if p.name != "MANIFEST.json"
    }
    assert present == listed


def test_every_method_has_vectors():
    covered = {(FOLDER / f"{n}.payload").read_bytes()[0] for n in MANIFEST if (FOLDER / f"{n}.payload").exists()}
    assert covered == set(methods.BY_ID)


def test_ulp_has_vectors_of_two_lanes_and_of_several_chunks():
    bodies = {n: (FOLDER / f"{n}.payload").read_bytes()[1:] for n in MANIFEST if n.startswith("v1-ulp-")}
    large = {n: body for n, body in bodies.items() if MANIFEST[n]["count"] > 2 * reference_ulp.SEGMENT}
    chunks = {n: -(-MANIFEST[n]["count"] // (1 << body[1])) for n, body in large.items()}
    assert 1 in chunks.values()
    assert [large[n][1] for n, number in chunks.items() if number > 2] == [12]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"])
def test_ulp_has_vectors_of_every_kind_of_event_and_value(dtype):
    found = sum((found_in(name) for name in MANIFEST if is_ulp(name, dtype)), Counter())
    assert set(found) == set(kinds.KINDS)
    assert min(found.values()) >= 5


def test_ulp_has_vectors_of_what_our_encoder_makes_of_each_kind():
    """The others are of an encoder that could be: ours makes no escapes of less than 8 bits of exponent."""
    by_ours = [name for name in MANIFEST if is_ulp(name) and not name.startswith(("v1-ulp-rare-", "v1-ulp-chunks"))]
    assert set(sum(map(found_in, by_ours), Counter())) == set(kinds.KINDS) - {"exponent below 0"}


def is_ulp(name, dtype=None):
    path = FOLDER / f"{name}.payload"
    return dtype in (None, MANIFEST[name]["dtype"]) and path.exists() and path.read_bytes()[0] == methods.ULP


@cache
def found_in(name):
    return kinds.kinds_of(load(name, "base"), (FOLDER / f"{name}.payload").read_bytes()[1:], MANIFEST[name]["dtype"])


def test_every_kind_of_frame_has_vectors():
    heads = [header.read((FOLDER / f"{n}.frame").read_bytes())[0] for n in FRAMES]
    assert {h.kind for h in heads} == {header.FULL, header.DELTA, header.STORED_FULL, header.STORED_DELTA}
    assert {header.BY_CHUNK + kind for kind in range(4)} == set(several.KINDS.values())


@pytest.mark.parametrize("name", [n for n in MANIFEST if n not in FRAMES and "several" not in n])
def test_payload(name):
    entry = MANIFEST[name]
    base, new = load(name, "base"), load(name, "new")
    payload = (FOLDER / f"{name}.payload").read_bytes()
    change = codec.decode_group(base, payload, entry["dtype"], entry["count"])
    assert change.digest == codec.digest(new)
    buffer = base.copy()
    codec.apply_change(buffer, change)
    assert np.array_equal(buffer, new)
    if payload[0] == methods.ULP:
        assert np.array_equal(reference_ulp.decode(base, payload[1:], kinds.fields(entry["dtype"])), new)
        assert ulp.decode(base, payload[1:], entry["dtype"], new.size, portable=True).digest == codec.digest(new)
    else:
        assert np.array_equal(reference.decode_payload(base, payload, entry["dtype"], entry["count"]), new)


@pytest.mark.parametrize("name", FRAMES)
def test_frame(name):
    base, new = load(name, "base"), load(name, "new")
    frame = (FOLDER / f"{name}.frame").read_bytes()
    if base is None:
        decoded = codec.decode_full(frame)
        assert np.array_equal(codec.to_bits(decoded), new)
        assert tuple(decoded.shape) == SHAPES[name]
    else:
        buffer = base.copy()
        codec.apply_delta(buffer, frame)
        assert np.array_equal(buffer, new)
    if frame[5] in (header.STORED_FULL, header.STORED_DELTA):
        dtype, shape, decoded = reference.decode_frame(base, frame)
        assert dtype == MANIFEST[name]["dtype"]
        assert shape == SHAPES.get(name, new.shape)
        assert np.array_equal(decoded, new)
        assert reference.encode_stored_frame(base, new, dtype, shape) == frame


@pytest.mark.parametrize("kind", several.KINDS)
def test_frame_of_several_chunks(kind):
    base, new = several.tensors(kind)
    kept = (FOLDER / f"v1-several-{kind}.frame").read_bytes()
    # Of a stored one what stands before the elements.
    frame = kept + new.tobytes() if kind.startswith("stored") else kept
    assert frame[5] == several.KINDS[kind]
    if base is None:
        assert np.array_equal(codec.decode_full(frame, container="numpy"), new)
    else:
        codec.apply_delta(buffer := base.copy(), frame)
        assert np.array_equal(buffer, new)
