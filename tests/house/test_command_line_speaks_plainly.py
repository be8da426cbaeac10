"""`weightcast` lists its commands quickly, every command explains itself, and an expected error is one sentence."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from weightcast.cli import _COMMANDS, cli

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightcast", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_every_listed_command_explains_itself(name: str) -> None:
    command = importlib.import_module(f"weightcast.commands.{name}").command
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0, shown.output
    assert command.help


def test_help_names_every_command_and_imports_none() -> None:
    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    assert all(f"  {name} " in shown.output for name in _COMMANDS)
    code = "import sys; from weightcast.cli import cli; cli(['-h'], standalone_mode=0); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_version_is_the_installed_one() -> None:
    assert run("--version").stdout.strip().endswith(version("weightcast"))


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["nonsense"], 2, "No such command"),
        (["demo", "--steps", "0"], 1, "at least one step must be published"),
        (["demo", "--regions", "99"], 1, "this demo knows 1 to 8 regions"),
        (["coordinator", "--store", "ftp://example.org/x"], 1, "ftp"),
        (["demo", "--model", "/"], 1, "no *.safetensors file there"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_never_a_traceback(arguments: list[str], status: int, sentence: str) -> None:
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_make_alone_lists_the_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == re.findall(
        r"^([a-z-]+):.*## ", makefile, re.MULTILINE
    )
    assert {f"make {name}" in shown for name in targets[1].split()} == {True}
