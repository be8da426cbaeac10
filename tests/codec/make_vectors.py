"""Writes the golden vectors: ``python -m tests.codec.make_vectors NAME...`` adds those, and leaves existing ones alone.

``--replace NAME...`` is for a method whose format has not been released yet, and for nothing else.
A vector is what some version wrote once; later versions must read it for ever. So no test runs any of this, and a
format change gets a new name with its version. Files of a vector: NAME.base and NAME.new (raw bits; no base for a
full) and NAME.payload (a group) or NAME.frame. MANIFEST.json tells dtype and count, and the SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import codec
import codec.methods
from codec import dtypes, reference, reference_ulp, reference_ulp_encoder
from tests.codec import kinds, several

FOLDER = Path(__file__).parent / "vectors"
MANIFEST = FOLDER / "MANIFEST.json"
Bits = dtypes.Bits


def weights(dtype: str, count: int, seed: int) -> Bits:
    """Something like weights: normal, 0.02 wide, in the bits of ``dtype``; with the odd NaN, infinity, -0."""
    info = dtypes.find(dtype)
    rng = np.random.default_rng(seed)
    if not info.is_float or info.item_bytes == 1:
        return rng.binomial(2 ** (8 * min(info.item_bytes, 4)) - 1, 0.5, count).astype(info.bits)
    values = rng.normal(0, 0.02, count)
    if dtype == "BF16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = values.astype({2: np.float16, 4: np.float32, 8: np.float64}[info.item_bytes]).view(info.bits)
    top = 1 << 8 * info.item_bytes - 1
    exponent = ((1 << info.exponent_bits) - 1) << info.mantissa_bits
    bits[:6] = [top, exponent, exponent | top, exponent | 5, 1, top | 1]
    return bits


def moved(base: Bits, share: float, seed: int) -> Bits:
    """Some elements a step or a few on, a few somewhere else."""
    rng = np.random.default_rng(seed)
    new = base.copy()
    where = np.flatnonzero(rng.random(base.size) < share)
    new[where] += rng.choice([1, 1, 1, 2, 3], where.size).astype(base.dtype)
    new[where[::2]] -= np.array(4, base.dtype)
    new[where[:2]] ^= np.array(1 << 8 * base.itemsize - 1, base.dtype)
    return new


def group(dtype: str, method: str, count: int = 1500, share: float = 0.02) -> Callable[[], dict[str, object]]:
    def make() -> dict[str, object]:
        base = weights(dtype, count, 1)
        new = base if method == "same" else moved(base, share, 2)
        payload = codec.encode_group(base, new, dtype, method=method).payload
        assert codec.methods.find_id(payload[0]).name == method, "too small for this method to pay"
        return {"dtype": dtype, "base": base, "new": new, "payload": payload}

    return make


def streams(method: int, compressor: int) -> Callable[[], dict[str, object]]:
    def make() -> dict[str, object]:
        base = weights("BF16", 500, 3)
        new = moved(base, 0.1, 4)
        payload = reference.encode_payload(base, new, "BF16", method, compressor)
        return {"dtype": "BF16", "base": base, "new": new, "payload": payload}

    return make


def overtaken(count: int, chunk_log2: int | None = None, dtype: str = "BF16") -> Callable[[], dict[str, object]]:
    """A third of the weights is tiny, and a third of those is replaced: ulp_v1 with all its modes, in several segments.

    With ``chunk_log2`` in such chunks, which only the reference makes, the second of them unchanged.
    """

    def make() -> dict[str, object]:
        base = weights(dtype, count, 7)
        tiny = 40 << dtypes.find(dtype).mantissa_bits
        base[6::3] = np.random.default_rng(8).integers(0, tiny, base[6::3].size)
        new = moved(base, 0.02, 9)
        new[6::9] = weights(dtype, count, 10)[6::9]
        if chunk_log2 is None:
            payload = codec.encode_group(base, new, dtype, method="ulp_v1").payload
        else:
            new[1 << chunk_log2 : 2 << chunk_log2] = base[1 << chunk_log2 : 2 << chunk_log2]
            body = reference_ulp_encoder.encode(base, new, kinds.fields(dtype), chunk_log2=chunk_log2)
            payload = bytes([codec.methods.ULP]) + body
        assert payload[0] == codec.methods.ULP
        return {"dtype": dtype, "base": base, "new": new, "payload": payload}

    return make


def skips(count: int) -> Callable[[], dict[str, object]]:
    """Changes in some places and none for long between them, in both lanes."""

    def make() -> dict[str, object]:
        base = weights("BF16", count, 12)
        new = moved(base, 0.3, 13)
        still = np.arange(count) % 5000 > 400
        new[still] = base[still]
        payload = codec.encode_group(base, new, "BF16", method="ulp_v1").payload
        assert kinds.kinds_of(base, payload[1:], "BF16")["skip"] > 20
        return {"dtype": "BF16", "base": base, "new": new, "payload": payload}

    return make


def rare(dtype: str) -> Callable[[], dict[str, object]]:
    """Whatever a body may hold, by a model and in chunks that our encoder does not choose.

    The second chunk's model names another ``top`` than it was written with, so that exponents lie below 0.
    """

    def make() -> dict[str, object]:
        f, rng, count = kinds.fields(dtype), np.random.default_rng(14), 5600
        tiny, usual = (1 << f.exponent) * 5 // 32, (1 << f.exponent) // 2
        most = np.where(
            np.arange(count) % 3, usual - np.minimum(rng.geometric(0.5, count), 4), rng.integers(0, tiny, count)
        )
        rest = rng.integers(0, 2, count) << f.width - 1 | rng.integers(0, 1 << f.mantissa, count)
        base = (most << f.mantissa | rest).astype(dtypes.find(dtype).bits)
        new = base.copy()
        at = np.flatnonzero((rng.random(count) < 0.3) & (np.arange(count) % 4096 < 500))
        new[at] += np.array([1, 2, 40, 3], base.dtype)[np.arange(at.size) % 4]
        small = at[most[at] < tiny]
        new[small] = base[rng.permutation(np.flatnonzero(most >= tiny))[: small.size]]
        new[[4090, 5599]] ^= np.array(1 << f.width - 1, base.dtype)
        model = reference_ulp.Model(f, lowest=tiny, code=[130] + [112] * 15, value_of=[0] + [1] * 15)
        model.values = [_every_symbol(1, top=usual - 2), _every_symbol(0)]
        chunks = [
            reference_ulp_encoder.write_chunk(base[i : i + 4096].tolist(), new[i : i + 4096].tolist(), model)
            for i in (0, 4096)
        ]
        headers = []
        for top in (usual - 2, 1):
            model.values[0].top = top
            reference_ulp_encoder.write_model(writer := reference_ulp_encoder.Writer(), model)
            headers.append(bytes(writer.data))
        assert chunks[1].count(headers[0]) == 1
        body = reference_ulp_encoder.join_chunks(12, [chunks[0], chunks[1].replace(*headers)])
        assert set(kinds.kinds_of(base, body, dtype)) == set(kinds.KINDS)
        new = reference_ulp.decode(base, body, f)
        return {"dtype": dtype, "base": base, "new": new, "payload": bytes([codec.methods.ULP]) + body}

    return make


def _every_symbol(mode: int, top: int = 0) -> reference_ulp.ValueModel:
    last = reference_ulp.SYMBOLS - 1 if mode else reference_ulp.SYMBOLS - 2
    frequency = [1 + 7 * s % 15 if s <= last else 0 for s in range(reference_ulp.SYMBOLS)]
    rest = 3
    frequency[rest] = (1 << reference_ulp.TOTAL_BITS) - sum(frequency) + frequency[rest]
    return reference_ulp.ValueModel(mode, top, rest, frequency)


def frame(dtype: str, full: bool, shape: tuple[int, ...]) -> Callable[[], dict[str, object]]:
    def make() -> dict[str, object]:
        base = weights(dtype, max(int(np.prod(shape)), 6), 5)[: int(np.prod(shape))]
        new = moved(base, 0.05, 6)
        if full:
            return {"dtype": dtype, "new": new, "frame": codec.encode_full(new.reshape(shape), dtype=dtype)}
        delta = codec.encode_delta(base, new, dtype=dtype)
        return {"dtype": dtype, "base": base, "new": new, "frame": delta}

    return make


def stored(dtype: str, full: bool, shape: tuple[int, ...]) -> Callable[[], dict[str, object]]:
    """A frame of what nothing makes smaller."""

    def make() -> dict[str, object]:
        info, rng = dtypes.find(dtype), np.random.default_rng(11)
        size = int(np.prod(shape)) * info.item_bytes
        base, new = (np.frombuffer(rng.bytes(size), info.bits) for _ in range(2))
        if full:
            made = {"dtype": dtype, "new": new, "frame": codec.encode_full(new.reshape(shape), dtype=dtype)}
        else:
            made = {"dtype": dtype, "base": base, "new": new, "frame": codec.encode_delta(base, new, dtype=dtype)}
        assert made["frame"][5] == (2 if full else 3)
        return made

    return make


def of_several_chunks(kind: str) -> Callable[[], dict[str, object]]:
    """A frame alone, of a stored one what stands before its elements: a formula makes the tensors."""

    def make() -> dict[str, object]:
        base, new = several.tensors(kind)
        frame = codec.encode_full(new) if base is None else codec.encode_delta(base, new)
        assert frame[5] == several.KINDS[kind]
        return {"dtype": "U8", "count": new.size, "frame": frame[: -new.size] if "stored" in kind else frame}

    return make


VECTORS: dict[str, Callable[[], dict[str, object]]] = {
    "v1-same": group("BF16", "same"),
    "v1-raw": group("U8", "raw", count=40, share=1.0),
    **{f"v1-planes-{d.lower()}": group(d, "planes") for d in ("BF16", "F16", "F32", "F64", "I32")},
    **{f"v1-fields-{d.lower()}": group(d, "fields_v1") for d in ("BF16", "F16", "F32", "F64", "F8_E4M3", "I8", "U64")},
    **{f"v1-ulp-{d.lower()}": group(d, "ulp_v1") for d in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")},
    "v1-ulp-lanes": overtaken(10_000),
    "v1-ulp-chunks": overtaken(10_000, chunk_log2=12),
    "v1-ulp-overtaken-f32": overtaken(3000, dtype="F32"),
    "v1-ulp-skips": skips(12_500),
    **{f"v1-ulp-rare-{d.lower()}": rare(d) for d in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")},
    **{f"v1-xor-{d.lower()}": group(d, "xor_planes", share=0.3) for d in ("BF16", "F8_E5M2", "I64", "F4")},
    **{f"v1-fields-compressor-{c}": streams(3, c) for c in range(4)},
    **{f"v1-planes-compressor-{c}": streams(2, c) for c in range(4)},
    **{f"v1-xor-compressor-{c}": streams(5, c) for c in range(4)},
    "v1-frame-delta-bf16": frame("BF16", False, (40, 30)),
    "v1-frame-full-f32": frame("F32", True, (40, 1, 30)),
    "v1-frame-full-scalar": frame("BF16", True, ()),
    "v1-frame-full-empty": frame("BF16", True, (0, 7)),
    "v1-frame-delta-empty": frame("F16", False, (0,)),
    "v1-frame-stored-delta-bf16": stored("BF16", False, (300,)),
    "v1-frame-stored-delta-f4": stored("F4", False, (65,)),
    "v1-frame-stored-full-i32": stored("I32", True, (3, 1, 20)),
    "v1-frame-stored-full-scalar": stored("F32", True, ()),
    "v1-frame-stored-full-dims": stored("U8", True, (1,) * 24 + (3, 1, 1, 9, 1, 1, 2, 1)),
    **{f"v1-several-{kind}": of_several_chunks(kind) for kind in several.KINDS},
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    manifest = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}
    replace = names[:1] == ["--replace"]
    if replace and len(names) == 1:
        sys.exit("--replace wants the names of the vectors to replace")
    for name in names[1:] if replace else names or VECTORS:
        if name in manifest and not replace:
            print(f"{name}: is there already, left alone")
            continue
        made = VECTORS[name]()
        entry = {
            "dtype": made.pop("dtype"),
            "count": made.pop("count") if "count" in made else made["new"].size,
            "files": {},
        }
        for suffix, content in made.items():
            data = content if isinstance(content, bytes) else content.tobytes()
            (FOLDER / f"{name}.{suffix}").write_bytes(data)
            entry["files"][f"{name}.{suffix}"] = hashlib.sha256(data).hexdigest()
        manifest[name] = entry
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
