"""Nobody who enters through the gate ever loads a mixture, and nobody holds the agent up for ever."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.errors import CoordinatorUnreachable
from coordinator.wire import AgentReport
from rollout_agent import gate
from rollout_agent.agent import Agent, Pace
from rollout_agent.disk import LocalDisk
from rollout_agent.errors import NotWhole
from rollout_agent.gate import Visitor, shared
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from tests.rollout_agent.following import followed, until
from tests.rollout_agent.training import Training
from weight_store.local import LocalStore

ReadDir = Callable[[Path], dict[str, bytes]]
ROOT = Path(__file__).parents[2]

READER = """
import hashlib, json, sys, time
from pathlib import Path
from rollout_agent.gate import shared
from tests.rollout_agent.training import read_model
directory = Path(sys.argv[1])
print("ready", flush=True)
while True:
    with shared(directory, timeout_s=60) as whole:
        files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values()
        tensors = read_model({name: (directory / name).read_bytes() for name in set(files)})
        digest = hashlib.sha256(b"".join(tensors[name] for name in sorted(tensors))).hexdigest()
        print(json.dumps([whole.position.version, digest]), flush=True)
    time.sleep(0.002)
"""

AGENT = """
import asyncio, sys
from rollout_agent.replica import Replica
async def main():
    replica = await Replica.open(run="tiny", model_dir=sys.argv[1], store=sys.argv[2])
    while True:
        await replica.catch_up()
        await replica.checkpoint(force=True)
        print(replica.position.version, flush=True)
        await asyncio.sleep(0.01)
asyncio.run(main())
"""


def start(code: str, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    # A file, not a pipe: a reader that waits for somebody to empty a pipe would hold its lock meanwhile.
    with output.open("a") as log:
        return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=log, stderr=log)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


async def until_logged(condition: Callable[[], bool], *logs: Path) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("\n".join(log.read_text()[-2000:] for log in logs))


def last_line(log: Path) -> int:
    lines = log.read_text().splitlines()
    return int(lines[-1]) if lines and lines[-1].isdigit() else 0


def truth(training: Training, version: int) -> str:
    import hashlib

    digest = hashlib.sha256()
    tensors = training.tensors(version)
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


async def test_a_reader_in_a_loop_never_sees_a_mixture(tmp_path: Path) -> None:
    """Versions are applied, and the agent is killed and restarted, while another process loads all the time."""
    training = Training(LocalStore(tmp_path / "bucket"))
    url, model = f"file://{tmp_path}/bucket", tmp_path / "model"
    await training.publish()
    agent_log, reader_log = tmp_path / "agent.log", tmp_path / "reader.log"
    agent = start(AGENT, agent_log, str(model), url)
    reader = start(READER, reader_log, str(model))
    try:
        for number in range(6):
            training.step(0.9 if number % 4 == 3 else 0.04)
            version = (await training.publish()).version
            if number % 4 == 2:
                # Somewhere in the middle of whatever it does.
                await asyncio.sleep(0.02 * number)
                end(agent)
                agent = start(AGENT, agent_log, str(model), url)
            else:
                await until_logged(lambda v=version: last_line(agent_log) >= v, agent_log, reader_log)  # type: ignore[misc]
        seen_n = len(reader_log.read_text().splitlines())
        await until_logged(lambda: len(reader_log.read_text().splitlines()) > seen_n + 2, agent_log, reader_log)
    finally:
        end(reader)
        end(agent)
    seen = [json.loads(line) for line in reader_log.read_text().splitlines() if line.endswith("]")]
    assert len({version for version, _ in seen}) >= 3
    for version, digest in seen:
        assert digest == truth(training, version), f"a mixture at version {version}"


async def test_waits_for_a_whole_version(training: Training, tmp_path: Path) -> None:
    with pytest.raises(NotWhole, match="weightcast rollout"), shared(tmp_path, timeout_s=0.05):
        pass
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        waiting = asyncio.ensure_future(asyncio.to_thread(_enter, tmp_path))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await replica.catch_up()
        assert await waiting == 1


def _enter(path: Path) -> int:
    with shared(path, timeout_s=20) as whole:
        return whole.position.version


async def behind(training: Training, directory: Path) -> Replica:
    """A replica that holds version 1 of 2."""
    await training.publish()
    replica = await Replica.open(run="tiny", model_dir=directory, store=training.store)
    await replica.catch_up()
    training.step()
    await training.publish()
    return replica


async def stopped(replica: Replica) -> None:
    """Let it catch up as far as it comes while an engine loads, and stop it there."""
    work = asyncio.ensure_future(replica.catch_up())
    await asyncio.sleep(0.3)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_weights_wait_for_a_loading_engine(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    async with await behind(training, tmp_path) as replica:
        with shared(tmp_path, timeout_s=1):
            work = asyncio.ensure_future(replica.catch_up())
            await asyncio.sleep(0.3)
            assert read_dir(tmp_path) == training.tensors(1)
            # The agent has asked for its turn, so that no further reader gets in before it.
            with pytest.raises(NotWhole), shared(tmp_path, timeout_s=0.1):
                pass
        assert await work == training.position
    assert read_dir(tmp_path) == training.tensors(2)


async def test_an_agent_says_for_which_engine_a_version_waits(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that runs under the gate without a ready file keeps the directory for as long as it lives."""
    monkeypatch.setattr(gate, "_PATIENCE_S", 0.05)
    reports: list[AgentReport] = []

    class Coordinator:
        async def head(self, *_: Any, **__: Any) -> None:
            raise CoordinatorUnreachable("down")

        async def heartbeat(self, run: str, region: str, agent: str, report: AgentReport) -> None:
            reports.append(report)

    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        pace = Pace(poll_s=0.02, heartbeat_s=0.02)
        async with followed(Agent(replica, "tiny", "eu-west", "a1", cast("Any", Coordinator()), pace=pace)) as agent:
            await until(lambda: agent.status.state == "staged")
            with shared(tmp_path, timeout_s=10):
                training.step()
                await training.publish()
                await until(lambda: bool(reports) and "version 2 waits for an engine" in reports[-1].error)
            await until(lambda: reports[-1].staged == training.position and not reports[-1].error)
    said = f"version 2 waits for an engine that holds {tmp_path}/.weightcast/gate.lock"
    assert caplog.text.count(said) == 1
    assert "--ready-file" in caplog.text


