"""Whatever is wrong with what a command is given: one sentence that says what and where, and exit status 1 or 2."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast import cli

NOBODY = "http://127.0.0.1:1"


def weightcast(*arguments: str) -> tuple[int, str]:
    """Exit status and standard error, in this process: importing everything anew takes seconds."""
    stderr, argv = io.StringIO(), sys.argv
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        sys.argv = ["weightcast", *arguments]
        with redirect_stdout(io.StringIO()), redirect_stderr(stderr):
            cli.main()
    except SystemExit as stop:
        return int(stop.code or 0), stderr.getvalue()
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0, stderr.getvalue()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: files and directories of every wrong kind."""
    for name in [name for name in os.environ if name.startswith("WEIGHTCAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "bucket", "good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    save_file({"w": torch.ones(4)}, tmp_path / "good" / "model.safetensors")
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"abcdefgh")
    return tmp_path


@pytest.fixture
def full_disk(place: Path, small_tmpfs: Callable[[str], Path]) -> Path:
    directory = small_tmpfs("64k")
    (directory / "fill").write_bytes(bytes(64 << 10))
    return directory


PUBLISH = ("publish", "good", "--step", "1")
TRAINER = ("trainer", "--watch", "empty")
ROLLOUT = ("rollout", "--region", "eu", "--model-dir", "model", "--once")
HERE = ("--run", "r", "--store", "file://{place}/bucket")

CASES: list[tuple[tuple[str, ...], int, str]] = [
    ((), 2, "Usage"),
    (("coordinator",), 2, "Missing option '--store'"),
    (("coordinator", "--store", "s3:/x"), 1, "the store URL is s3://bucket/prefix"),
    (("coordinator", "--store", "bucket"), 1, "begins with neither s3:// nor file://"),
    (("coordinator", "--store", "file://{place}/file"), 1, "the store {place}/file is a file: name a directory"),
    (("coordinator", *HERE[2:], "--port", "70000"), 2, "70000 is not in the range"),
    (("coordinator", *HERE[2:], "--expire-after", "nan"), 2, "'nan' is not a number of seconds"),
    (("coordinator", *HERE[2:], "--poll", "inf"), 2, "'inf' is not a number of seconds"),
    (("coordinator", *HERE[2:], "--port", "0", "--ready-file", "no/where"), 1, "No such file or directory"),
    (("coordinator", *HERE[2:], "--token-file", "nothing"), 1, "the tokens cannot be read from nothing"),
    (("status", "--coordinator", "nonsense"), 1, "must look like http://host:port"),
    (("status", "--coordinator", NOBODY), 1, f"the coordinator at {NOBODY} does not answer: check that it runs"),
    (("status", "--coordinator", NOBODY, "--ca", "file"), 1, "file is no certificate authority in PEM form"),
    (("inspect",), 2, "name a DIRECTORY, or --store and --run"),
    (("inspect", *HERE), 1, "there is no run 'r' in this store"),
    (("inspect", "--run", "Bad Run", *HERE[2:]), 1, "'Bad Run' is not a run name"),
    (("inspect", "file"), 2, "'file' is a file"),
    (("inspect", "empty"), 1, "no agent has kept weights in"),
    (("inspect", "empty", "--version", "1"), 2, "--version and --rank go without it"),
    (("inspect", "empty", "--rank", "0"), 2, "--version and --rank go without it"),
    (("inspect", "--state-dir", "empty", *HERE), 2, "--state-dir is that of a DIRECTORY's agent"),
    (("verify",), 2, "name a DIRECTORY, or --store and --run"),
    (("verify", "empty", "--version", "1"), 2, "a DIRECTORY holds one version: --version goes without it"),
    (("verify", "empty"), 1, "no agent has kept weights in"),
    (("verify", *HERE), 1, "there is no run 'r' in this store"),
    (("verify", "--run", "r", "--store", "file://{place}/file"), 1, "is a file: name a directory"),
    (("gc", *HERE), 1, "there is no run 'r' in this store"),
    (("gc", *HERE, "--min-age", "banana"), 2, "'banana' is not a time such as 90s"),
    (("gate", "--model-dir", "empty", "--timeout", "0.1", "--", "true"), 1, "empty holds no whole version"),
    (("gate", "--model-dir", "empty", "--timeout", "nan", "--", "true"), 2, "'nan' is not a number of seconds"),
    (("doctor", "--store", "file://{place}/file"), 1, "is a file: name a directory"),
    (("token", "new", "--scope", "trainer", "--file", "no/where"), 1, "cannot be written to no/where"),
    (("token", "list", "--file", "nothing"), 1, "the tokens cannot be read from nothing"),
    (("publish", "empty", "--step", "1", *HERE), 1, "empty holds no safetensors files"),
    (("publish", "bad", "--step", "1", *HERE, "--coordinator", NOBODY), 1, "bad/model.safetensors cannot be read"),
    (("publish", "good", "--step", "-1", *HERE), 2, "-1 is not in the range"),
    ((*PUBLISH, *HERE, "--timeout", "nan"), 2, "'nan' is not a number of seconds"),
    ((*PUBLISH, "--run", "Bad Run", *HERE[2:]), 1, "'Bad Run' is not a run name"),
    ((*PUBLISH, "--run", "r", "--store", "s3:/x"), 1, "the store URL is s3://bucket/prefix"),
    ((*PUBLISH, *HERE, "--coordinator", "nonsense"), 1, "must look like http://host:port"),
    ((*PUBLISH, *HERE, "--coordinator", NOBODY, "--timeout", "0.5"), 1, "this launch has not begun run r"),
    (("trainer", "--watch", "nothing", *HERE), 2, "'nothing' does not exist"),
    ((*TRAINER, "--run", "r", "--store", "s3:/x"), 1, "the store URL is s3://bucket/prefix"),
    ((*TRAINER, "--run", "Bad Run", *HERE[2:]), 1, "'Bad Run' is not a run name"),
    ((*TRAINER, *HERE, "--marker", "a/b"), 2, "is the name of a file"),
    (("rollout", "--region", "eu", "--model-dir", "file", "--once", *HERE), 2, "'file' is a file"),
    ((*ROLLOUT, "--run", "Bad Run", *HERE[2:]), 1, "'Bad Run' is not a run name"),
    ((*ROLLOUT, *HERE, "--include", "re:("), 1, "the pattern 're:(' is not a regular expression"),
    ((*ROLLOUT, *HERE, "--coordinator", "nonsense"), 1, "must look like http://host:port"),
    ((*ROLLOUT, *HERE, "--poll", "nan"), 2, "'nan' is not a number of seconds"),
    ((*ROLLOUT, *HERE, "--notify", "nonsense"), 2, "--notify: is a URL such as http"),
    (("rollout", "--region", "EU West", *ROLLOUT[3:], *HERE), 2, "--region: 'EU West' is not 1 to 63"),
    ((*ROLLOUT, *HERE, "--agent-id", "a b"), 2, "--agent-id: 'a b' is not 1 to 128"),
    (("codec", "stat", "nothing", "file"), 1, "nothing"),
    (("bench", "codec", "--step", "3"), 2, "--data"),
    (("bench", "codec", "--data", "empty"), 1, "empty"),
    (("demo", "--model", "empty"), 1, "no *.safetensors file there"),
    (("demo", "--chaos", *HERE[2:], "--coordinator", NOBODY), 2, "--chaos kills what the demo started"),
]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    CASES,
    ids=lambda value: "-".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_it_is_a_sentence(place: Path, arguments: tuple[str, ...], status: int, sentence: str) -> None:
    before = files(place)
    code, said = weightcast(*(argument.format(place=place) for argument in arguments))
    assert code == status, said
    assert sentence.format(place=place) in said
    assert "Traceback" not in said
    assert files(place) == before


def test_a_model_that_is_no_file_is_not_blamed_on_an_index(place: Path) -> None:
    (place / "odd" / "model.safetensors").mkdir(parents=True)
    code, said = weightcast("codec", "stat", "good", "odd")
    assert code == 1
    assert "odd/model.safetensors is not a regular file" in said
    assert "index" not in said


def files(place: Path) -> list[Path]:
    """All but what a store in a directory and a model directory keep for themselves."""
    own = {".tmp", ".weightcast", "model"}
    return sorted(path for path in place.rglob("*") if path.is_file() and own.isdisjoint(path.parts))


def test_a_full_disk_is_a_sentence(full_disk: Path) -> None:
    code, said = weightcast(
        "bench", "codec", "--checkpoints", "good", "good", "--weights", "1000", "--out", str(full_disk / "out")
    )
    assert (code, "Traceback" in said) == (1, False)
    assert "No space left on device" in said


@pytest.mark.parametrize("command", [("doctor",), ("coordinator", "--port", "0")], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("option", "sentence"),
    [("size=64k", "No space left on device: free space"), ("ro", "Read-only file system: mount the file system")],
)
def test_a_disk_that_takes_nothing_is_not_blamed_on_the_store(
    full_disk: Path, command: tuple[str, ...], option: str, sentence: str
) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", full_disk], check=True)
    code, said = weightcast(*command, "--store", f"file://{full_disk}")
    last = said.splitlines()[-1]
    assert (code, "Traceback" in said) == (1, False)
    assert sentence in last
    assert "another store" not in said


def test_a_disk_that_fills_up_meanwhile_is_not_blamed_on_the_store(full_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", full_disk], check=True)
    code, said = weightcast("doctor", "--store", f"file://{full_disk}", "--size", "11")
    assert code == 1
    assert "No space left on device: free space" in said.splitlines()[-1]
    assert "another store" not in said


def test_ctrl_c_ends_a_publication_that_waits_without_a_traceback_or_a_process(place: Path) -> None:
    arguments = [*PUBLISH, "--run", "r", "--store", f"file://{place}/bucket", "--coordinator", NOBODY]
    with subprocess.Popen(
        [sys.executable, "-m", "weightcast", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        threads = Path(f"/proc/{process.pid}/task")
        deadline_s = time.monotonic() + 120
        while not (found := sidecars(threads)):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)


def sidecars(threads: Path) -> list[str]:
    """Process ids; each is a child of the thread that looks after it."""
    children = " ".join((path / "children").read_text() for path in threads.iterdir()).split()
    return [pid for pid in children if b"trainer_agent.sidecar" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_ctrl_c_while_modules_are_imported_ends_it_at_once(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "weightcast", "publish"], stderr=subprocess.PIPE, text=True
    ) as process:
        maps, deadline_s = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 120
        while "libtorch" not in maps.read_text() and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130, 2)  # 2: it was quicker, and misses the directory
    assert "Traceback" not in said


def test_a_reader_that_has_seen_enough_is_no_error(place: Path) -> None:
    script = f"{sys.executable} -m weightcast --help | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
