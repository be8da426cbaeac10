"""``weightcast status``: ask the coordinator how far versions and regions are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from coordinator.client import CoordinatorClient, Credentials
from coordinator.wire import RegionAnswer, RunAnswer, VersionAnswer
from weight_store.position import Position
from weightcast.commands._options import run_option
from weightcast.commands._sizes import in_bytes
from weightcast.commands._tables import WIDE, add_columns, make_console, make_table

_STYLES = {"sealed": "green", "aborted": "red", "undecided": "yellow"}


@click.command()
@click.option(
    "--coordinator",
    "address",
    default="http://127.0.0.1:8470",
    show_default=True,
    envvar="WEIGHTCAST_COORDINATOR",
    show_envvar=True,
    help="Address of the coordinator.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with your token; else WEIGHTCAST_TOKEN or WEIGHTCAST_TOKEN_FILE.",
)
@click.option(
    "--ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Trust only this certificate authority (PEM); else WEIGHTCAST_CA.",
)
@run_option(required=False, text="One run in detail; without it, or empty, all runs.")
@click.option(
    "--versions", "limit", default=10, show_default=True, type=click.IntRange(1, 500), help="How many of the run's."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(address: str, token_file: Path | None, ca: Path | None, run: str | None, limit: int, as_json: bool) -> None:
    """Show runs, or one run's newest versions and its regions."""
    client = partial(
        CoordinatorClient, address, credentials=Credentials.from_environment().overridden(token_file=token_file, ca=ca)
    )
    if not run:
        runs = asyncio.run(_runs(client))
        if as_json:
            click.echo(json.dumps([run.model_dump(mode="json") for run in runs], indent=2))
        else:
            console = make_console()
            console.print(_runs_table(runs, wide=console.width >= WIDE) if runs else "no runs")
        return
    found, versions = asyncio.run(_run(client, run, limit))
    if as_json:
        document = {
            "run": found.model_dump(mode="json"),
            "versions": [version.model_dump(mode="json") for version in versions],
        }
        click.echo(json.dumps(document, indent=2))
        return
    console = make_console()
    wide = console.width >= WIDE
    tables = [_runs_table([found], wide=wide), _versions_table(versions, wide=wide)]
    if found.regions:
        tables += [_regions_table(found.regions, versions), _agents_table(found.regions, wide=wide)]
    for table in tables:
        console.print(table)
    for trouble in _troubles(versions, found.regions):
        console.print(trouble, style="red", markup=False)


async def _runs(connect: Callable[[], CoordinatorClient]) -> list[RunAnswer]:
    async with connect() as client:
        return await client.runs()


async def _run(
    connect: Callable[[], CoordinatorClient], name: str, limit: int
) -> tuple[RunAnswer, list[VersionAnswer]]:
    async with connect() as client:
        return await client.run(name), await client.versions(name, limit=limit)


def _runs_table(runs: Sequence[RunAnswer], *, wide: bool) -> Table:
    table = make_table("Runs" if len(runs) != 1 else None)
    table.add_column("run", overflow="fold")
    add_columns(table, "version", "undecided", "term", justify_right=True)
    if wide:
        add_columns(table, "launch")
    add_columns(table, "regions", "agents", justify_right=True)
    for run in runs:
        table.add_row(
            escape(run.run),
            str(run.position.version),
            str(run.undecided or ""),
            str(run.term),
            *([escape(run.launch)] if wide else []),
            str(len(run.regions)),
            str(sum(len(region.agents) for region in run.regions)),
        )
    return table


def _versions_table(versions: Sequence[VersionAnswer], *, wide: bool) -> Table:
    table = make_table("Versions")
    add_columns(table, "version", "step", justify_right=True)
    add_columns(table, "state")
    add_columns(table, "changed", "payload", "of weights", justify_right=True)
    if wide:
        add_columns(table, "encode", "upload", "seal", justify_right=True)
        table.add_column("regions: staged, serving of agents", overflow="fold")
    for version in versions:
        sealed = version.state == "sealed"
        times = (version.encode_s, version.upload_s, version.seal_s)
        table.add_row(
            str(version.version),
            str(version.step),
            f"[{_STYLES[version.state]}]{version.state}[/]",
            _share(version.changed, version.elements) if sealed else "",
            in_bytes(version.payload_bytes) if sealed else f"{version.receipts} of {version.world_size} ranks",
            _share(version.payload_bytes, version.weight_bytes) if sealed else "",
            *((*map(_seconds, times), _regions(version)) if wide else ()),
        )
    return table


def _regions(version: VersionAnswer) -> str:
    return ", ".join(f"{r.region} {r.staged}, {r.serving} of {r.agents}" for r in version.regions)


def _regions_table(regions: Sequence[RegionAnswer], versions: Sequence[VersionAnswer]) -> Table:
    """How far each region is with the newest sealed version that is shown."""
    newest = next((version for version in versions if version.state == "sealed"), None)
    progress = {r.region: r for r in newest.regions} if newest else {}
    table = make_table(f"Regions, version {newest.version}" if newest else "Regions")
    table.add_column("region", overflow="fold")
    add_columns(table, "target", "agents", "staged", "serving", "behind by", "for", justify_right=True)
    for region in regions:
        found = progress.get(region.region)
        row = (found.staged, found.serving, found.lag_versions, f"{found.lag_s:.0f} s") if found else ("",) * 4
        table.add_row(region.region, str(region.target or "head"), str(len(region.agents)), *map(str, row))
    return table


def _agents_table(regions: Sequence[RegionAnswer], *, wide: bool) -> Table:
    table = make_table("Agents")
    # No least width: rich widens a column to it after the widths were made to fit, and cuts the last one off.
    table.add_column("region", overflow="fold")
    table.add_column("agent", overflow="fold")
    add_columns(table, "state")
    add_columns(table, "staged", "serving", "heard from", justify_right=True)
    for region in regions:
        for agent in region.agents:
            report = agent.report
            table.add_row(
                region.region,
                agent.id,
                report.state,
                _position(report.staged, wide=wide),
                _position(report.serving, wide=wide),
                f"{agent.age_s:.0f} s ago",
            )
    return table


def _troubles(versions: Sequence[VersionAnswer], regions: Sequence[RegionAnswer]) -> list[str]:
    """Sentences that no column of a table has room for."""
    reports = [(region.region, agent) for region in regions for agent in region.agents]
    return [
        *(f"version {version.version}: {version.reason}" for version in versions if version.reason),
        *(f"{region}, {agent.id}: {agent.report.error}" for region, agent in reports if agent.report.error),
    ]


def _position(position: Position | None, *, wide: bool) -> str:
    if position is None:
        return ""
    return str(position if wide else position.version)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3f} %" if whole else ""


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value else ""
