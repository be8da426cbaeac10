"""The steady soak would see a leak: of a process that leaves something behind each time it is asked, not of another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.soak.holding import MEASURED_N, Holding, grows

_LEAKS = {
    "memory_mb": "kept.append(bytearray(b'x' * (1 << 20)))",
    "files": "kept.append(open('/dev/null'))",
    "threads": "kept.append(threading.Thread(target=threading.Event().wait, daemon=True)); kept[-1].start()",
    "maps": "kept += [mmap.mmap(-1, 4096, prot=1 + number % 2) for number in range(4)]",
    "children": "kept.append(subprocess.Popen(['true']))",
}
_LOOP = """
import mmap, subprocess, sys, threading
kept = []
for _ in sys.stdin:
    {}
    print(flush=True)
"""


@pytest.fixture
def asked() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", ["", *_LEAKS])
def test_what_a_process_leaves_behind_is_found(what: str, asked: list[subprocess.Popen[bytes]]) -> None:
    loop = _LOOP.format(_LEAKS.get(what, "pass"))
    process = subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    asked.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    holding = Holding()
    for _ in range(MEASURED_N):
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        holding.add_process("it", process.pid)
    found = " ".join(holding.grown())
    assert f": {what} grow" in found if what else found == ""


def test_what_levels_off_or_swings_is_not() -> None:
    assert not grows([min(number, 40) for number in range(100)], 10)
    assert not grows([100 * (number % 7) for number in range(100)], 10)
    assert not grows([9.0 * number / 100 for number in range(100)], 10)


def test_what_grows_slowly_or_in_leaps_is() -> None:
    assert grows([20.0 * number / 100 for number in range(100)], 10)
    assert grows([20.0 * (number // 15) for number in range(100)], 10)
