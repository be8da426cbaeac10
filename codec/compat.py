"""The two calls of ``fireworks-delta-compression`` 0.1.0, over our formats; theirs by way of their package.

Code that calls ``delta_compress`` and ``delta_decompress`` there runs here with another ``compression_format``.
The compressed tensor of our formats is a stand-alone frame (FORMAT.md), the checksum the XXH3-128 of ``dst`` in hex;
of theirs, whatever their package makes of it (extra ``weightcast[fireworks]``).
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from codec import dtypes
from codec.digest import as_bytes, digest
from codec.errors import CodecError, CorruptFrame, InvalidInput
from codec.frame import apply_delta, encode_delta

if TYPE_CHECKING:
    import torch

OUR_FORMATS = {"ulp_v1": "ulp_v1", "fields_v1": "fields_v1", "xor_planes_v1": "xor_planes", "auto": "auto"}
"""Our compression formats, and the method of codec.encode_group behind each."""
PEER_FORMATS = ("arc_v1", "arc_v2", "arc_v3")
"""Formats of Fireworks hot load, for teams that publish to such a deployment."""


def delta_compress(
    *, src: torch.Tensor, dst: torch.Tensor, compression_format: str = "auto"
) -> tuple[torch.Tensor, str]:
    """What turns ``src`` into ``dst``, as a 1-D uint8 CPU tensor, and a checksum of ``dst``.

    Tensors of any shape, dtype and device; both alike. Raises :class:`InvalidInput`, a ``ValueError``.
    """
    import torch

    name = _name(compression_format)
    for tensor in (src, dst):
        _check_tensor(tensor)
    if name in PEER_FORMATS:
        return _peer_compress(name, src, dst)
    frame = encode_delta(src, dst, method=_method(name))
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8), digest(dtypes.to_bits(dst)).hex()


def delta_decompress(
    *,
    src: torch.Tensor,
    compressed_diff: torch.Tensor,
    checksum: str,
    compression_format: str = "auto",
    trust_pickle: bool = False,
) -> torch.Tensor:
    """The tensor that ``compressed_diff`` makes of ``src``, on the device of ``src``, which stays as it is.

    arc_v3 is a pickle: whoever wrote the bytes can run code here. It is refused unless ``trust_pickle`` says that
    they come from nobody else than yourself. arc_v1 and arc_v2 bytes that stand for another size than that of ``src``
    are refused before memory is taken for it. The checksum of the arc formats is their Adler-32: even one damaged bit
    can get past it and give a wrong tensor, which that of our formats rules out.
    Raises :class:`CodecError` (a ``ValueError``), among them :class:`CorruptFrame` if the checksum differs.
    """
    name = _name(compression_format)
    _check_tensor(src)
    if name in PEER_FORMATS:
        if name == "arc_v3" and not trust_pickle:
            raise InvalidInput(
                "decoding arc_v3 unpickles the bytes, which runs whatever their writer put there; "
                "pass trust_pickle=True only for bytes you wrote yourself"
            )
        return _peer_decompress(name, src, compressed_diff, checksum)
    _method(name)
    result = src.detach().clone()
    apply_delta(result, _frame_of(compressed_diff))
    found = digest(dtypes.to_bits(result)).hex()
    if found != checksum:
        raise CorruptFrame(f"checksum mismatch: the result has {found}, expected was {checksum}")
    return result


def _name(compression_format: str) -> str:
    if not isinstance(compression_format, str):
        raise InvalidInput(f"compression_format is a name, not {compression_format!r}")
    return compression_format.lower()


def _check_tensor(tensor: torch.Tensor) -> None:
    if not dtypes.is_torch(tensor):
        raise InvalidInput(
            f"expected torch tensors, got {type(tensor).__name__}; codec.encode_delta takes numpy arrays"
        )


def _method(name: str) -> str:
    try:
        return OUR_FORMATS[name]
    except KeyError:
        known = ", ".join((*OUR_FORMATS, *PEER_FORMATS))
        raise InvalidInput(f"unknown compression format {name!r}; known are {known}") from None


def _frame_of(compressed: torch.Tensor) -> NDArray[np.uint8]:
    if dtypes.dtype_of(compressed).name != "U8":
        raise InvalidInput(f"compressed_diff holds {compressed.dtype}; delta_compress returns uint8")
    return dtypes.to_bits(compressed).view(np.uint8)


def _peer() -> Any:
    """The package of the peer, imported when it is asked for: it is no dependency of ours."""
    try:
        return importlib.import_module("fireworks_delta_compression")
    except ImportError:
        raise InvalidInput(
            "the arc formats are coded by the package fireworks-delta-compression, which is not installed: "
            "pip install 'weightcast[fireworks]'"
        ) from None


def _peer_compress(name: str, src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, str]:
    if src.dtype != dst.dtype:
        raise InvalidInput(f"dtypes differ: src {src.dtype}, dst {dst.dtype}; convert one of them first")
    if src.shape != dst.shape:
        raise InvalidInput(f"shapes differ: src {tuple(src.shape)}, dst {tuple(dst.shape)}")
    peer = _peer()
    with _failing_as(InvalidInput, f"{name} cannot code these tensors"):
        compressed, checksum = peer.delta_compress(src=src, dst=dst, compression_format=name)
    return compressed, checksum


def _peer_decompress(name: str, src: torch.Tensor, compressed: torch.Tensor, checksum: str) -> torch.Tensor:
    frame = _frame_of(compressed)
    peer = _peer()
    if name != "arc_v3":
        _check_size(name, frame, dtypes.to_bits(src).nbytes)
    with _failing_as(CorruptFrame, f"{name} bytes do not decode"):
        result: torch.Tensor = peer.delta_decompress(
            src=src, compressed_diff=compressed, checksum=checksum, compression_format=name
        )
    return result


def _check_size(name: str, frame: NDArray[np.uint8], size: int) -> None:
    """arc_v1 is one zlib stream (RFC 1950), arc_v2 one zstd frame; their decoder takes whatever memory they claim."""
    if size == 0:
        return  # they decode nothing then
    with _failing_as(CorruptFrame, f"{name} bytes do not decode"):
        if name == "arc_v1":
            found = len(zlib.decompressobj().decompress(as_bytes(frame), size + 1))
        else:
            found = zstandard.frame_content_size(as_bytes(frame))
    if found != size:
        raise CorruptFrame(f"{name} bytes do not decode: they stand for another size than the {size} bytes of src")


@contextlib.contextmanager
def _failing_as(kind: type[CodecError], what: str) -> Iterator[None]:
    """Around one call of the peer's: whatever it raises becomes a ``kind``."""
    try:
        yield
    # Foreign code over foreign libraries: zlib.error, zstd.Error and SafetensorError share no base but this one, and
    # unpickling damaged bytes may raise anything.
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
