"""A position names one exact state of the weights: a version and the SHA-256 of its manifest."""

from __future__ import annotations

from weight_store.records import Part, Sha256, Version


class Position(Part):
    """A version and the SHA-256 of its manifest. Whether two are equal is all there is to whether a delta fits."""

    version: Version
    sha256: Sha256

    def __str__(self) -> str:
        return f"{self.version}@{self.sha256[:12]}"


GENESIS = Position(version=0, sha256="0" * 64)
"""The position before the first version: no weights at all."""
