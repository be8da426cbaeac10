"""Promise: whatever is no tensor, no frame or no buffer is refused with a sentence, a :class:`CodecError`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import codec

N = 100
BASE = torch.zeros(N, dtype=torch.bfloat16)
NEW = BASE.clone().index_fill_(0, torch.tensor([3]), 1.0)
FRAME = codec.encode_delta(BASE, NEW)
COMPRESSED = torch.frombuffer(bytearray(FRAME), dtype=torch.uint8)
BITS = np.zeros(N, np.uint16)
CHANGE = codec.decode_group(BITS, codec.encode_group(BITS, codec.to_bits(NEW), "BF16").payload, "BF16", N)
FLOATS = torch.zeros(N)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(N, dtype=torch.bfloat16)


NO_BITS: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1.0], "got list"),
    "none": (lambda: None, "got NoneType"),
    "scalar": (lambda: np.float32(1), "got float32"),
    "bytes": (lambda: bytes(2 * N), "got bytes"),
    "meta": (lambda: BASE.to("meta"), "load it first"),
    "fake": (fake, "no access to its memory"),
    "coo": (FLOATS.to_sparse, "to_dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
    "quantised": (lambda: torch.quantize_per_tensor(FLOATS, 0.1, 0, torch.qint8), "int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([FLOATS, FLOATS[:3]]), "one by one"),
    "jagged": (lambda: torch.nested.nested_tensor([FLOATS, FLOATS[:3]], layout=torch.jagged), "one by one"),
    "objects": (lambda: np.array([None]), "Python objects"),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these layouts beta or deprecated
@pytest.mark.parametrize("kind", NO_BITS)
def test_what_has_no_bits(kind: str) -> None:
    make, match = NO_BITS[kind]
    nothing = make()
    for call in (
        lambda: codec.encode_delta(nothing, nothing),
        lambda: codec.encode_full(nothing),
        lambda: codec.to_bits(nothing),
        lambda: codec.apply_delta(nothing, FRAME),
    ):
        with pytest.raises(codec.InvalidInput, match=match):
            call()
    with pytest.raises(codec.InvalidInput):
        codec.encode_delta(BASE, nothing)
    with pytest.raises(codec.InvalidInput):
        codec.delta_compress(src=nothing, dst=nothing)
    with pytest.raises(codec.InvalidInput):
        codec.delta_decompress(src=nothing, compressed_diff=COMPRESSED, checksum="")


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        ("abc", "got str"),
        (None, "got NoneType"),
        (5, "got int"),
        ([1, 2], "got list"),
        (BASE, "got Tensor"),
        (np.frombuffer(FRAME, np.uint8).repeat(2)[::2], "C-contiguous"),
        (memoryview(FRAME)[::2], "C-contiguous"),
        (np.array([None]), "Python objects"),
    ],
    ids=["str", "None", "int", "list", "tensor", "strided array", "strided view", "objects"],
)
def test_what_is_no_frame(frame: Any, match: str) -> None:
    for call in (
        lambda: codec.apply_delta(BASE.clone(), frame),
        lambda: codec.decode_full(frame),
        lambda: codec.decode_group(BITS, frame, "BF16", N),
        lambda: codec.needs_base(frame),
        lambda: codec.digest(frame),
    ):
        with pytest.raises(codec.InvalidInput, match=match):
            call()


@pytest.mark.parametrize("frame", [b"", bytearray(), np.empty(0, np.uint8), np.empty((0, 3), np.uint8)], ids=repr)
def test_an_empty_frame_is_truncated(frame: Any) -> None:
    with pytest.raises(codec.TruncatedFrame):
        codec.apply_delta(BASE.clone(), frame)
    assert codec.digest(frame) == codec.digest(b"")


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        (np.lib.stride_tricks.as_strided(np.zeros(N + 1, np.uint16), (N // 2, 2), (2, 2)), "overlaps itself"),
        (np.lib.stride_tricks.as_strided(np.zeros(N, np.uint8), (N,), (1,)).view(np.uint8), "holds BF16"),
        (BASE.clone().as_strided((N // 2, 2), (1, 1)), "overlaps itself"),
        (BASE[:1].clone().expand(N), "overlaps itself"),
        (torch.zeros(N // 4, dtype=torch.complex64).conj(), "conjugated"),
        (np.broadcast_to(BITS[:1], N), "read-only"),
    ],
    ids=["numpy windows", "bytes", "torch windows", "expanded", "conjugated", "broadcast"],
)
def test_buffers_whose_elements_are_not_their_own(buffer: Any, match: str) -> None:
    with pytest.raises(codec.InvalidInput, match=match):
        codec.apply_delta(buffer, FRAME)


@pytest.mark.parametrize(
    "buffer",
    [
        lambda: torch.zeros(2 * N, dtype=torch.bfloat16)[::2],
        lambda: torch.zeros(10, 10, dtype=torch.bfloat16).T,
        lambda: torch.zeros(4, 5, 10, dtype=torch.bfloat16)[:2, :, ::1].permute(2, 0, 1),
        lambda: torch.zeros(1, dtype=torch.bfloat16).expand(1, 1).new_zeros(N, 1).expand(N, 1),
        lambda: np.zeros(2 * N, np.uint16)[::2],
        lambda: np.zeros(N, np.uint16)[::-1],
        lambda: np.zeros((10, 10), np.uint16).T,
        lambda: np.asfortranarray(np.zeros((2, 5, 10), np.uint16)),
    ],
)
def test_views_that_are_not_contiguous_are_written_through(buffer: Callable[[], Any]) -> None:
    target = buffer()
    codec.apply_delta(target, FRAME)
    assert np.array_equal(codec.to_bits(target), codec.to_bits(NEW))


@pytest.mark.parametrize(
    "call",
    [
        lambda: codec.encode_delta(BASE, NEW, method=[]),
        lambda: codec.encode_delta(BASE, NEW, dtype=[]),
        lambda: codec.encode_delta(BASE, NEW, dtype=torch.bfloat16),
        lambda: codec.delta_compress(src=BASE, dst=NEW, compression_format=5),
        lambda: codec.encode_group([1], [2], "BF16"),
        lambda: codec.encode_group(None, BASE, "BF16"),
        lambda: codec.decode_group([1], b"\0", "BF16", 1),
        lambda: codec.decode_group(BITS, b"\0", "BF16", "100"),
        lambda: codec.decode_group(BITS, b"\0", "BF16", 100.0),
        lambda: codec.decode_full(codec.encode_full(BASE), container=None),
        lambda: codec.apply_change([1], CHANGE),
        lambda: codec.apply_change(BASE, CHANGE),
    ],
)
def test_other_arguments_of_the_wrong_kind(call: Callable[[], Any]) -> None:
    with pytest.raises(codec.InvalidInput) as caught:
        call()
    assert re.fullmatch(r".{20,}", str(caught.value), re.DOTALL)


@pytest.mark.parametrize(
    ("base", "new", "match"),
    [
        (BASE, FLOATS, "dtypes differ"),
        (BASE, np.zeros(N, np.uint16), "dtypes differ"),
        (BASE, BASE[:50], "shapes differ"),
        (BASE.view(10, 10), BASE, "shapes differ"),
    ],
)
def test_base_and_new_that_differ_in_kind(base: Any, new: Any, match: str) -> None:
    with pytest.raises(codec.InvalidInput, match=match):
        codec.encode_delta(base, new)
