"""Where the project lies, for tests that look at the project itself."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def packages() -> tuple[str, ...]:
    return ("codec", "weight_store", "coordinator", "trainer_agent", "rollout_agent", "weightcast")
