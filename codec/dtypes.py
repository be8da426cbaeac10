"""Element types as safetensors names them, and arrays as the raw bits the codec works on.

The codec never computes with weights: every tensor becomes a 1-D array of unsigned integers of its item size,
so NaN payloads, infinities, -0 and subnormals pass through untouched. Torch is imported only when a torch
tensor is handed in or asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from codec.errors import InvalidInput, UnsupportedFrame

if TYPE_CHECKING:
    import torch

if sys.byteorder != "little":  # every array on the wire is a view of memory; see FORMAT.md, "Conventions"
    raise ImportError("the weightcast codec needs a little-endian machine")

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""A 1-D C-contiguous array of uint8, uint16, uint32 or uint64: the raw bits of a tensor."""

ArrayLike: TypeAlias = "torch.Tensor | NDArray[Any]"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: safetensors ``name``, wire ``code``, item size, and the float fields if it has them."""

    name: str
    code: int
    item_bytes: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_float(self) -> bool:
        """True if an element is sign, exponent and mantissa, from the top bit down."""
        return self.exponent_bits > 0

    @property
    def bits(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The unsigned numpy dtype of the same item size."""
        return BITS_OF_SIZE[self.item_bytes]


BITS_OF_SIZE: dict[int, np.dtype[Any]] = {n: np.dtype(f"uint{8 * n}") for n in (1, 2, 4, 8)}

# Codes are part of the format (FORMAT.md, "Element types"): append only.
DTYPES: tuple[DType, ...] = (
    DType("U8", 0, 1),
    DType("BF16", 1, 2, 8, 7),
    DType("F16", 2, 2, 5, 10),
    DType("F32", 3, 4, 8, 23),
    DType("F64", 4, 8, 11, 52),
    DType("F8_E4M3", 5, 1, 4, 3),
    DType("F8_E5M2", 6, 1, 5, 2),
    DType("F8_E4M3FNUZ", 7, 1, 4, 3),
    DType("F8_E5M2FNUZ", 8, 1, 5, 2),
    DType("F8_E8M0", 9, 1),
    DType("F4", 10, 1),  # two FP4 values a byte, as torch.float4_e2m1fn_x2 packs them
    DType("BOOL", 11, 1),
    DType("I8", 12, 1),
    DType("I16", 13, 2),
    DType("U16", 14, 2),
    DType("I32", 15, 4),
    DType("U32", 16, 4),
    DType("I64", 17, 8),
    DType("U64", 18, 8),
    DType("C64", 19, 8),
)
BY_NAME = {d.name: d for d in DTYPES}
BY_CODE = {d.code: d for d in DTYPES}

TORCH_NAMES = {
    "uint8": "U8",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
}
"""torch's name of a dtype -> the safetensors name."""
# numpy.dtype.name of the same types; the narrow floats are those of the ml_dtypes package.
_NUMPY_NAMES = TORCH_NAMES | {"float4_e2m1fn": "U8"}
_NUMPY_OF = {v: np.dtype(k) for k, v in TORCH_NAMES.items() if not k.startswith(("bfloat", "float8", "float4"))}


def find(name: str) -> DType:
    """The dtype of this safetensors name; :class:`InvalidInput` if the codec has no such type."""
    try:
        return BY_NAME[name]
    except (KeyError, TypeError):
        raise InvalidInput(f"unknown dtype {name!r}; known are {', '.join(BY_NAME)}; pass others as U8") from None


def find_code(code: int) -> DType:
    """The dtype of this wire code; :class:`UnsupportedFrame` if a newer format must have written it."""
    try:
        return BY_CODE[code]
    except KeyError:
        raise UnsupportedFrame(f"dtype code {code} is unknown; a newer weightcast wrote this: upgrade") from None


