"""Rewrite the tree in README.md: every module with the first sentence of its docstring.

    python tools/tree.py [--check]

With ``--check`` nothing is written and the exit status is 1 if the tree is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PACKAGES = ("codec", "weight_store", "coordinator", "trainer_agent", "rollout_agent", "weightcast")
BEGIN, END = "<!-- tree: written by `make tree` -->\n", "<!-- end of tree -->\n"
_WIDTH = 110


def main(arguments: list[str]) -> int:
    """Bring README.md up to date, or say that it is not."""
    root = Path(__file__).resolve().parents[1]
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    fresh = before + BEGIN + "```text\n" + "\n".join(tree(root)) + "\n```\n" + END + after
    if fresh == text:
        return 0
    if "--check" in arguments:
        print("README.md: the tree is out of date; run `make tree`", file=sys.stderr)  # noqa: T201
        return 1
    readme.write_text(fresh, encoding="utf-8")
    return 0


def tree(root: Path) -> list[str]:
    """Return the lines of the tree."""
    lines: list[str] = []
    for package in PACKAGES:
        lines += _folder(root / package, package + "/", 0)
    return lines


def _folder(folder: Path, shown: str, depth: int) -> list[str]:
    indent = "  " * depth
    init = folder / "__init__.py"
    lines = [_line(indent + shown, _phrase(init) if init.exists() else "")]
    modules = [path for path in sorted(folder.glob("*.py")) if path.name not in {"__init__.py", "__main__.py"}]
    lines += [_line(f"{indent}  {path.name}", _phrase(path)) for path in modules]
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += _folder(path, path.name + "/", depth + 1)
    return lines


def _line(name: str, phrase: str) -> str:
    line = f"{name:<28} {phrase}".rstrip()
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1].rsplit(" ", 1)[0] + " …"


def _phrase(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", docstring.replace("``", "").split("\n\n")[0].replace("\n", " "))[0]
    return re.sub(r":mod:`~?([^`]*)`", r"\1", sentence).rstrip(".:")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
