"""``weightcast publish`` and ``weightcast trainer``: the real commands, on a real S3 server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer_agent.checkpoint import open_checkpoint
from trainer_agent.errors import InvalidPieces
from trainer_agent.watching import Found, already_sealed, next_to_publish, scan, step_of

WEIGHTCAST = [sys.executable, "-c", "from weightcast.cli import main; main()"]


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{i}.w": (torch.randn(300, 40, generator=generator) + step * 1e-3).to(torch.bfloat16)
        for i in range(3)
    }


def write_checkpoint(directory: Path, step: int) -> Path:
    """Two files and an index, as ``save_pretrained`` leaves them."""
    directory.mkdir(parents=True)
    whole = tensors(step)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(whole)}
    for file in set(files.values()):
        save_file({name: whole[name] for name in whole if files[name] == file}, directory / file)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


@pytest.fixture
def s3_service(make_service, s3_url, tmp_path) -> object:
    """A coordinator on a bucket of a real S3 server."""
    return make_service(s3_url("checkpoints", tmp_path.name))


def arguments(service: object) -> list[str]:
    return ["--run", "r", "--store", service.store_url, "--coordinator", service.url]


def test_publish_makes_one_version_and_the_next_is_a_delta(s3_service, tmp_path, check_same) -> None:
    for step in (5, 6):
        directory = write_checkpoint(tmp_path / f"checkpoint-{step}", step)
        command = [*WEIGHTCAST, "publish", str(directory), "--step", str(step), *arguments(s3_service)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert f"version {step - 4} (step {step}) sealed" in done.stdout
    found = s3_service.read("r")
    check_same(found.tensors, tensors(6))
    assert found.manifest.full_version == 1
    assert [asset.name for asset in found.manifest.assets] == ["config.json"]


def test_publish_names_what_is_wrong_with_a_directory(tmp_path) -> None:
    (tmp_path / "notes.txt").touch()
    command = [*WEIGHTCAST, "publish", str(tmp_path), "--step", "0", "--run", "r", "--store", "file:///nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"weightcast: {tmp_path} holds no safetensors files\n"


@pytest.fixture
def watch(s3_service, tmp_path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """``watch()`` starts the watcher on ``tmp_path/run``, with the marker STABLE."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "run").mkdir()

    def start() -> subprocess.Popen[str]:
        command = [*WEIGHTCAST, "trainer", "--watch", str(tmp_path / "run"), "--marker", "STABLE", "--poll", "0.05"]
        process = subprocess.Popen([*command, *arguments(s3_service)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_watcher_publishes_in_order_and_goes_on_where_it_was_stopped(s3_service, watch, tmp_path, check_same) -> None:
    run = tmp_path / "run"
    for step in (2, 10):
        (write_checkpoint(run / f"step_{step}", step) / "STABLE").touch()
    unfinished = write_checkpoint(run / "step_11", 11)
    watcher = watch()
    assert "0 checkpoints are published already" in watcher.stdout.readline()
    assert "version 1 (step 2) sealed" in watcher.stdout.readline()
    assert "version 2 (step 10) sealed" in watcher.stdout.readline()
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(60) == 0
    (unfinished / "STABLE").touch()
    watcher = watch()
    assert "2 checkpoints are published already" in watcher.stdout.readline()
    assert "version 3 (step 11) sealed" in watcher.stdout.readline()
    found = s3_service.read("r")
    check_same(found.tensors, tensors(11))
    assert found.manifest.full_version == 1
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(60) == 0


@pytest.mark.parametrize(
    ("name", "step"),
    [("step_100", 100), ("checkpoint-7", 7), ("12", 12), ("global_step3_hf", 3), ("v2-step9", 9), ("final", None)],
)
def test_the_step_is_the_last_number_of_a_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_only_settled_directories_count_and_one_written_again_is_new(tmp_path) -> None:
    for name in ("step_1", "step_2", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_1" / "STABLE").touch()
    (tmp_path / "logs" / "STABLE").touch()
    found = scan(tmp_path, "STABLE")
    assert [item.name for item in found] == ["step_1"]
    assert scan(tmp_path, None) == []
    done = already_sealed(found, 1)
    assert next_to_publish(scan(tmp_path, "STABLE"), done) is None
    time.sleep(0.01)
    (tmp_path / "step_1" / "STABLE").unlink()
    (tmp_path / "step_1" / "STABLE").touch()
    assert next_to_publish(scan(tmp_path, "STABLE"), done).name == "step_1"


def test_backlogs_are_published_from_the_lowest_step() -> None:
    found = [Found(10, "step_10", 1), Found(9, "step_9", 5)]
    assert next_to_publish(found, set()).step == 9
    assert next_to_publish(found, {found[1]}).step == 10
    assert already_sealed(found, None) == set()
    assert already_sealed(found, 9) == {found[1]}


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("{}", "not an index"),
        ("[]", "not an index"),
        ("{", "not an index"),
        ('{"weight_map": {"w": "../other.safetensors"}}', "outside its directory"),
        ('{"weight_map": {"w": "a.safetensors"}}', "names a.safetensors, which is not there"),
    ],
)
def test_an_index_is_not_trusted(tmp_path, index: str, sentence: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidPieces, match=sentence):
        open_checkpoint(tmp_path)


def test_a_damaged_file_is_named(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidPieces, match=r"model\.safetensors cannot be read"):
        list(open_checkpoint(tmp_path))
