"""Promise: the native calls look at every size again: no mistake in the Python above them touches other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from codec import _native, ulp

BF16 = (8, 7)
BASE = np.full(5000, 0x3C00, np.uint16)
NEW = BASE.copy()
NEW[::500] += np.uint16(1)
BODY = np.frombuffer(ulp.encode_counted(BASE, NEW, "BF16").body, np.uint8)
CHANGES = 10


def data(size: int) -> np.ndarray[Any, Any]:
    return np.zeros(size, np.uint8)


def index(*positions: int) -> np.ndarray[Any, Any]:
    return np.array(positions, np.uint32)


def both() -> _native.Digests:
    return _native.Digests(base=True, result=True)


def decode(changes: int, *, base: Any = BASE, bits: int | None = None) -> Any:
    room = np.zeros(changes, np.uint32), data(2 * changes if bits is None else bits)
    return _native.ulp_decode(base.view(np.uint8), BODY, *BF16, *room, False, None)


REFUSED: dict[str, Callable[[], object]] = {
    "encode a dtype that is none": lambda: _native.ulp_encode(data(8), data(8), 5, 5, False, None),
    "encode arrays of two sizes": lambda: _native.ulp_encode(data(8), data(6), *BF16, False, None),
    "encode half an element": lambda: _native.ulp_encode(data(7), data(7), *BF16, False, None),
    "decode with room for fewer bits": lambda: decode(CHANGES, bits=2 * CHANGES - 1),
    "decode against half an element": lambda: decode(CHANGES, base=data(9999)),
    "count in items of 3 bytes": lambda: _native.count_changed(data(6), data(6), 3),
    "count in arrays of two sizes": lambda: _native.count_changed(data(8), data(6), 2),
    "count half an item": lambda: _native.count_changed(data(7), data(7), 2),
    "scatter items of 3 bytes": lambda: _native.scatter(data(9), 3, index(0), data(3)),
    "scatter fewer bits": lambda: _native.scatter(data(8), 2, index(0, 1), data(3)),
    "scatter behind the end": lambda: _native.scatter(data(8), 2, index(0, 4), data(4)),
    "scatter backwards": lambda: _native.scatter(data(8), 2, index(1, 0), data(4)),
    "scatter twice to one place": lambda: _native.scatter(data(8), 2, index(1, 1), data(4)),
    "digest items of 3 bytes": lambda: both().add_patched(data(9), 3, index(0), data(3)),
    "digest fewer bits": lambda: both().add_patched(data(8), 2, index(0, 1), data(3)),
    "digest behind the end": lambda: both().add_patched(data(8), 2, index(0, 4), data(4)),
    "digest backwards": lambda: both().add_patched(data(8), 2, index(1, 0), data(4)),
    "digest arrays of two sizes": lambda: both().add(data(8), data(6)),
    "a digest of the base that was not asked for": lambda: _native.Digests(base=False, result=True).base(),
    "a digest of the result that was not asked for": lambda: _native.Digests(base=True, result=False).result(),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"differ|not|unknown"):
        call()


@pytest.mark.parametrize("room", [CHANGES - 1, CHANGES, CHANGES + 1])
def test_a_body_fills_exactly_the_room_that_it_said(room: int) -> None:
    positions, bits = np.full(CHANGES + 2, 7, np.uint32), np.full(2 * CHANGES + 4, 7, np.uint8)
    done = _native.ulp_decode(BASE.view(np.uint8), BODY, *BF16, positions[:room], bits[: 2 * room], False, None)
    assert done == (None if room == CHANGES else "corrupt")
    assert set(positions[room:]) == {7}
    assert set(bits[2 * room :]) == {7}
