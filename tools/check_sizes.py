"""Hold the size budget: files of at most 400 lines, functions of at most 80, nine in ten of at most 30.

    python tools/check_sizes.py PACKAGE...

A function's lines are those of its body without the docstring, decorators and signature: a contract written out is
never a reason to split code. A file over the budget states why in ``_EXCUSED``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
USUAL_FUNCTION_LINES = 30
USUAL_SHARE = 0.9

_EXCUSED: dict[str, str] = {}
"""Path -> the reason why this file may be up to 600 lines."""


def main(roots: list[str]) -> int:
    """Print what breaks the budget and return 1, or print one line and return 0."""
    files = [path for root in roots for path in sorted(Path(root).rglob("*.py"))]
    problems = [problem for path in files for problem in _file_problems(path)]
    lengths = [length for path in files for _, _, length in _functions(path)]
    usual = sum(length <= USUAL_FUNCTION_LINES for length in lengths) / max(1, len(lengths))
    if usual < USUAL_SHARE:
        problems.append(f"only {usual:.1%} of the functions have at most {USUAL_FUNCTION_LINES} lines (want 90 %)")
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201 - a command line tool
    if not problems:
        print(f"check: sizes ({len(files)} files, {len(lengths)} functions, {usual:.1%} within 30 lines)")  # noqa: T201
    return 1 if problems else 0


def _file_problems(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = 600 if path.as_posix() in _EXCUSED else MAX_FILE_LINES
    if lines > limit:
        yield f"{path}: {lines} lines (at most {limit}): give one of its subjects a module of its own"
    for name, line, length in _functions(path):
        if length > MAX_FUNCTION_LINES:
            yield f"{path}:{line}: {name} has {length} lines (at most {MAX_FUNCTION_LINES})"


def _functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, lines of the body) of every function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield node.name, node.lineno, length


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
