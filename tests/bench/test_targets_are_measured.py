"""Promise: the tools that hold the codec to its targets run, and say what is missed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench import codec_small, codec_targets, codec_threads
from weightcast.measure import deltasets, iid


@pytest.fixture
def deltas(tmp_path: Path) -> Path:
    """A folder in which steady has a step 4, and no other regime is known."""
    rng = np.random.default_rng(0)
    now = rng.normal(0, 0.02, 4000).astype(np.float32).view(np.uint32) >> 16
    weights = [deltasets.Weights({"w": now.astype(np.uint16)}, {"w": (40, 100)})]
    deltasets.write_base(tmp_path, weights[0], "test")
    for step in range(1, 5):
        bits = weights[-1].bits["w"].copy()
        bits[rng.choice(4000, 20, replace=False)] += 1
        weights.append(deltasets.Weights({"w": bits}, {"w": (40, 100)}))
        deltasets.write_step(tmp_path, "steady", step, weights[-2], weights[-1])
    return tmp_path


def test_targets(deltas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = iid.generate

    def fewer(lr: float, seed: int) -> iid.Synthetic:
        return small(lr, "BF16", 1 << 16, seed)

    monkeypatch.setattr(iid, "generate", fewer)
    monkeypatch.setattr(codec_targets, "REAL", {("steady", 4): codec_targets.Target(0.0, 0.0, 1e9)})
    measured = list(codec_targets.rows(deltas, 1))
    assert [row.name for row in measured[:2]] == ["steady 3->4", "i.i.d. lr 1e-07"]
    assert measured[0].changed_percent == pytest.approx(0.5)
    assert measured[0].verdicts == (False, True, False)
    assert measured[-1].percent < 0.01  # nothing changed
    assert codec_targets.table(measured).splitlines()[2].count("MISSED") == 2


@pytest.mark.parametrize("part", [codec_small, codec_threads])
def test_small_tensors_and_threads(part: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "COUNT", 1 << 20)
    if part is codec_threads:
        monkeypatch.setattr(codec_threads, "CACHED", 1 << 14)
        monkeypatch.setattr(codec_threads, "CONTROL_ROUNDS", 1)
        if len(os.sched_getaffinity(0)) < 2:
            pytest.skip("one core")
    measured = list(part.rows(1))  # type: ignore[attr-defined]
    table: Callable[[object], str] = part.table  # type: ignore[attr-defined]
    assert len(table(measured).splitlines()) == 2 + len(measured)