async def test_stopping_does_not_wait_for_an_engine(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    replica = await behind(training, tmp_path)
    with shared(tmp_path, timeout_s=1):
        await stopped(replica)
        await replica.close()
    # The version was decided: it is carried out at the next start, without the store.
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        assert replica.position == training.position
        assert replica.fetched_bytes == 0
    assert read_dir(tmp_path) == training.tensors(2)


async def test_who_was_stopped_while_an_engine_loads_goes_on_when_asked_again(
    training: Training, tmp_path: Path
) -> None:
    async with await behind(training, tmp_path) as replica:
        with shared(tmp_path, timeout_s=1):
            await stopped(replica)
            again = asyncio.ensure_future(replica.catch_up())
            await asyncio.wait({again}, timeout=0.3)
        assert await again == training.position


async def test_closing_ends_whoever_waits_for_an_engine(training: Training, tmp_path: Path) -> None:
    replica = await behind(training, tmp_path)
    with shared(tmp_path, timeout_s=1):
        work = asyncio.ensure_future(replica.catch_up())
        await asyncio.sleep(0.3)
        await replica.close()
        await asyncio.wait({work}, timeout=20)
    with pytest.raises(NotWhole, match="stopping"):
        await work


def _cut(directory: Path) -> None:
    os.truncate(next(directory.glob("*.safetensors")), 10)


def _remove(directory: Path) -> None:
    next(directory.glob("*.safetensors")).unlink()


async def test_a_weight_file_that_was_cut_or_removed_is_not_whole(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await replica.catch_up()
        for damage in (_cut, _remove):
            damage(tmp_path)
            with pytest.raises(NotWhole), shared(tmp_path, timeout_s=0.05):
                pass
            await replica.catch_up()
            assert _enter(tmp_path) == 1


async def test_what_another_boot_left_is_not_whole(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await replica.catch_up()

    class Rebooted(LocalDisk):
        def boot_id(self) -> str:
            return "another"

    entered = Visitor(LocalDisk(), Places.of(tmp_path)).enter()
    assert entered is not None
    entered[0].release()
    assert Visitor(Rebooted(), Places.of(tmp_path)).enter() is None


def test_who_waits_long_for_a_whole_version_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "_PATIENCE_S", 0.05)
    with pytest.raises(NotWhole), shared(tmp_path, timeout_s=0.3):
        pass
    assert caplog.messages == [
        f"{tmp_path} holds no whole version; waiting for `weightcast rollout`: start it if none runs"
    ]


def test_the_command_holds_the_directory_while_it_runs(tmp_path: Path) -> None:
    training = Training(LocalStore(tmp_path / "bucket"))
    asyncio.run(training.publish())
    model, marker = tmp_path / "model", tmp_path / "loaded"
    command = [sys.executable, "-m", "weightcast", "gate", "--model-dir", str(model)]
    refused = subprocess.run([*command, "--timeout", "0.1", "--", "true"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no whole version" in refused.stderr
    assert "Traceback" not in refused.stderr

    async def catch_up() -> None:
        async with await Replica.open(run="tiny", model_dir=model, store=training.store) as replica:
            await replica.catch_up()

    asyncio.run(catch_up())
    told = subprocess.run(
        [*command, "--", "sh", "-c", "echo $WEIGHTCAST_RUN $WEIGHTCAST_VERSION; exit 7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (told.stdout.strip(), told.returncode) == ("tiny 1", 7)

    script = f"sleep 0.3; touch {marker}; sleep 30"
    process = subprocess.Popen([*command, "--ready-file", str(marker), "--", "sh", "-c", script], cwd=ROOT)
    try:
        lock = Places.of(model).gate_lock
        while not marker.exists():
            time.sleep(0.02)
        deadline = time.monotonic() + 20
        while (held := LocalDisk().try_lock(lock, shared=False)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert held is not None
        held.release()
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_command_holds_the_directory_also_when_the_gate_is_killed(tmp_path: Path) -> None:
    training = Training(LocalStore(tmp_path / "bucket"))
    asyncio.run(training.publish())
    model, started, go_on = tmp_path / "model", tmp_path / "started", tmp_path / "go-on"

    async def catch_up() -> None:
        async with await Replica.open(run="tiny", model_dir=model, store=training.store) as replica:
            await replica.catch_up()

    asyncio.run(catch_up())
    script = f"echo $$ > {started}; until test -e {go_on}; do sleep 0.05; done"
    command = [sys.executable, "-m", "weightcast", "gate", "--model-dir", str(model)]
    process = subprocess.Popen([*command, "--", "sh", "-c", script], cwd=ROOT)
    try:
        while not (started.exists() and started.read_text()):
            time.sleep(0.02)
    finally:
        end(process)
    lock = Places.of(model).gate_lock
    time.sleep(0.1)
    assert LocalDisk().try_lock(lock, shared=False) is None, "the command is loading still"
    go_on.touch()
    deadline = time.monotonic() + 20
    while (held := LocalDisk().try_lock(lock, shared=False)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert held is not None
    held.release()


def test_a_reader_without_write_permission_may_enter(tmp_path: Path) -> None:
    training = Training(LocalStore(tmp_path / "bucket"))
    asyncio.run(training.publish())
    model = tmp_path / "model"

    async def catch_up() -> None:
        async with await Replica.open(run="tiny", model_dir=model, store=training.store) as replica:
            await replica.catch_up()

    asyncio.run(catch_up())
    for path in (model / ".weightcast").iterdir():
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    with shared(model, timeout_s=1) as whole:
        assert whole.step == 0
