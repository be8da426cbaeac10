"""Arrays to frames and back: how weight updates are coded. No I/O, no clock; FORMAT.md is the wire.

Groups (``encode_group``, ``decode_group``, ``apply_change``) are what the agents exchange; stand-alone frames
carry their own description.
"""

from __future__ import annotations

from codec.change import MAX_ELEMENTS, Change, apply_change
from codec.compat import delta_compress, delta_decompress
from codec.digest import DIGEST_BYTES, digest
from codec.dtypes import dtype_of, to_bits
from codec.errors import (
    BaseMismatch,
    CodecError,
    CorruptFrame,
    InvalidInput,
    TruncatedFrame,
    UnsupportedFrame,
)
from codec.frame import apply_delta, decode_full, encode_delta, encode_full
from codec.group import EncodedGroup, decode_group, encode_group, needs_base

__all__ = [
    "DIGEST_BYTES",
    "MAX_ELEMENTS",
    "BaseMismatch",
    "Change",
    "CodecError",
    "CorruptFrame",
    "EncodedGroup",
    "InvalidInput",
    "TruncatedFrame",
    "UnsupportedFrame",
    "apply_change",
    "apply_delta",
    "decode_full",
    "decode_group",
    "delta_compress",
    "delta_decompress",
    "digest",
    "dtype_of",
    "encode_delta",
    "encode_full",
    "encode_group",
    "needs_base",
    "to_bits",
]
