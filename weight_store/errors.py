"""What can go wrong with the bucket, grouped by what the caller does about it.

::

    WeightStoreError
    ├── StoreError                 the store answered, or did not
    │   ├── ObjectNotFound         re-plan: the object is not there (now)
    │   ├── PreconditionFailed     read back and compare: somebody wrote first, or it was us
    │   ├── StoreUnavailable       retry with backoff; after a write the outcome is unknown
    │   │   ├── StoreThrottled     retry more slowly
    │   │   └── UploadLost         what was sent is gone: begin the upload again
    │   └── StoreRefused           a person must act: permission, credentials, bucket, endpoint
    │       └── StoreUnwritable    nothing at all can be written: a full or read-only disk, no permission
    ├── FormatError                the bytes are not what the key promises
    │   ├── UnknownFormatVersion   written by a newer weightcast: upgrade
    │   ├── ObjectTooLarge         bigger than its kind may be; refused before memory is taken
    │   └── DigestMismatch         bytes differ from the digest that names them
    ├── LayoutError                the offered boxes do not tile the tensors, or changed
    └── ChainError                 no path of deltas leads from here to there

Each class has a stable ``code`` (append only) that also appears in HTTP problem bodies.
"""

from __future__ import annotations


class WeightStoreError(Exception):
    """Base of every error of this package; never raised itself."""

    code = "weight-store"


class StoreError(WeightStoreError):
    """The object store refused or failed; ``key`` names the object concerned."""

    code = "store"

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ObjectNotFound(StoreError):
    """No object at this key."""

    code = "object-not-found"


class PreconditionFailed(StoreError):
    """A conditional write found an object, another ETag, or a concurrent writer (HTTP 412 and 409)."""

    code = "precondition-failed"


class StoreUnavailable(StoreError):
    """Transient: no connection, a time-out, a 5xx. After a write, whether it took effect is unknown."""

    code = "store-unavailable"


class StoreThrottled(StoreUnavailable):
    """The store asks for fewer requests (503 SlowDown, 429)."""

    code = "store-throttled"


class UploadLost(StoreUnavailable):
    """The store no longer has the parts of an upload, or the upload: committing again leads nowhere."""

    code = "upload-lost"


class StoreRefused(StoreError):
    """Permanent until a person acts: no such bucket, access denied, wrong keys, conditional writes unsupported."""

    code = "store-refused"


class StoreUnwritable(StoreRefused):
    """A directory in which nothing can be written: full, mounted read-only, or somebody else's."""

    code = "store-unwritable"


class FormatError(WeightStoreError):
    """An object's bytes do not have the form that its kind prescribes."""

    code = "format"


class UnknownFormatVersion(FormatError):
    """The object names a format version that this release cannot read."""

    code = "unknown-format-version"


class ObjectTooLarge(FormatError):
    """The object is larger than its kind may be."""

    code = "object-too-large"


class DigestMismatch(FormatError):
    """The bytes do not have the digest by which they were named."""

    code = "digest-mismatch"


class LayoutError(WeightStoreError):
    """Offered boxes overlap, leave a hole, or contradict each other or the run's earlier tensors."""

    code = "layout"


class ChainError(WeightStoreError):
    """No chain of manifests leads from the position held to the position wanted."""

    code = "chain"
