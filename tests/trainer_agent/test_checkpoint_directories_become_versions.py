"""``weightcast publish`` and ``weightcast trainer``: the real commands, on a real S3 server."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from trainer_agent.checkpoint import open_checkpoint
from trainer_agent.errors import InvalidPieces
from trainer_agent.watching import Found, already_sealed, next_to_publish, scan, step_of
from weightcast.cli import cli, main
from weightcast.commands.trainer import Stopping

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


def publish(service: object, directory: Path, step: int) -> str:
    """Run ``weightcast publish`` (in this process: importing torch again would be most of the test)."""
    done = CliRunner().invoke(cli, ["publish", str(directory), "--step", str(step), *arguments(service)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def watch(s3_service, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """The watcher on ``tmp_path/run``, with the marker STABLE."""
    command = [*WEIGHTCAST, "trainer", "--watch", str(tmp_path / "run"), "--marker", "STABLE", "--poll", "0.05"]
    command += arguments(s3_service)
    with (
        (tmp_path / "errors.txt").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        yield process
        process.kill()


@pytest.fixture
def published_by_hand(s3_service, tmp_path, check_same) -> None:
    """Steps 2 and 5 as versions 1 and 2, the second a delta; in the watched directory there are more."""
    for version, step in ((1, 2), (2, 5)):
        directory = write_checkpoint(tmp_path / "run" / f"step_{step}", step)
        (directory / "STABLE").touch()
        assert f"version {version} (step {step}) sealed" in publish(s3_service, directory, step)
    found = s3_service.read("r")
    check_same(found.tensors, tensors(5))
    assert found.manifest.full_version == 1
    assert [asset.name for asset in found.manifest.assets] == ["config.json"]
    for step in (10, 9):
        (write_checkpoint(tmp_path / "run" / f"step_{step}", step) / "STABLE").touch()


def test_a_watcher_goes_on_after_what_is_sealed_in_order_and_ends_when_told(
    s3_service, published_by_hand, watch, tmp_path, check_same
) -> None:
    unfinished = write_checkpoint(tmp_path / "run" / "step_11", 11)
    assert "2 checkpoints are published already" in watch.stdout.readline()
    assert "version 3 (step 9) sealed" in watch.stdout.readline()
    assert "version 4 (step 10) sealed" in watch.stdout.readline()
    (unfinished / "STABLE").touch()
    assert "version 5 (step 11) sealed" in watch.stdout.readline()
    found = s3_service.read("r")
    check_same(found.tensors, tensors(11))
    assert found.manifest.full_version == 1
    other = tmp_path / "run" / "step_12"
    other.mkdir()
    save_file({"other": torch.ones(3)}, other / "model.safetensors")
    (other / "STABLE").touch()
    (write_checkpoint(tmp_path / "run" / "step_13", 13) / "STABLE").touch()
    assert "version 6 (step 13) sealed" in watch.stdout.readline()
    (said,) = (tmp_path / "errors.txt").read_text().splitlines()
    assert said.startswith("step_12 is left out: ")
    assert "other was added" in said
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(60) == 0


def test_publish_names_what_is_wrong_with_a_directory(tmp_path, monkeypatch, capsys) -> None:
    command = ["weightcast", "publish", str(tmp_path), "--step", "0", "--run", "r", "--store", "file:///nowhere"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"weightcast: {tmp_path} holds no safetensors files\n"


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
    (tmp_path / "events.3").touch()
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
        ('{"weight_map": {"w": "a.safetensors"}}', "names 'a.safetensors', which is not there"),
        (json.dumps({"weight_map": {"w": "a" * 300}}), "which is not there"),
        (json.dumps({"weight_map": {"w": "\ud800"}}), r"names '\\ud800', which is not there"),
        ('{"weight_map":' * 50_000, "not an index"),
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


def test_a_signal_that_comes_while_waiting_stops_the_watcher() -> None:
    """Whichever line it interrupts: the handler runs in the thread that waits, between any two of its lines."""
    for line in itertools.count():
        stopping, left = Stopping(), iter(range(line))

        def interrupt(*_: object, stopping: Stopping = stopping, left: Iterator[int] = left) -> object:
            if next(left, None) is None:
                sys.settrace(None)
                stopping.set()
            return interrupt

        def wait(stopping: Stopping = stopping, interrupt: Callable[..., object] = interrupt) -> None:
            sys.settrace(interrupt)  # of this thread
            stopping.wait(0.001)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive(), f"told to stop at line {line} of waiting, it waits for ever"
        if not stopping.is_set():
            break
    assert line > 3
