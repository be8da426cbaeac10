"""The commands, as processes: what people and orchestrators see."""

from __future__ import annotations

import asyncio
import io
import json
import mmap
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_agent.disk import LocalDisk
from tests.rollout_agent.harming import edit, fill, forge
from tests.rollout_agent.training import Training
from weight_store.head import Head
from weight_store.keys import head_key
from weight_store.local import LocalStore
from weight_store.position import GENESIS
from weightcast import cli

ROOT = Path(__file__).parents[2]
ReadDir = Callable[[Path], dict[str, bytes]]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def weightcast(*arguments: object) -> Done:
    """What the command line does with these arguments, in this process: importing everything anew takes seconds."""
    stdout, stderr, argv, status = io.StringIO(), io.StringIO(), sys.argv, 0
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            sys.argv = ["weightcast", *map(str, arguments)]
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        finally:
            sys.argv = argv
    return Done(status, stdout.getvalue(), stderr.getvalue())


@contextmanager
def running(log: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "weightcast", *map(str, arguments)]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], Any], log: Path) -> Any:
    deadline = time.monotonic() + 40
    while not (found := condition()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found


def rollout(tmp_path: Path, *more: object) -> list[object]:
    options = ["--run", "tiny", "--region", "eu-west", "--model-dir", tmp_path / "model", "--poll", 0.05]
    return ["rollout", *options, "--store", f"file://{tmp_path}/bucket", *more]


@pytest.fixture
def published(tmp_path: Path) -> Training:
    training = Training(LocalStore(tmp_path / "bucket"))
    asyncio.run(training.publish())
    return training


def test_rollout_follows_reports_and_survives_kill(published: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    told, log, ready = tmp_path / "told", tmp_path / "agent.log", tmp_path / "ready"
    hook = f"sh -c 'echo {{version}} {{path}} >> {told}'"
    with running(
        tmp_path / "coordinator.log",
        *("coordinator", "--store", f"file://{tmp_path}/bucket", "--port", 0, "--poll", 0.05, "--ready-file", ready),
    ):
        address = until(lambda: ready.exists() and ready.read_text().strip(), tmp_path / "coordinator.log")
        arguments = rollout(tmp_path, "--coordinator", address, "--on-version", hook, "--agent-id", "a1")
        with running(log, *arguments) as process:
            for version in (1, 2):
                until(lambda v=version: told.exists() and len(told.read_text().splitlines()) == v, log)
                agents = until(lambda v=version: _serving(address, v), log)
                assert agents[0]["id"] == "a1"
                published.step()
                asyncio.run(published.publish())
            process.send_signal(signal.SIGKILL)  # wherever it is with the third
        with running(log, *arguments) as process:
            until(lambda: "3" in [line.split()[0] for line in told.read_text().splitlines()], log)
            until(lambda: _serving(address, 3), log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    assert read_dir(tmp_path / "model") == published.tensors(3)
    assert told.read_text().splitlines()[0] == f"1 {tmp_path}/model"
    assert "Traceback" not in log.read_text()


def test_verbose_tells_what_is_asked_of_the_store_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    log, nowhere = tmp_path / "agent.log", "s3://bucket/?endpoint=http://127.0.0.1:9&region=us-east-1"
    with running(log, *rollout(tmp_path, "--store", nowhere, "--verbose")):
        until(lambda: "cannot be reached: check that the store runs" in log.read_text(), log)
    assert "network; trying again\n" in log.read_text()


def test_one_that_starts_on_a_full_disk_waits_for_space(
    published: Training, small_tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    log, disk = tmp_path / "agent.log", small_tmpfs("2m")
    arguments = rollout(disk, "--store", f"file://{tmp_path}/bucket")
    assert weightcast(*arguments, "--once").returncode == 0
    published.step()
    asyncio.run(published.publish())
    others = fill(disk)
    assert "free space" in weightcast(*arguments, "--once").stderr
    with running(log, *arguments, "--on-version", "echo told {version}"):
        until(lambda: "waiting for space" in log.read_text(), log)
        others.unlink()
        until(lambda: "told 2" in log.read_text(), log)


def test_an_edited_file_is_repaired_while_the_command_runs(
    published: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    log, metrics, model = tmp_path / "agent.log", tmp_path / "weightcast.prom", tmp_path / "model"
    with running(log, *rollout(tmp_path, "--metrics-file", metrics, "--on-version", "echo hello {version}")):
        until(lambda: "hello 1" in log.read_text(), log)
        assert 'weightcast_faults_found_total{kind="working"} 0' in until(metrics.read_text, log)
        path = next(model.glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        with path.open("r+b") as file:
            file.write(data)
        gate = [sys.executable, "-m", "weightcast", "gate", "--model-dir", str(model), "--timeout", "40", "--", "true"]
        done = subprocess.run(gate, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert read_dir(model) == published.tensors(1)
        until(lambda: 'weightcast_groups_repaired_total{route="store"} 1' in metrics.read_text(), log)
    assert "is damaged: group" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_metrics_that_cannot_be_written_are_tried_again_and_said_once(published: Training, tmp_path: Path) -> None:
    log, metrics = tmp_path / "agent.log", tmp_path / "collected" / "weightcast.prom"
    tries = tmp_path / "collected" / "weightcast.prom.tmp"
    with running(log, *rollout(tmp_path, "--metrics-file", metrics)):
        until(lambda: "cannot write" in log.read_text(), log)
        # A directory in its place: the write fails a second time, now for another reason.
        tries.mkdir(parents=True)
        time.sleep(2.2)
        assert not metrics.exists()
        tries.rmdir()
        assert "weightcast_faults_found_total" in until(lambda: metrics.exists() and metrics.read_text(), log)
    assert log.read_text().count("cannot write") == 1


def _serving(address: str, version: int) -> list[dict[str, Any]]:
    regions = httpx.get(f"{address}/v1/runs/tiny/regions").json()
    agents = regions[0]["agents"] if regions else []
    return agents if agents and (agents[0]["report"]["serving"] or {}).get("version") == version else []


@pytest.fixture
def silently_rotten(published: Training, tmp_path: Path) -> Path:
    """A model directory with a wrong bit of which no stamp tells."""
    assert weightcast(*rollout(tmp_path, "--once")).returncode == 0
    edit(next((tmp_path / "model").glob("*.safetensors")))
    forge(tmp_path / "model")
    return tmp_path / "model"


def test_the_gate_hashes_everything_unless_told_not_to(silently_rotten: Path) -> None:
    gate = [sys.executable, "-m", "weightcast", "gate", "--model-dir", str(silently_rotten), "--timeout", "0.1"]
    refused = subprocess.run([*gate, "--", "true"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert ", expected " in refused.stderr
    assert "Traceback" not in refused.stderr
    told = subprocess.run(
        [*gate, "--no-verify", "--", "sh", "-c", "echo $WEIGHTCAST_VERSION"], cwd=ROOT, capture_output=True, text=True
    )
    assert (told.returncode, told.stdout.strip()) == (0, "1"), told.stderr


def test_the_scrub_of_the_command_finds_a_change_that_no_stamp_tells_of(
    published: Training, tmp_path: Path, memory_dir: Path, read_dir: ReadDir
) -> None:
    """In memory Linux notes the first store through a map to a page at most, and none after it."""
    log, metrics, told = tmp_path / "agent.log", tmp_path / "weightcast.prom", tmp_path / "told"
    options = ["--model-dir", memory_dir / "model", "--state-dir", tmp_path / "state", "--metrics-file", metrics]
    options += ["--on-version", f"sh -c 'echo {{version}} >> {told}'", "--scrub-every"]
    with running(log, *rollout(tmp_path, *options, 0)) as process:
        until(told.exists, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "weightcast_scrubbed_bytes_total 0\n" in metrics.read_text()

    path = next((memory_dir / "model").glob("*.safetensors"))
    with running(log, *rollout(tmp_path, *options, 0.5)):
        until(lambda: "weightcast_scrubbed_bytes_total 0\n" not in metrics.read_text(), log)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            before = LocalDisk().stat(path)
            data[-3] = data[-3]
            if LocalDisk().stat(path) != before:
                until(lambda: "weightcast_files_touched_total 1\n" in metrics.read_text(), log)
            data[-3] ^= 0x10
            until(lambda: 'weightcast_groups_repaired_total{route="' in _not_zero(metrics.read_text()), log)
        until(lambda: read_dir(path.parent) == published.tensors(1), log)
    assert "is damaged: group" in log.read_text()


def _not_zero(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.endswith(" 0"))


def test_rollout_once_then_inspect_and_verify(published: Training, tmp_path: Path) -> None:
    model, store = tmp_path / "model", f"file://{tmp_path}/bucket"
    assert weightcast(*rollout(tmp_path, "--once")).returncode == 0
    published.step(0.01)
    asyncio.run(published.publish())
    assert weightcast(*rollout(tmp_path, "--once")).returncode == 0

    shown = json.loads(weightcast("inspect", model, "--json").stdout)
    assert shown["version"] == str(published.position)
    assert shown["logs"] == 1
    assert "tiny" in weightcast("inspect", model).stdout
    elsewhere = weightcast("inspect", model, "--state-dir", tmp_path / "elsewhere")
    assert f"no checkpoint in {tmp_path}/elsewhere" in elsewhere.stderr
    run = json.loads(weightcast("inspect", "--store", store, "--run", "tiny", "--json").stdout)
    assert [row["version"] for row in run["rows"]] == [str(published.positions[v]) for v in (1, 2)]
    version = ["inspect", "--store", store, "--run", "tiny", "--version", 1]
    assert [row["rank"] for row in json.loads(weightcast(*version, "--json").stdout)["rows"]] == [0, 1]
    groups = json.loads(weightcast(*version, "--rank", 1, "--json").stdout)["rows"]
    assert all(row["full"] and len(row["digest"]) == 32 for row in groups)
    assert "weightcast: version 1 has ranks 0 to 1" in weightcast(*version, "--rank", 2).stderr
    assert "there is no run 'other'" in weightcast("inspect", "--store", store, "--run", "other").stderr

    for arguments in ([model], [model, "--store", store], ["--store", store, "--run", "tiny"]):
        assert weightcast("verify", *arguments).returncode == 0
    path = next(model.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for arguments in ([model], [model, "--store", store, "--json"]):
        bad = weightcast("verify", *arguments)
        assert bad.returncode == 1
        assert "expected" in bad.stdout
        assert "Traceback" not in bad.stderr
    shard = next((tmp_path / "bucket").rglob("v/000000000002/*.shard"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    bad = weightcast("verify", "--store", store, "--run", "tiny")
    assert bad.returncode == 1
    assert shard.name in bad.stdout


def test_a_run_without_a_version_is_shown_and_none_of_its_versions_is(tmp_path: Path) -> None:
    head = Head(run_id=str(uuid.uuid4()), term=1, launch="launch", position=GENESIS, write_id="0" * 16)
    asyncio.run(LocalStore(tmp_path / "bucket").create(head_key("tiny"), head.to_bytes()))
    run = ["inspect", "--store", f"file://{tmp_path}/bucket", "--run", "tiny"]
    assert json.loads(weightcast(*run, "--json").stdout)["term"] == 1
    for more in (["--version", 1], ["--rank", 0]):
        refused = weightcast(*run, *more)
        assert refused.returncode == 1
        assert "run 'tiny' has no sealed version" in refused.stderr


def test_once_is_done_only_when_the_engine_took_it(
    published: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    done = weightcast(*rollout(tmp_path, "--once", "--on-version", "sh -c 'echo no room; false'"))
    assert done.returncode == 1
    assert "ended with status 1 for version 1: no room" in done.stderr
    done = weightcast(*rollout(tmp_path, "--once", "--on-version", "false"))
    assert done.stderr.endswith("weightcast: false ended with status 1 for version 1\n")
    for _ in range(2):
        assert weightcast(*rollout(tmp_path, "--once", "--on-version", "true")).returncode == 0
        assert caplog.messages[-1] == "nothing is newer than version 1, which is serving"
    assert caplog.messages.count("version 1 is serving") == 1


def test_once_is_not_done_where_there_is_no_version(tmp_path: Path) -> None:
    Training(LocalStore(tmp_path / "bucket"))
    done = weightcast(*rollout(tmp_path, "--once"))
    assert done.returncode == 1
    assert "'tiny'" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--store", "nonsense://x"], "nonsense"),
        (["--run", "No Such Run"], "not a run name"),
        (["--on-version", "'open"], "cannot be split"),
        (["--include", "nothing.like.this"], "no tensor matches"),
    ],
)
def test_bad_options_end_in_one_sentence(published: Training, tmp_path: Path, change: list[str], said: str) -> None:
    done = weightcast(*rollout(tmp_path), "--once", *change)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_another_runs_directory_ends_in_one_sentence(published: Training, tmp_path: Path) -> None:
    assert weightcast(*rollout(tmp_path, "--once")).returncode == 0
    done = weightcast(*rollout(tmp_path, "--once", "--run", "other"))
    assert done.returncode == 1
    assert "belongs to run 'tiny'" in done.stderr


def test_a_bucket_that_is_not_there(s3_url: Callable[..., str], tmp_path: Path) -> None:
    url = s3_url("rollout-here").replace("rollout-here", "rollout-not-here")
    done = weightcast(*rollout(tmp_path, "--once", "--store", url))
    assert done.returncode == 1
    assert "rollout-not-here" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()
