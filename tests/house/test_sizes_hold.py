"""The size budget is a gate: the project keeps it, and the gate would notice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def gate(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sizes", root / "tools" / "check_sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * lines


def test_the_project_is_within_budget(gate: ModuleType, root: Path, packages: tuple[str, ...]) -> None:
    assert gate.main([str(root / package) for package in packages]) == 0


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 401, "401 lines (at most 400)"),
        (function(81), "f has 81 lines (at most 80)"),
        (function(31), "only 0.0% of the functions"),
    ],
)
def test_what_is_over_budget_is_named(
    source: str, complaint: str, gate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large.py").write_text(source)
    assert gate.main([str(tmp_path)]) == 1
    assert complaint in capsys.readouterr().err


def test_a_docstring_costs_nothing(gate: ModuleType, tmp_path: Path) -> None:
    docstring = '    """Says\n' + "    much\n" * 60 + '    """\n'
    (tmp_path / "documented.py").write_text("def f():\n" + docstring + "    return 1\n")
    assert gate.main([str(tmp_path)]) == 0
