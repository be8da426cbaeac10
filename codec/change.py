"""What a decoded payload does to its base: the value every method's ``decode`` returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codec import kernels
from codec._native import Digests
from codec.digest import digest
from codec.dtypes import Bits
from codec.errors import CorruptFrame, InvalidInput

MAX_ELEMENTS = 2**31 - 1
"""Elements in one group: an index fits 32 bits, and so does the difference of any two."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New bits for some elements of a base, or a whole new array.

    Sparse: ``index`` (uint32) ascends without repeats, ``bits`` (unsigned, item size of the dtype) are the new
    values there, ``whole`` is None. Whole: ``whole`` is the new array, the other two are empty.
    ``digest`` is the XXH3-128 of the result either way; empty where somebody else takes the digest of several changes.
    """

    index: NDArray[np.uint32]
    bits: Bits
    whole: Bits | None
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays of this change hold."""
        return self.index.nbytes + self.bits.nbytes + (0 if self.whole is None else self.whole.nbytes)


def whole_change(base: Bits | None, new: Bits, digests: Digests | None) -> Change:
    """A change that replaces everything; feeds ``digests``, or else hashes ``new`` for itself."""
    if digests is not None:
        kernels.hash_both(digests, base, new)
    own = digest(new) if digests is None else b""
    return Change(np.empty(0, np.uint32), np.empty(0, new.dtype), new, own)


def sparse_change(base: Bits, index: NDArray[np.uint32], bits: Bits, digests: Digests | None) -> Change:
    """A change of some elements of ``base``, which is only read; feeds ``digests``, or else hashes its own result.

    ``index`` comes from decoded bytes: :class:`CorruptFrame` if it does not ascend or leaves the base.
    """
    taken = Digests(base=False, result=True) if digests is None else digests
    kernels.hash_patched(taken, base, index, bits)
    return Change(index, bits, None, taken.result() if digests is None else b"")


def apply_change(buffer: Bits, change: Change) -> None:
    """Store ``change`` in ``buffer``: writable, 1-D, C-contiguous, unsigned, of the base's size. Releases the GIL.

    Nothing is verified here: compare ``change.digest`` first. Raises :class:`InvalidInput`, before anything is
    stored, if the change does not fit the buffer.
    """
    source = change.bits if change.whole is None else change.whole
    if not isinstance(buffer, np.ndarray):
        raise InvalidInput(f"the buffer is a {type(buffer).__name__}; pass its bits, a numpy array (codec.to_bits)")
    if buffer.dtype != source.dtype or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise InvalidInput(
            f"the change holds {source.dtype} values; the buffer is {buffer.ndim}-D {buffer.dtype}; "
            "pass a contiguous 1-D view of the same item size"
        )
    if not buffer.flags.writeable:
        raise InvalidInput("the buffer is read-only; pass a writable array")
    if change.whole is not None:
        if change.whole.size != buffer.size:
            raise InvalidInput(f"the change has {change.whole.size} elements, the buffer {buffer.size}")
        np.copyto(buffer, change.whole)
    elif change.index.size:
        if change.index.size != change.bits.size:
            raise InvalidInput("the change has as many positions as values; this one has not")
        try:
            kernels.scatter(buffer, change.index, change.bits)
        except CorruptFrame as error:
            raise InvalidInput(f"the change does not fit the buffer of {buffer.size} elements: {error}") from None
