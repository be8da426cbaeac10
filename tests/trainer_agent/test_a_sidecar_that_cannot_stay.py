"""A sidecar that ends again and again is given up: training goes on, is told at each step, and may start another."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_agent.silent import attached_desk
from trainer_agent import Publisher, link
from trainer_agent.errors import SidecarFailed, TrainerError
from trainer_agent.messages import Attached, Failed


@pytest.fixture
def no_more_sidecars(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``no_more_sidecars()``: from now on each ends as soon as it is started."""

    def forbid() -> None:
        monkeypatch.setattr(link.sys, "executable", "/bin/false")
        monkeypatch.setattr(link, "MAX_RESTARTS", 2)

    return forbid


def test_each_step_says_so_and_a_new_publisher_publishes(
    service: Any, make_state: Any, moved: Any, monkeypatch: pytest.MonkeyPatch, no_more_sidecars: Any
) -> None:
    options = {"run": "r", "store": service.store_url, "coordinator": service.url}
    state, known = make_state(), sys.executable
    with Publisher(**options) as publisher:
        assert publisher.publish(state, 0).sealed(30) == 1
        no_more_sidecars()
        os.kill(publisher.sidecar_pid, signal.SIGKILL)
        undecided = publisher.publish(moved(state), 1)
        with pytest.raises(SidecarFailed, match="ended 3 times in a row"):
            undecided.sealed(60)
        for step in (2, 3):
            assert isinstance(publisher.publish(moved(state), step).error, SidecarFailed)
        assert publisher.sidecar_pid is None
        with pytest.raises(SidecarFailed):
            undecided.serving(timeout=0)
    monkeypatch.setattr(link.sys, "executable", known)
    with Publisher(**options) as publisher:
        assert publisher.publish(moved(state), 4).sealed(30) > 1


def test_a_log_level_that_there_is_not_keeps_none_from_starting(
    service: Any, make_state: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEIGHTCAST_LOG", "loud")
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        assert publisher.publish(make_state(), 0).sealed(30) == 1
    assert "weightcast sidecar: WARNING WEIGHTCAST_LOG is 'loud', which is no level" in capfd.readouterr().err


def test_a_step_that_waits_for_a_full_waits_no_longer(tmp_path: Path) -> None:
    desk, arena, tell = attached_desk(tmp_path)
    tell(Attached(run_id="x", term=1, base_slot=0, full_slot=1))
    heard: list[TrainerError] = []

    def wait() -> None:
        try:
            desk.wait_for_slot(60)
        except TrainerError as error:
            heard.append(error)

    step = threading.Thread(target=wait, daemon=True)
    step.start()
    while not desk._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    tell(Failed(ordinal=None, code=SidecarFailed.code, message="it ended too often"))
    step.join(10)
    arena.remove()
    assert [type(error) for error in heard] == [SidecarFailed]
