"""Promise: whatever the bytes, a parser returns what they say or raises its package's error; it takes bounded memory,
and what it returns can be written and read again.

A bounded run of every fuzz target with a fixed seed; `make fuzz` goes on for longer. See docs/fuzzing.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from tests.fuzz.registry import TARGETS
from tests.fuzz.running import CORPUS, atheris_module, replay

ROOT = Path(__file__).parents[2]
EARLIER = sorted(path for path in CORPUS.glob("*/*"))

guided = pytest.mark.skipif(
    atheris_module() is None, reason="atheris, which guides the fuzzers, has no wheel for this Python or system"
)


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@pytest.fixture(scope="module")
def bounded_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One process for all targets: importing and instrumenting the project takes longer than most of them."""
    out = tmp_path_factory.mktemp("fuzz")
    return out, run("tests.fuzz", "--seed", "1", "--slow", "120", "--out", str(out)).stdout


@guided
@pytest.mark.parametrize("name", TARGETS)
def test_a_bounded_run_finds_nothing(name: str, bounded_run: tuple[Path, str]) -> None:
    out, told = bounded_run
    assert (out / name / "findings").is_dir(), told[-4000:]
    found = sorted((out / name / "findings").iterdir())
    assert not found, f"{found[0].read_bytes()[:400]!r}\n{told[-8000:]}"


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_earlier_stays_repaired(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replay(TARGETS[path.parent.name], path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_inputs_without_fault(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    assert all(len(seed) <= TARGETS[name].max_bytes for seed in seeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            replay(TARGETS[name], seed)


@guided
def test_planted_defects_are_found(tmp_path: Path) -> None:
    """Also those behind a checksum, and those that would take the process or the machine down."""
    told = run("tests.fuzz.planted", str(tmp_path)).stdout
    lines = [line for line in told.splitlines() if line.split(" ")[0] in ("checksum", "allocation", "hang", "crash")]
    assert lines == ["checksum 1 crash", "allocation 1 crash", "hang 1 timeout", "crash 1 crash"], told[-4000:]


def test_every_earlier_finding_has_its_target() -> None:
    assert {path.parent.name for path in EARLIER} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in EARLIER) < 1 << 16


def test_nothing_is_left_of_a_target_that_was_killed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    command = ["--target", "checkpoint-file", "--seconds", "600", "--out", str(tmp_path / "out")]
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "WEIGHTCAST_SHM_DIR": str(shared), "TMPDIR": str(shared)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(shared.glob("*/*/*.safetensors")):
            assert parent.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert parent.wait(60) == 1
    finally:
        parent.kill()
        parent.wait()
    assert list(shared.iterdir()) == []
