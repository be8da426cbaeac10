"""However the demo ends, no process and no file of it is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("sent", "moment"), [(signal.SIGINT, r"version 1: step 1"), (signal.SIGTERM, r"starting the training job")]
)
def test_ctrl_c_and_sigterm_in_the_middle(
    sent: signal.Signals, moment: str, model_dir: Path, start_demo: Callable[..., Any]
) -> None:
    demo = start_demo("--steps", "100000", "--regions", "1", "--model", str(model_dir))
    demo.wait_for_text(moment)
    assert len(demo.processes()) > 3
    demo.process.send_signal(sent)
    assert demo.wait(90) == 130, demo.text()
    assert "Traceback" not in demo.text()
    assert demo.leftovers() == []


def test_kill_9_in_the_middle(model_dir: Path, start_demo: Callable[..., Any]) -> None:
    demo = start_demo("--steps", "100000", "--regions", "1", "--model", str(model_dir))
    demo.wait_for_text(r"version 1: step 1")
    demo.process.kill()
    demo.wait(30)
    deadline = time.monotonic() + 60
    while demo.leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert demo.leftovers() == []
