"""Whatever a sidecar does instead of its work, it is ended and another one takes its place, or it is given up."""

from __future__ import annotations

import os
import queue
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainer_agent import Publisher, link
from trainer_agent.errors import SidecarFailed
from trainer_agent.link import Link
from trainer_agent.messages import MAX_LINE_BYTES, FullDone

SIDECAR = """
    #!{python}
    import os, socket, sys, time
    from pathlib import Path
    path, turns = sys.argv[sys.argv.index("--socket") + 1], Path({turns!r})
    with turns.open("a") as file:
        file.write(f"{{os.getpid()}}\\n")
    turn = len(turns.read_text().split())
    listening = socket.socket(socket.AF_UNIX)
    def accept():
        listening.bind(path)
        listening.listen()
        return listening.accept()[0]
    {code}
"""
WORK = "talk = accept(); talk.sendall({line!r}); time.sleep(600)"
OTHERWISE = {
    "ends": "sys.exit(3)",
    "never listens": "time.sleep(600)",
    "hangs up": "accept().close(); time.sleep(600)",
    "talks nonsense": 'talk = accept(); talk.sendall(b"what?\\n"); time.sleep(600)',
    "talks without an end": f'talk = accept(); talk.sendall(b"x" * {MAX_LINE_BYTES + 1}); time.sleep(600)',
}


@dataclass
class Stand:
    """A link to sidecars of a test's own, and what it tells."""

    folder: Path
    patch: pytest.MonkeyPatch
    told: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    link: Link | None = None

    def start(self, code: str) -> Link:
        """``code``: what each sidecar does, its ``turn``-th from 1 on."""
        program = self.folder / "sidecar"
        turns = str(self.folder / "turns")
        program.write_text(textwrap.dedent(SIDECAR).strip().format(python=sys.executable, turns=turns, code=code))
        program.chmod(0o755)
        self.patch.setattr(sys, "executable", str(program))
        return self.begin()

    def begin(self) -> Link:
        self.link = found = Link(
            self.folder / "socket",
            on_connect=lambda: self.told.put("connected"),
            on_event=self.told.put,
            on_loss=lambda: self.told.put("lost"),
            on_end=self.told.put,
        )
        found.start()
        return found

    @property
    def pids(self) -> list[int]:
        """Of all that were started."""
        return [int(pid) for pid in (self.folder / "turns").read_text().split()]


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    made = Stand(tmp_path, monkeypatch)
    yield made
    if made.link is not None:
        made.link.close(0)


def until(told: queue.SimpleQueue[Any], wanted: Callable[[Any], bool]) -> list[Any]:
    """What is told until then."""
    heard = [told.get(timeout=30)]
    while not wanted(heard[-1]):
        heard.append(told.get(timeout=30))
    return heard


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE)
def test_by_one_that_works(stand: Stand, otherwise: str) -> None:
    stand.patch.setattr(link, "START_TIMEOUT_S", 3.0)
    work = WORK.format(line=FullDone(slot=1).to_line())
    stand.start(f"if turn < 2: {otherwise}\n{work}")
    heard = until(stand.told, lambda told: isinstance(told, FullDone))
    assert heard[-1] == FullDone(slot=1)
    assert "lost" in heard
    *before, last = stand.pids
    assert not any(is_running(pid) for pid in before)
    assert stand.link is not None
    assert stand.link.pid == last


def test_not_where_none_can_be_started(stand: Stand) -> None:
    stand.patch.setattr(link, "MAX_RESTARTS", 2)
    stand.patch.setattr(sys, "executable", str(stand.folder / "nothing"))
    stand.begin()
    heard = until(stand.told, lambda told: isinstance(told, SidecarFailed))
    assert heard[:-1] == ["lost"] * 3
    assert "ended 3 times in a row" in str(heard[-1])


def test_not_when_the_trainer_ends(stand: Stand) -> None:
    """One that does not end by itself is ended."""
    made = stand.start("talk = accept(); time.sleep(600)")
    assert stand.told.get(timeout=30) == "connected"
    made.close(0)
    assert made.pid is None
    assert not is_running(stand.pids[0])
    assert stand.told.empty()


def test_however_often_if_something_is_published_in_between(
    service: Any, make_state: Any, moved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_RESTARTS", 1)
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(4):
            assert publisher.publish(state, step).sealed(60) == step + 1
            state = moved(state)
            os.kill(publisher.sidecar_pid or 0, signal.SIGKILL)
