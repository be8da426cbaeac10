"""A bit that flips in anything that a killed agent left behind is named, counted and repaired at the next start."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout_agent.gate import shared
from rollout_agent.places import Places, is_checkpoint_name
from rollout_agent.replica import Replica
from tests.conftest import SHM_PREFIX
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Down, Training
from weight_store.local import LocalStore

ReadDir = Callable[[Path], dict[str, bytes]]
ROOT = Path(__file__).parents[2]
VERSIONS = 4

AGENT = """
import asyncio, sys, time
from pathlib import Path
from rollout_agent import replica as module
module.CHECKPOINT_SHARE = 100  # keep the logs of a model as small as this
async def main():
    model, state, bucket, done = sys.argv[1:]
    replica = await module.Replica.open(run="tiny", model_dir=model, state_dir=state, store=bucket, file_bytes=1500)
    for version in range(1, 5):
        while (await replica.catch_up()).version < version:
            await asyncio.sleep(0.01)
        await replica.checkpoint()
        Path(done).write_text(str(version))
    time.sleep(600)
asyncio.run(main())
"""


@dataclass
class Left:
    """What a killed agent left: the weights on tmpfs, a checkpoint of version 1 and three logs on disk."""

    training: Training
    model: Path
    state: Path

    async def open(self, store: object = None) -> Replica:
        return await Replica.open(
            run="tiny",
            model_dir=self.model,
            state_dir=self.state,
            store=store or self.training.store,  # type: ignore[arg-type]
            file_bytes=1500,
        )


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    """A run and the directories of its agent after a kill -9."""
    root = tmp_path_factory.mktemp("killed")
    training = Training(LocalStore(root / "bucket"))
    shm = Path("/dev/shm") / f"{SHM_PREFIX}killed"
    log, done = root / "log", root / "done"
    asyncio.run(training.publish())
    arguments = [str(shm / "model"), str(root / "state"), f"file://{root}/bucket", str(done)]
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", AGENT, *arguments], cwd=ROOT, stdout=output, stderr=output
            )
        try:
            for version in range(1, VERSIONS + 1):
                _until(lambda v=version: done.exists() and done.read_text() == str(v), log)  # type: ignore[misc]
                if version < VERSIONS:
                    training.step(0.02)
                    asyncio.run(training.publish())
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        shutil.copytree(shm / "model", root / "model")
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    return training, root


def _until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@pytest.fixture
def left(killed: tuple[Training, Path], memory_dir: Path, tmp_path: Path) -> Left:
    training, root = killed
    shutil.copytree(root / "model", memory_dir / "model")
    shutil.copytree(root / "state", tmp_path / "state")
    return Left(training, memory_dir / "model", tmp_path / "state")


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x04
    path.write_bytes(data)


def a_log(left: Left) -> Path:
    return sorted(left.state.glob("change-*.log"))[1]


def the_last_log(left: Left) -> Path:
    return sorted(left.state.glob("change-*.log"))[-1]


def a_layout(left: Left) -> Path:
    return next((left.state / "layouts").iterdir())


def an_asset_copy(left: Left) -> Path:
    return next((left.state / "assets").iterdir())


def a_working_file(left: Left) -> Path:
    return sorted(left.model.glob("*.safetensors"))[1]


def of_state(name: str) -> Callable[[Left], Path]:
    return lambda left: left.state / name


def of_model(name: str) -> Callable[[Left], Path]:
    return lambda left: left.model / name


VICTIMS: dict[str, tuple[Callable[[Left], Path], str]] = {
    "log": (a_log, "log"),
    "last log": (the_last_log, "log"),
    "state": (of_state("state.json"), "record"),
    "layout": (a_layout, "layout"),
    "asset": (an_asset_copy, "asset"),
    "whole": (of_model(".weightcast/whole.json"), "record"),
    "digests": (of_model(".weightcast/digests.json"), "record"),
    "weights": (a_working_file, "working"),
    "config": (of_model("config.json"), "asset"),
}


@pytest.mark.parametrize("victim", VICTIMS)
async def test_rot_is_named_counted_and_repaired(
    left: Left, read_dir: ReadDir, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    find, kind = VICTIMS[victim]
    path = find(left)
    flip(path)
    async with await left.open() as replica:
        assert await replica.catch_up() == left.training.positions[VERSIONS]
        with shared(left.model, timeout_s=20) as whole:
            assert whole.position.version == VERSIONS
            assert read_dir(left.model) == left.training.tensors(VERSIONS)
        counts = replica.faults.found_by_kind
        assert counts[kind] == 1
        assert sum(counts.values()) == 1
        # Weights come from the checkpoint and its logs; nothing else needs any.
        assert replica.fetched_bytes == 0
        assert path.name in caplog.text or "is damaged: group" in caplog.text
        await replica.checkpoint()
    # What was lost is there again: a reboot costs nothing.
    shutil.rmtree(left.model)
    async with await left.open(Down()) as replica:
        assert replica.position == left.training.positions[VERSIONS]
        assert read_dir(left.model) == left.training.tensors(VERSIONS)


async def test_a_rotten_checkpoint_is_named_counted_and_replaced(
    left: Left, read_dir: ReadDir, caplog: pytest.LogCaptureFixture
) -> None:
    copy = next(path for path in left.state.iterdir() if is_checkpoint_name(path.name))
    flip(sorted(copy.iterdir())[1], 0.99)
    shutil.rmtree(left.model)
    async with await left.open() as replica:
        assert await replica.catch_up() == left.training.positions[VERSIONS]
        assert 0 < replica.fetched_bytes < left.training.manifests[1].payload_bytes
        assert replica.faults.found_by_kind["working"] == replica.faults.found_by_kind["checkpoint"] == 1
        assert f"{copy.name} is damaged" in caplog.text
        await replica.checkpoint()
    shutil.rmtree(left.model)
    async with await left.open(Down()) as replica:
        assert replica.position == left.training.positions[VERSIONS]
    assert read_dir(left.model) == left.training.tensors(VERSIONS)


@pytest.mark.parametrize("shown", [True, False])
async def test_a_log_whose_layout_is_rotten_is_not_carried_out(
    training: Training, tmp_path: Path, read_dir: ReadDir, shown: bool
) -> None:
    places = Places.of(tmp_path)
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await replica.catch_up()
        training.step(0.01)
        await training.publish(world=training.world + 1)
        await replica.catch_up()
    assert places.log(2).exists()
    edit(places.layout(training.layouts[2]))
    if not shown:
        places.digests.unlink()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        assert replica.faults.found_by_kind["layout"] > 0
        assert replica.position == (training.position if shown else None)
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(2)
