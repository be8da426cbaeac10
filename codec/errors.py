"""What can go wrong in the codec, grouped by what the caller does about it.

::

    CodecError (ValueError)      base; never raised itself
    ├── InvalidInput             the caller passed something the codec cannot take: fix the call
    ├── CorruptFrame             the bytes are damaged or hostile: fetch them again
    │   └── TruncatedFrame       the bytes stop too early: fetch the rest
    ├── UnsupportedFrame         written by a newer weightcast: upgrade this side
    └── BaseMismatch             the frame starts from other bytes than these: fetch another delta, or a full

Every class has a stable ``code`` (append only). All of them are :class:`ValueError`\\ s, so that code written
against ``fireworks-delta-compression``, whose errors are plain ``ValueError``\\ s, keeps working.
"""

from __future__ import annotations


class CodecError(ValueError):
    """Base of every error of this package; never raised itself."""

    code = "codec"


class InvalidInput(CodecError):
    """An argument has the wrong type, dtype, shape or size, or names a method that does not exist."""

    code = "invalid-input"


class CorruptFrame(CodecError):
    """The bytes are not what an encoder writes, or decode to something else than their digest says."""

    code = "corrupt-frame"


class TruncatedFrame(CorruptFrame):
    """The bytes end before what their header announces."""

    code = "truncated-frame"


class UnsupportedFrame(CodecError):
    """A format version, method or dtype that this version of weightcast does not know."""

    code = "unsupported-frame"


class BaseMismatch(CodecError):
    """The frame is a delta from other bytes than the ones it is applied to."""

    code = "base-mismatch"
