"""``weightcast inspect``: show a run, a version, a shard or a model directory."""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollout_agent.disk import LocalDisk
from rollout_agent.gate import holds
from rollout_agent.places import Places, log_version
from rollout_agent.source import Source
from rollout_agent.state import Owner, Serving, State, load
from rollout_agent.verifying import check_kept
from weight_store.chain import Hop
from weight_store.layout import Group, PlacedPiece
from weight_store.opening import open_store
from weight_store.position import GENESIS
from weight_store.reading import read_head
from weightcast.commands._options import run_option, store_option
from weightcast.commands._tables import WIDE, add_columns, make_console, make_table
from weightcast.commands.verify import position_of

Row = dict[str, Any]

_LONG = ("tensors", "file")
"""Columns that come last and are folded."""
_NARROW_WITHOUT = ("digest",)


@click.command()
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--state-dir", type=click.Path(file_okay=False, path_type=Path), help="As given to the agent.")
@store_option(required=False)
@run_option(required=False, text="The run to show.")
@click.option("--version", type=click.IntRange(min=1), help="Show this version of the run.")
@click.option("--rank", type=click.IntRange(min=0), help="Show the groups in this rank's shard of the version.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(
    directory: Path | None,
    state_dir: Path | None,
    store_url: str | None,
    run: str | None,
    version: int | None,
    rank: int | None,
    as_json: bool,
) -> None:
    """Show a run, a version, a shard or a model directory.

    DIRECTORY alone: what an agent keeps there. --store and --run: the run and the versions its head leads to; with
    --version what each rank contributed; with --rank too, the groups in that rank's shard.
    """
    if directory is not None:
        if version is not None or rank is not None:
            raise click.UsageError("a DIRECTORY holds one version of all ranks: --version and --rank go without it")
        facts, rows = _directory(directory, state_dir)
    elif store_url is None or run is None:
        raise click.UsageError("name a DIRECTORY, or --store and --run")
    elif state_dir is not None:
        raise click.UsageError("--state-dir is that of a DIRECTORY's agent: name the DIRECTORY, too")
    else:
        facts, rows = asyncio.run(_bucket(store_url, run, version, rank))
    if as_json:
        click.echo(json.dumps({**facts, "rows": rows}))
    else:
        _show(make_console(), facts, rows)


def _directory(directory: Path, state_dir: Path | None) -> tuple[Row, list[Row]]:
    disk, places = LocalDisk(), Places.of(directory, state_dir)
    check_kept(places)
    owner, whole = load(disk, places.owner, Owner), holds(disk, places)
    state, serving = load(disk, places.checkpoint, State), load(disk, places.serving, Serving)
    if state is None:
        click.echo(f"no checkpoint in {places.state}; if the agent has another --state-dir, name it here too", err=True)
    facts: Row = {
        "directory": str(places.model),
        "state_dir": str(places.state),
        "run": owner.run if owner else None,
        "run_id": owner.run_id if owner else None,
        "version": str(whole.position) if whole else None,
        "step": whole.step if whole else None,
        "serving": str(serving.position) if serving else None,
        "checkpoint": str(state.version.position) if state else None,
        "include": list(state.include) if state else [],
        "logs": sum(log_version(name) is not None for name in disk.names(places.state)),
    }
    names = [name for name in disk.names(places.model) if disk.size(places.model / name) is not None]
    return facts, [{"file": name, "bytes": disk.size(places.model / name)} for name in names]


async def _bucket(store_url: str, run: str, version: int | None, rank: int | None) -> tuple[Row, list[Row]]:
    store = open_store(store_url)
    try:
        source = Source(store, run)
        head, _ = await read_head(store, run)
        facts: Row = {"run": run, "run_id": head.run_id, "term": head.term, "head": str(head.position)}
        if version is None and rank is None:
            if head.position == GENESIS:
                return facts, []
            return facts, await _run(source, head.position.version, facts)
        position = await position_of(store, run, version)
        loaded = await source.load(Hop(position, "delta", 0))
        facts |= {"version": str(position), "step": loaded.version.step, "layout": loaded.version.layout}
        if rank is None:
            return facts, [
                {
                    "rank": receipt.rank,
                    "groups": len(receipt.sizes),
                    "full": len(receipt.full),
                    "changed": sum(receipt.changed),
                    "bytes": receipt.shard_bytes,
                }
                for receipt in loaded.receipts
            ]
        if rank >= len(loaded.receipts):
            raise click.ClickException(f"version {position.version} has ranks 0 to {len(loaded.receipts) - 1}")
        ranges = [loaded.ranges[group.index] for group in loaded.layout.owned(rank)]
        return facts, [
            {
                "group": item.group.index,
                "tensors": _tensors(item.group),
                "dtype": item.group.dtype,
                "weights": item.group.elements,
                "changed": item.changed,
                "bytes": item.size,
                "full": item.full,
                "digest": item.digest.hex(),
            }
            for item in ranges
        ]
    finally:
        await store.close()


async def _run(source: Source, version: int, facts: Row) -> list[Row]:
    """The head's manifest, and the versions from the newest full to it."""
    head = await source.head()
    manifest = await source.manifest(head.position)
    facts |= {
        "step": manifest.step,
        "weights": manifest.elements,
        "weight_bytes": manifest.weight_bytes,
        "changed": manifest.changed,
        "payload_bytes": manifest.payload_bytes,
        "newest_full": manifest.full_version,
        "full_bytes": manifest.full_bytes,
        "assets": [asset.name for asset in manifest.assets],
    }
    rows: list[Row] = [{"version": str(link.position), "bytes": link.payload_bytes} for link in manifest.chain]
    return [*rows, {"version": str(head.position), "bytes": manifest.payload_bytes}]


def _tensors(group: Group) -> str:
    first, last = _name(group.pieces[0]), _name(group.pieces[-1])
    if len(group.pieces) == 1:
        return first
    parts = last.split(".")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first.split("."), parts, strict=False)))
    return f"{first} … {'.' if shared else ''}{'.'.join(parts[shared:])} ({len(group.pieces)} pieces)"


def _name(piece: PlacedPiece) -> str:
    whole = piece.box.sizes == piece.tensor.shape
    return piece.tensor.name if whole else f"{piece.tensor.name}{piece.box}"


def _show(console: Console, facts: Row, rows: list[Row]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(name, escape(_told(value)))
    console.print(grid)
    if not rows:
        return
    left_out = () if console.width >= WIDE else _NARROW_WITHOUT
    names = sorted((name for name in rows[0] if name not in left_out), key=lambda name: name in _LONG)
    table = make_table()
    for name in names:
        if name in _LONG:
            table.add_column(name, overflow="fold")
        else:
            add_columns(table, name, justify_right=isinstance(rows[0][name], int))
    for row in rows:
        table.add_row(*(escape(_told(row[name])) for name in names))
    console.print(table)


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