def is_torch(array: object) -> bool:
    """True for a torch tensor, without importing torch for those who do not use it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def dtype_of(array: ArrayLike) -> DType:
    """The dtype of a torch tensor or numpy array; types without a name of their own count as U8 bytes."""
    if is_torch(array):
        return BY_NAME[TORCH_NAMES.get(str(array.dtype).removeprefix("torch."), "U8")]
    if not isinstance(array, np.ndarray):
        raise InvalidInput(f"expected a torch tensor or a numpy array, got {type(array).__name__}")
    if array.dtype.hasobject:
        raise InvalidInput("an array of Python objects has no bits to encode; convert it to numbers first")
    return BY_NAME[_NUMPY_NAMES.get(array.dtype.name, "U8")]


def to_bits(array: ArrayLike) -> Bits:
    """The raw bits of a tensor or array in row-major order, 1-D; a view where its memory allows, else a copy.

    CUDA tensors are copied to the host. Raises :class:`InvalidInput` for sparse, nested, quantised and meta tensors and
    for arrays of Python objects.
    """
    dtype = dtype_of(array)
    if not isinstance(array, np.ndarray):
        return _torch_bits(array, dtype)
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8).view(dtype.bits)


def _torch_bits(tensor: torch.Tensor, dtype: DType) -> Bits:
    import torch

    _check_plain(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    try:
        data: NDArray[np.uint8] = flat.numpy()
    except RuntimeError as error:
        raise InvalidInput(
            f"a {type(tensor).__name__} gives no access to its memory ({error}); pass the tensor inside it"
        ) from None
    return data.view(dtype.bits)


def _check_plain(tensor: torch.Tensor) -> None:
    import torch

    if tensor.is_nested:
        raise InvalidInput("a nested tensor has no plain bits; pass its tensors one by one")
    if tensor.layout != torch.strided:
        raise InvalidInput(f"a {tensor.layout} tensor has no plain bits; call to_dense() first")
    if tensor.is_quantized:
        raise InvalidInput("a quantised tensor has no plain bits; pass its int_repr() and what scales it")
    if tensor.is_meta:
        raise InvalidInput("a meta tensor has no bits; load it first, or move it with to_empty() and fill it")


def from_bits(bits: Bits, dtype: DType, shape: tuple[int, ...], container: str) -> ArrayLike:
    """The array over ``bits`` (shared memory): ``container`` is "torch" or "numpy".

    Numpy has no narrow floats: BF16, FP8 and FP4 come back as their unsigned bits.
    """
    if container == "numpy":
        return bits.view(_NUMPY_OF.get(dtype.name, dtype.bits)).reshape(shape)
    if container != "torch":
        raise InvalidInput(f"container is 'torch' or 'numpy', not {container!r}")
    import torch

    names = {v: k for k, v in TORCH_NAMES.items()}
    torch_dtype = getattr(torch, names[dtype.name], None)
    if torch_dtype is None:
        raise InvalidInput(f"this torch has no dtype for {dtype.name}; ask for container='numpy'")
    return torch.from_numpy(bits.view(np.uint8)).view(torch_dtype).reshape(shape)


def check_writable(array: ArrayLike) -> None:
    """Raise :class:`InvalidInput` if :func:`store` could not write into ``array``, each element on its own."""
    dtype_of(array)
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise InvalidInput("the buffer is read-only; pass a writable array")
        strides, unit = array.strides, array.itemsize
    else:
        _check_plain(array)
        if array.is_conj() or array.is_neg():
            raise InvalidInput("the buffer is a conjugated or negated view; pass a tensor with memory of its own")
        strides, unit = array.stride(), 1
    if _may_overlap(array.shape, strides, unit):
        raise InvalidInput("the buffer is an expanded view or overlaps itself; pass a tensor with memory of its own")


def _may_overlap(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    """False if no two elements of ``unit`` share memory, which holds for whatever slices and transposes make."""
    reach = unit
    if 0 in shape:
        return False
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False


def store(array: ArrayLike, bits: Bits) -> None:
    """Write ``bits``, which :func:`to_bits` made from ``array``, back into it; a view of it is there already."""
    if isinstance(array, np.ndarray):
        if not np.may_share_memory(array, bits):
            array[...] = bits.view(array.dtype.newbyteorder("=")).reshape(array.shape)
        return
    if array.numel() == 0 or bits.ctypes.data == array.data_ptr():
        return
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(array.element_size(), array.dtype)
    host = torch.from_numpy(bits.view(np.uint8)).view(whole).reshape(array.shape)
    array.detach().view(whole).copy_(host)
