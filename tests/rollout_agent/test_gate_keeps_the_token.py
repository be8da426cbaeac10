"""An engine that is started through the gate has no use for the token of whoever starts it, and does not get it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.rollout_agent.training import Training
from weight_store.local import LocalStore

WEIGHTCAST = [sys.executable, "-m", "weightcast"]
SHOW = "import os; print(*sorted(name for name in os.environ if name.startswith('WEIGHTCAST_')))"


def test_the_engine_is_told_its_version_and_no_token(tmp_path: Path) -> None:
    asyncio.run(Training(LocalStore(tmp_path / "bucket")).publish())
    where = ["--model-dir", str(tmp_path / "model"), "--store", f"file://{tmp_path}/bucket", "--once"]
    subprocess.run([*WEIGHTCAST, "rollout", "--run", "tiny", "--region", "eu-west", *where], check=True, timeout=60)
    secret = {"WEIGHTCAST_TOKEN": "wct_secret", "WEIGHTCAST_TOKEN_FILE": "/run/token", "WEIGHTCAST_CA": "/run/ca.pem"}
    gate = [*WEIGHTCAST, "gate", "--model-dir", str(tmp_path / "model"), "--", sys.executable, "-c", SHOW]
    done = subprocess.run(gate, env=os.environ | secret, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["WEIGHTCAST_CA", "WEIGHTCAST_RUN", "WEIGHTCAST_STEP", "WEIGHTCAST_VERSION"]
