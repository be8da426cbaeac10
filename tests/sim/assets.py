"""Directories with the files beside the weights, as a training job names them: on a real disk, alone of all."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

CONFIGS = (b'{"model_type": "one"}', b'{"model_type": "another", "architectures": []}')


@cache
def assets_dir(number: int) -> Path:
    """A directory with the ``number``-th config.json and a tokenizer that is always the same."""
    found = Path(tempfile.mkdtemp(prefix="weightcast-sim-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    (found / "config.json").write_bytes(CONFIGS[number])
    (found / "tokenizer.json").write_bytes(b"{}")
    return found
