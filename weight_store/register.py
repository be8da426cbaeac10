"""Decision registers: the first writer decides, everybody else reads what was decided."""

from __future__ import annotations

from dataclasses import dataclass

from weight_store.errors import ObjectNotFound, PreconditionFailed
from weight_store.store import Store

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Created:
    """The register holds our bytes: we wrote them, now or in an attempt whose reply was lost."""

    etag: str


@dataclass(frozen=True, slots=True)
class Existing:
    """Somebody else decided first; ``data`` is what they wrote."""

    data: bytes
    etag: str


async def create_or_read(store: Store, key: str, data: bytes, max_bytes: int) -> Created | Existing:
    """Create the register ``key`` with ``data``, or return what it already holds.

    Equal bytes count as ours: whoever must tell two writers apart puts a write id into ``data``. ``ObjectTooLarge``
    if the register holds more than ``max_bytes``; ``PreconditionFailed`` if the store keeps refusing to create an
    object that it then does not have, as it may while another writer's request is neither done nor dropped.
    """
    for _ in range(_ROUNDS):
        try:
            return Created(await store.create(key, data))
        except PreconditionFailed:
            try:
                blob = await store.get(key, max_bytes=max(max_bytes, len(data)))
            except ObjectNotFound:
                continue
            return Created(blob.etag) if blob.data == data else Existing(blob.data, blob.etag)
    raise PreconditionFailed(
        f"object {key} can be neither created nor read: other writers keep interfering; try again", key=key
    )
