"""A sidecar that ends again and again is given up: training goes on, is told at each step, and may start another."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from trainer_agent import Publisher, link
from trainer_agent.errors import SidecarFailed


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
