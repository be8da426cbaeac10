"""A short soak: killed, cut and harmed at random, real processes load only what was published and come to rest."""

from __future__ import annotations

from pathlib import Path

from tests.soak.soaking import soak


async def test_real_processes_come_to_rest(tmp_path: Path) -> None:
    assert await soak(2, 8.0, tmp_path / "soak", regions="ab", pace_s=0.7) == []
