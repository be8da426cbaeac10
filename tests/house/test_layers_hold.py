"""Who may import whom is lint: the project keeps every contract, and every contract would notice."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# Contract -> (module that breaks it, what it must not import).
OFFENCES = {
    "codec": ("codec.offender", "weight_store"),
    "pure-codec": ("codec.clock", "time"),
    "weight-store": ("weight_store.offender", "codec"),
    "coordinator": ("coordinator.offender", "torch"),
    "agents": ("trainer_agent.offender", "rollout_agent"),
    "agents-client": ("rollout_agent.offender", "coordinator.app"),
    "face": ("trainer_agent.intruder", "weightcast"),
    "client": ("coordinator.client", "fastapi"),
    "pure-store": ("weight_store.manifest", "time"),
    "pure-coordinator": ("coordinator.decisions", "asyncio"),
    "pure-agents": ("trainer_agent.decisions", "socket"),
}


def test_the_project_keeps_every_contract(root: Path) -> None:
    assert lint(root) == ""


@pytest.fixture
def stubs(root: Path, tmp_path: Path, packages: tuple[str, ...]) -> Path:
    """An empty module for every one that the contracts name, under the project's own configuration."""
    shutil.copy(root / ".importlinter", tmp_path)
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for section in contracts(root).values():
        for line in "\n".join(section.values()).split():
            parts = line.split(".")
            if parts[0] in packages and len(parts) > 1 and all(part.isidentifier() for part in parts):
                write_module(tmp_path, parts)
    return tmp_path


def test_stubs_alone_keep_every_contract(stubs: Path) -> None:
    assert lint(stubs) == ""


def test_breaking_a_contract_is_noticed_by_its_name(root: Path, stubs: Path) -> None:
    for module, forbidden in OFFENCES.values():
        write_module(stubs, module.split("."), f"import {forbidden}\n")
    complaints = lint(stubs)
    kept = [contract for contract in OFFENCES if f"{contracts(root)[contract]['name']} BROKEN" not in complaints]
    assert kept == [], complaints


def test_every_contract_has_an_offence_here_and_a_reason_in_its_name(root: Path) -> None:
    assert set(contracts(root)) == set(OFFENCES)
    assert all(": " in section["name"] or "never" in section["name"] for section in contracts(root).values())


def write_module(directory: Path, parts: list[str], text: str = "") -> None:
    """Write a module, and make every package on the way to it one."""
    for part in parts[:-1]:
        directory = directory / part
        directory.mkdir(exist_ok=True)
        (directory / "__init__.py").touch()
    (directory / f"{parts[-1]}.py").write_text(text)


def contracts(root: Path) -> dict[str, configparser.SectionProxy]:
    parser = configparser.ConfigParser()
    parser.read(root / ".importlinter")
    prefix = "importlinter:contract:"
    return {
        section.removeprefix(prefix): parser[section] for section in parser.sections() if section.startswith(prefix)
    }


def lint(directory: Path) -> str:
    """Everything import-linter has to say, on one line; empty if all contracts are kept."""
    # Without site's .pth files: the editable install would put this checkout in front of the stubs.
    code = (
        f"import sys; sys.path[:0] = [{str(directory)!r}, {sysconfig.get_path('purelib')!r}]; "
        "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=directory,
        env={"COLUMNS": "1000", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return "" if done.returncode == 0 else " ".join((done.stdout + done.stderr).split())
