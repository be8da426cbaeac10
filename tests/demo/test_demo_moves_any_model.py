"""`--model DIR` publishes any Hugging Face directory, whatever its tensors are, and ends bit-exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_directory_of_awkward_tensors(model_dir: Path, start_demo: Callable[..., Any]) -> None:
    demo = start_demo("--steps", "3", "--regions", "1", "--ranks", "3", "--model", str(model_dir))
    assert demo.wait() == 0, demo.text()
    assert "version 3: step 3" in demo.text()
    assert " equal " in demo.text()
    assert demo.leftovers() == []
