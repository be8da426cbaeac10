"""``weightcast codec``: what your own checkpoints would cost as deltas."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightcast.commands._sizes import in_bytes

if TYPE_CHECKING:
    from weightcast.measure.stat import Bucket, FormatStat, Stat, TensorStat

_PATH = click.Path(path_type=Path)
_BAR_CELLS = 24


@click.group()
def command() -> None:
    """Tell what your own checkpoints would cost as deltas."""


@command.command("stat")
@click.argument("base", type=_PATH)
@click.argument("new", type=_PATH)
@click.option("--tensors", "most", default=40, show_default=True, type=click.IntRange(min=0), help="Tensors to list.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all tensors.")
def stat(base: Path, new: Path, most: int, as_json: bool) -> None:
    """Compare two checkpoints of one model: what changed from BASE to NEW, and what sending it would cost.

    BASE and NEW are safetensors files or Hugging Face directories. Nothing is written; one tensor is read at a time.
    """
    from weightcast.measure.pairs import TensorFiles, read_pairs
    from weightcast.measure.stat import measure

    with TensorFiles(base) as before, TensorFiles(new) as after:
        found = measure(read_pairs(before, after))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    console = Console()
    console.print(_summary(found))
    console.print(_formats_table(found.formats))
    if found.histogram:
        console.print(_histogram_table(found.histogram, found.changed))
    if most:
        console.print(_tensors_table(found.tensors, most))


def _summary(found: Stat) -> str:
    share = 100 * found.changed / max(1, found.elements)
    return (
        f"{found.changed:,} of {found.elements:,} weights changed ({share:.4f} %) in {len(found.tensors)} tensors, "
        f"{in_bytes(found.raw_bytes)}"
    )


def _formats_table(formats: tuple[FormatStat, ...]) -> Table:
    table = Table(title="Bytes that one rank would send")
    table.add_column("format")
    for column in ("size", "of weights", "to auto"):
        table.add_column(column, justify="right")
    default = max(1, formats[0].bytes)
    for row in formats:
        table.add_row(row.name, in_bytes(row.bytes), f"{row.percent:.4f} %", f"{row.bytes / default:.2f}")
    return table


def _histogram_table(histogram: tuple[Bucket, ...], changed: int) -> Table:
    table = Table(title="Steps of the changed weights, in units in the last place")
    table.add_column("ulps", justify="right")
    for column in ("up", "down", "of changed"):
        table.add_column(column, justify="right")
    table.add_column("")
    for bucket in histogram:
        share = (bucket.up + bucket.down) / changed
        name = f"{bucket.low} and more" if bucket.high is None else f"{bucket.low} to {bucket.high}"
        if bucket.low == bucket.high:
            name = str(bucket.low)
        bar = "█" * round(_BAR_CELLS * share)
        table.add_row(name, f"{bucket.up:,}", f"{bucket.down:,}", f"{100 * share:.3f} %", bar)
    return table


def _tensors_table(tensors: tuple[TensorStat, ...], most: int) -> Table:
    left_out = len(tensors) - most
    title = "Tensors" if left_out <= 0 else f"Tensors, the {most} with most changes ({left_out} left out)"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("tensor", overflow="fold")
    table.add_column("dtype")
    for column in ("weights", "changed", "largest step"):
        table.add_column(column, justify="right")
    shown = tensors if left_out <= 0 else sorted(tensors, key=lambda row: -row.changed)[:most]
    for row in shown:
        table.add_row(
            escape(row.name),
            row.dtype,
            f"{row.elements:,}",
            f"{100 * row.changed / max(1, row.elements):.4f} %",
            f"{row.largest_step:,}",
        )
    return table
