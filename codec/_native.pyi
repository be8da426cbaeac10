"""Types of the native kernels; see native/module.cpp. Arrays of weights are passed as views of their bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def ulp_encode(
    base: NDArray[Any], new: NDArray[Any], exponent_bits: int, mantissa_bits: int, portable: bool, digest: bool
) -> tuple[bytes, int, bool, bytes] | str: ...
def ulp_changes(body: NDArray[np.uint8], count: int) -> int | str: ...
def ulp_decode(
    base: NDArray[Any],
    body: NDArray[np.uint8],
    exponent_bits: int,
    mantissa_bits: int,
    index: NDArray[np.uint32],
    bits: NDArray[np.uint8],
    portable: bool,
    digest: bool = True,
) -> bytes | str: ...
def count_changed(a: NDArray[Any], b: NDArray[Any], item_bytes: int) -> int: ...
def scatter(buffer: NDArray[Any], item_bytes: int, index: NDArray[np.uint32], bits: NDArray[Any]) -> None: ...
def digest_patched(base: NDArray[Any], item_bytes: int, index: NDArray[np.uint32], bits: NDArray[Any]) -> bytes: ...
