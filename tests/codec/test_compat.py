"""Promise: code written against fireworks-delta-compression runs here, and its formats are safe to ask for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
import zstandard

import codec


def pair(dtype=torch.bfloat16, shape=(64, 48)):
    generator = torch.Generator().manual_seed(0)
    src = torch.randn(shape, generator=generator).mul(0.02).to(dtype)
    dst = src.clone().reshape(-1)
    dst[::37] = (dst[::37].float() * 1.01).to(dtype)
    return src, dst.reshape(shape)


@pytest.mark.parametrize("compression_format", ["fields_v1", "FIELDS_V1", "xor_planes_v1", "ulp_v1", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(64, 48), (), (0,), (5,), (3, 4, 5)], ids=str)
def test_our_formats(compression_format, dtype, shape):
    src, dst = pair(dtype, shape)
    before = src.clone()
    compressed, checksum = codec.delta_compress(src=src, dst=dst, compression_format=compression_format)
    assert (compressed.dtype, compressed.dim(), compressed.device.type) == (torch.uint8, 1, "cpu")
    assert isinstance(checksum, str)
    restored = codec.delta_decompress(
        src=src, compressed_diff=compressed, checksum=checksum, compression_format=compression_format
    )
    assert (restored.dtype, restored.shape) == (dst.dtype, dst.shape)
    assert np.array_equal(codec.to_bits(restored), codec.to_bits(dst))
    assert np.array_equal(codec.to_bits(src), codec.to_bits(before))


def test_views_that_are_not_contiguous():
    src, dst = pair()
    compressed, checksum = codec.delta_compress(src=src.t(), dst=dst.t(), compression_format="fields_v1")
    restored = codec.delta_decompress(
        src=src.t(), compressed_diff=compressed, checksum=checksum, compression_format="fields_v1"
    )
    assert torch.equal(restored, dst.t())


def test_errors_are_value_errors_as_there():
    src, dst = pair()
    compressed, checksum = codec.delta_compress(src=src, dst=dst, compression_format="fields_v1")
    calls = [
        lambda: codec.delta_compress(src=src, dst=dst.float(), compression_format="fields_v1"),
        lambda: codec.delta_compress(src=src, dst=dst.t(), compression_format="fields_v1"),
        lambda: codec.delta_compress(src=src, dst=dst, compression_format="arc_v9"),
        lambda: decompress(src, compressed, "0" * 32),
        lambda: decompress(dst, compressed, checksum),
        lambda: decompress(src, compressed[:-1], checksum),
        lambda: decompress(src, compressed.float(), checksum),
    ]
    for call in calls:
        with pytest.raises(ValueError) as raised:  # noqa: PT011  the type is the promise; its subclass is checked below
            call()
        assert isinstance(raised.value, codec.CodecError)


def decompress(src, compressed, checksum, compression_format="fields_v1", **more):
    return codec.delta_decompress(
        src=src, compressed_diff=compressed, checksum=checksum, compression_format=compression_format, **more
    )


def test_arc_v3_is_not_unpickled_unless_trusted():
    src, dst = pair()
    with pytest.raises(codec.InvalidInput, match="unpickles"):
        decompress(src, dst.view(torch.uint8).reshape(-1), "1", "arc_v3")


def test_without_the_peers_package_the_arc_formats_say_what_to_install():
    program = (
        "import sys; sys.modules['fireworks_delta_compression'] = None\n"
        "import torch, codec\n"
        "try: codec.delta_compress(src=torch.zeros(3), dst=torch.ones(3), compression_format='arc_v2')\n"
        "except codec.InvalidInput as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "weightcast[fireworks]" in done.stdout


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # theirs
@pytest.mark.parametrize("compression_format", ["arc_v1", "arc_v2", "arc_v3"])
def test_the_peers_formats(compression_format):
    peer = pytest.importorskip("fireworks_delta_compression", reason="pip install 'weightcast[fireworks]'")
    src, dst = pair()
    compressed, checksum = codec.delta_compress(src=src, dst=dst, compression_format=compression_format)
    theirs = peer.delta_decompress(
        src=src, compressed_diff=compressed, checksum=checksum, compression_format=compression_format
    )
    assert torch.equal(theirs, dst)
    assert torch.equal(decompress(src, compressed, checksum, compression_format, trust_pickle=True), dst)
    with pytest.raises(codec.CorruptFrame):
        decompress(src, compressed, "1", compression_format, trust_pickle=True)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # theirs
@pytest.mark.parametrize("compression_format", ["arc_v1", "arc_v2", "arc_v3"])
def test_damaged_bytes_of_the_peers_formats_are_codec_errors(compression_format):
    pytest.importorskip("fireworks_delta_compression", reason="pip install 'weightcast[fireworks]'")
    src, dst = pair(shape=(24, 16))
    compressed, checksum = codec.delta_compress(src=src, dst=dst, compression_format=compression_format)
    good = compressed.numpy().tobytes()
    random = np.random.default_rng(0)
    # Never a flip in the pickles of arc_v3: that would run whatever it happens to spell. Cut short they say nothing.
    flips = [] if compression_format == "arc_v3" else random.integers(0, len(good), 100).tolist()
    damaged = [b"", *(good[:cut] for cut in range(0, len(good), 1 + len(good) // 50))]
    damaged += [good[:at] + bytes([good[at] ^ 1 << int(random.integers(8))]) + good[at + 1 :] for at in flips]
    for raw in damaged:
        sent = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
        # Some flips mean nothing to their decoders, and one in a few hundred gets past their Adler-32.
        with contextlib.suppress(codec.CorruptFrame):
            decompress(src, sent, checksum, compression_format, trust_pickle=True)
    with pytest.raises(codec.CorruptFrame, match=f"{compression_format} bytes do not decode: "):
        decompress(src, torch.zeros(50, dtype=torch.uint8), checksum, compression_format, trust_pickle=True)


@pytest.mark.parametrize("compression_format", ["arc_v1", "arc_v2", "arc_v3"])
def test_what_the_peer_cannot_code_is_invalid_input(compression_format):
    pytest.importorskip("fireworks_delta_compression", reason="pip install 'weightcast[fireworks]'")
    src, dst = pair()
    compressed, checksum = codec.delta_compress(src=src, dst=dst, compression_format=compression_format)
    calls = {
        "dtypes differ": lambda: codec.delta_compress(src=src, dst=dst.float(), compression_format=compression_format),
        "shapes differ": lambda: codec.delta_compress(src=src, dst=dst.t(), compression_format=compression_format),
        f"{compression_format} cannot code": lambda: codec.delta_compress(
            src=src.to("meta"), dst=dst.to("meta"), compression_format=compression_format
        ),
        "delta_compress returns uint8": lambda: decompress(
            src, compressed.float(), checksum, compression_format, trust_pickle=True
        ),
        "expected a torch tensor": lambda: decompress(src, b"bytes", checksum, compression_format, trust_pickle=True),
    }
    for sentence, call in calls.items():
        with pytest.raises(codec.InvalidInput, match=sentence):
            call()


@pytest.mark.parametrize("compression_format", ["arc_v1", "arc_v2"])
@pytest.mark.parametrize("claimed", [1, 9, 11, 200 << 20])
def test_a_bomb_in_the_peers_formats_takes_no_memory(compression_format, claimed):
    pytest.importorskip("fireworks_delta_compression", reason="pip install 'weightcast[fireworks]'")
    pack = zlib.compress if compression_format == "arc_v1" else zstandard.ZstdCompressor().compress
    sent = torch.from_numpy(np.frombuffer(pack(bytes(claimed)), np.uint8).copy())
    tracemalloc.start()
    try:
        with pytest.raises(codec.CorruptFrame, match="another size than the 10 bytes"):
            decompress(torch.zeros(5, dtype=torch.bfloat16), sent, "1", compression_format)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
