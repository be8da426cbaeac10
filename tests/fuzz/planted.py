"""``python -m tests.fuzz.planted FOLDER``: targets with a known defect each, to see that the fuzzers find them."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np

from tests.fuzz.budget import Budget
from tests.fuzz.reshaping import reshape_json, within
from tests.fuzz.running import fuzz
from tests.fuzz.target import Target


def _sealed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little") + body


def _behind_a_checksum(data: bytes) -> None:
    if len(data) > 4 and _sealed(data[4:]) == data and b"-1" in data:
        raise KeyError("a negative number")


def _allocates(data: bytes) -> None:
    np.empty(int.from_bytes(data[:6], "little"), np.uint8)


def _hangs(data: bytes) -> None:
    while data[:1] == b"!":
        pass


def _crashes(data: bytes) -> None:
    if data[:1] == b"!":
        import ctypes

        ctypes.string_at(0)


TARGETS = (
    Target(
        "checksum",
        _behind_a_checksum,
        lambda: [_sealed(b'{"a":1}')],
        within(lambda data: data[4:], reshape_json, lambda data, body: _sealed(body)),
    ),
    Target("allocation", _allocates, lambda: [bytes(6)]),
    Target("hang", _hangs, lambda: [b"?"], words=(b"!",)),
    Target("crash", _crashes, lambda: [b"?"], words=(b"!",)),
)


if __name__ == "__main__":
    for planted in TARGETS:
        found = fuzz(planted, Budget(runs=20_000, slow_s=2), Path(sys.argv[1]))
        print(planted.name, len(found), *(path.name.partition("-")[0] for path in found), flush=True)
