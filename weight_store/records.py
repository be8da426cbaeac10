"""Small immutable records: canonical JSON with a format name and version in front, parsed strictly and bounded.

A record's identity is the SHA-256 of its canonical JSON, so two writers that hold the same facts write the same
bytes. Large columnar records (layouts, offers) are stored packed with zstd; their name is still the SHA-256 of the
JSON, because zstd's output differs between releases.
"""

from __future__ import annotations

import hashlib
import json
import struct
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

import zstandard
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from weight_store.errors import FormatError, ObjectTooLarge, UnknownFormatVersion

MAX_VERSION = 10**12 - 1
MAX_RANKS = 100_000
MAX_RECORD_BYTES = 64 << 20
"""Bound of head, control, open, receipt, manifest and abort: refused before memory is taken."""
MAX_COLUMNS_BYTES = 512 << 20
"""Bound of a layout or offer once unpacked (a million pieces take about 60 MB)."""
_REMEMBERED_BYTES = 8 << 10
"""Records up to this size are parsed once for the same bytes; 512 of them are kept."""

_PACK_MAGIC = b"WCPACK\x01\x00"
_PACK_HEADER = struct.Struct("<8sQ")

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Uuid = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")]
Nonce = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


class Part(BaseModel):
    """A frozen, strictly typed component of a record. Unknown fields are ignored: additions stay readable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Record(Part):
    """A record stored as one object. Subclasses set ``FORMAT`` and ``FORMAT_VERSION``."""

    FORMAT: ClassVar[str]
    FORMAT_VERSION: ClassVar[int] = 1

    def to_bytes(self) -> bytes:
        """Serialise to canonical JSON: sorted keys, no spaces, ASCII only."""
        body = {"format": self.FORMAT, "format_version": self.FORMAT_VERSION, **_fields(self)}
        return _CANONICAL.encode(body).encode()

    @classmethod
    def parse(cls, data: bytes, *, key: str = "") -> Self:
        """Parse and validate. Raises ``FormatError`` or ``UnknownFormatVersion`` with ``key`` in the sentence."""
        if len(data) <= _REMEMBERED_BYTES:
            try:
                known: Self = _remembered(cls, bytes(data))
            except FormatError:
                pass  # it is parsed again, for a sentence with the key in it
            else:
                return known
        return cls._parse(data, key)

    @classmethod
    def _parse(cls, data: bytes, key: str) -> Self:
        envelope = _envelope(data, key)
        if envelope.format != cls.FORMAT:
            raise FormatError(f"{key or 'object'} is a {envelope.format!r} object, expected {cls.FORMAT!r}")
        if envelope.format_version != cls.FORMAT_VERSION:
            raise UnknownFormatVersion(
                f"{key or 'object'} has format version {envelope.format_version} of {cls.FORMAT}; "
                f"this release reads version {cls.FORMAT_VERSION}: upgrade weightcast"
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise FormatError(f"{key or 'object'} is not a valid {cls.FORMAT}: {_first(error)}") from None


def _fields(part: Part) -> dict[str, Any]:
    """The fields alone: ``dict(part)`` would also have what a cached property left in it."""
    return {name: getattr(part, name) for name in type(part).model_fields}


_CANONICAL = json.JSONEncoder(default=_fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
_R = TypeVar("_R", bound=Record)


@lru_cache(maxsize=512)
def _remembered(kind: type[_R], data: bytes) -> _R:
    """Records are immutable, and a head or manifest that has not changed is read again and again."""
    return kind._parse(data, "")


class _Envelope(Part):
    format: Annotated[str, StringConstraints(max_length=64)]
    format_version: Annotated[int, Field(ge=0, le=2**31 - 1)]


def _envelope(data: bytes, key: str) -> _Envelope:
    if len(data) > MAX_COLUMNS_BYTES:
        raise ObjectTooLarge(f"{key or 'object'} has {len(data)} bytes, more than any record may have")
    try:
        return _Envelope.model_validate_json(data)
    except ValidationError as error:
        raise FormatError(f"{key or 'object'} is not a weightcast record: {_first(error)}") from None


def record_format(data: bytes, *, key: str = "") -> str:
    """Return the format name of a record without validating the rest (a register holds one of two kinds)."""
    return _envelope(data, key).format


def _first(error: ValidationError) -> str:
    """One short line of a pydantic error; never the input itself, which may be megabytes or secret."""
    detail: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in detail["loc"][:4])
    return f"{where}: {detail['msg']}"[:300] if where else str(detail["msg"])[:300]


def pack(json_bytes: bytes) -> bytes:
    """Compress canonical JSON for storage: magic and version, raw length (u64 LE), one zstd frame."""
    return _PACK_HEADER.pack(_PACK_MAGIC, len(json_bytes)) + zstandard.compress(json_bytes, 3)


def unpacked_bytes(data: bytes) -> int:
    """How much :func:`unpack` would take memory for; 0 if there is no header."""
    return int(_PACK_HEADER.unpack_from(data)[1]) if len(data) >= _PACK_HEADER.size else 0


def unpack(data: bytes, *, key: str = "") -> bytes:
    """Undo :func:`pack`. Memory is bounded by the checked length field, never by the frame's own claim."""
    if len(data) < _PACK_HEADER.size:
        raise FormatError(f"{key or 'object'} is cut short: {len(data)} bytes")
    magic, raw_bytes = _PACK_HEADER.unpack_from(data)
    if magic[:6] != _PACK_MAGIC[:6]:
        raise FormatError(f"{key or 'object'} is not a packed weightcast record")
    if magic != _PACK_MAGIC:
        raise UnknownFormatVersion(f"{key or 'object'} is packed in an unknown way: upgrade weightcast")
    if raw_bytes > MAX_COLUMNS_BYTES:
        raise ObjectTooLarge(f"{key or 'object'} claims {raw_bytes} bytes, more than {MAX_COLUMNS_BYTES}")
    frame = data[_PACK_HEADER.size :]
    try:
        if zstandard.frame_content_size(frame) != raw_bytes:
            raise FormatError(f"{key or 'object'} is corrupt: its two lengths differ")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{key or 'object'} is corrupt: {error}") from None
