"""Tables that can be read on a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import os

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDE = 120
"""Columns from which on a table shows everything; below, what people need least is left to ``--json``."""
_PIPE = 10_000
"""Columns of no terminal: tables are as wide as their content, so that in a pipe each row is one line."""


def make_console() -> Console:
    """Standard output, as wide as the terminal or ``COLUMNS``; in a pipe, as wide as need be."""
    found = Console(highlight=False)
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_PIPE)


def make_table(title: str | None = None) -> Table:
    """A table with one line, below its head."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def add_columns(table: Table, *names: str, justify_right: bool = False) -> None:
    """Add columns that are never folded."""
    for name in names:
        table.add_column(name, justify="right" if justify_right else "left", no_wrap=True)
