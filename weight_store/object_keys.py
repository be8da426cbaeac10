"""What every adapter demands of a key, whatever it means: names never become a path or a URL unchecked."""

from __future__ import annotations

import re

from weight_store.errors import StoreRefused

# S3's limit on the UTF-8 form of a key, prefix included.
MAX_KEY_BYTES = 1024

_EMPTY_OR_DOTS = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")


def check_object_key(key: str) -> str:
    """Return ``key`` if it is relative, ``/``-separated, without empty, ``.`` or ``..`` parts and control characters.

    ``StoreRefused`` otherwise: a store would normalise such a key, or a directory would leave its root.
    """
    if _EMPTY_OR_DOTS.search(key):
        raise _refused(key, "has an empty, '.' or '..' part")
    return _check_characters(key)


def check_key_prefix(prefix: str) -> str:
    """Return ``prefix`` if some valid key could start with it; it may be empty or end in ``/``."""
    if prefix.startswith("/") or "//" in prefix or any(part in {".", ".."} for part in prefix.split("/")[:-1]):
        raise _refused(prefix, "has an empty, '.' or '..' part")
    return _check_characters(prefix)


def _check_characters(key: str) -> str:
    if _FORBIDDEN.search(key):
        raise _refused(key, "contains a control character or a backslash")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise _refused(key, "cannot be written in UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise _refused(key, f"is longer than {MAX_KEY_BYTES} bytes")
    return key


def _refused(key: str, fault: str) -> StoreRefused:
    shown = ascii(key[:120])
    return StoreRefused(f"the object key {shown} {fault}: use plain parts joined by '/'", key=key[:120])
