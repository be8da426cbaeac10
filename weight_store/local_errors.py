"""What the file system's errors mean for a store in a directory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from weight_store.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable, StoreUnwritable

_PASSING = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}
_ADVICE = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space or raise the quota",
    errno.EROFS: "mount the file system writable",
    errno.EACCES: "give this user the permission to write there",
    errno.EPERM: "give this user the permission to write there",
}
"""What helps where nothing can be written at all."""


@contextmanager
def translated(key: str, *, writing: bool = False) -> Iterator[None]:
    """Within this, an ``OSError`` becomes the ``StoreError`` that it means for the object ``key``."""
    try:
        yield
    except OSError as error:
        raise _classify(error, key, writing) from error


def refusal(error: OSError, sentence: str) -> StoreError:
    """The error for the store's own directory: ``sentence``, the reason, and what to do."""
    what = error.strerror or str(error)
    if error.errno in _ADVICE:
        return StoreUnwritable(f"{sentence}, {what}: {_ADVICE[error.errno]}")
    kind = StoreUnavailable if error.errno in _PASSING else StoreRefused
    return kind(f"{sentence}, {what}: correct the store URL, or look after the directory and its permissions")


def _classify(error: OSError, key: str, writing: bool) -> StoreError:
    what = error.strerror or str(error)
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR if not writing:
            return ObjectNotFound(f"no object {key}", key=key)
        case errno.ELOOP:
            return StoreRefused(f"object {key} is a symbolic link, which is not followed: remove it", key=key)
        case errno.ENOTDIR:
            return StoreRefused(
                f"object {key} needs a directory where there is an object or a link: rename one of them", key=key
            )
        case number if writing and number in _ADVICE:
            return StoreUnwritable(f"object {key} could not be written, {what}: {_ADVICE[number]}", key=key)
        case errno.EACCES | errno.EPERM | errno.EISDIR | errno.ENAMETOOLONG | errno.EEXIST:
            return StoreRefused(f"object {key} cannot be used, {what}: check the store's directory", key=key)
        case _:
            return StoreUnavailable(f"object {key}: {what}", key=key)
