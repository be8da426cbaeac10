"""Types of the native kernels; see native/module.cpp. Arrays of weights are passed as views of their bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

class Digests:
    def __init__(self, base: bool, result: bool) -> None: ...
    def add_patched(
        self, base: NDArray[Any], item_bytes: int, index: NDArray[np.uint32], bits: NDArray[Any]
    ) -> None: ...
    def add(self, base: NDArray[Any], result: NDArray[Any]) -> None: ...
    def base(self) -> bytes: ...
    def result(self) -> bytes: ...

def ulp_encode(
    base: NDArray[Any],
    new: NDArray[Any],
    exponent_bits: int,
    mantissa_bits: int,
    portable: bool,
    digests: Digests | None,
) -> tuple[bytes, int, bool] | str: ...
def ulp_changes(body: NDArray[np.uint8], count: int) -> int | str: ...
def ulp_decode(
    base: NDArray[Any],
    body: NDArray[np.uint8],
    exponent_bits: int,
    mantissa_bits: int,
    index: NDArray[np.uint32],
    bits: NDArray[np.uint8],
    portable: bool,
    digests: Digests | None,
) -> str | None: ...
def count_changed(a: NDArray[Any], b: NDArray[Any], item_bytes: int) -> int: ...
def scatter(buffer: NDArray[Any], item_bytes: int, index: NDArray[np.uint32], bits: NDArray[Any]) -> None: ...
