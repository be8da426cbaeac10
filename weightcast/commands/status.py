"""``weightcast status``: ask the coordinator how far versions and regions are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from coordinator.client import CoordinatorClient, Credentials
from coordinator.wire import RegionAnswer, RunAnswer, VersionAnswer
from weightcast.commands._sizes import in_bytes

_STYLES = {"sealed": "green", "aborted": "red", "undecided": "yellow"}


@click.command()
@click.option(
    "--coordinator",
    "address",
    default="http://127.0.0.1:8470",
    show_default=True,
    envvar="WEIGHTCAST_COORDINATOR",
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
@click.option("--run", "name", help="One run in detail; without it, all runs.")
@click.option("--versions", "limit", default=10, show_default=True, type=click.IntRange(1, 500), help="How many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    address: str, token_file: Path | None, ca: Path | None, name: str | None, limit: int, as_json: bool
) -> None:
    """Show runs, or one run's newest versions and its regions."""
    client = partial(
        CoordinatorClient, address, credentials=Credentials.from_environment().overridden(token_file=token_file, ca=ca)
    )
    if name is None:
        runs = asyncio.run(_runs(client))
        if as_json:
            click.echo(json.dumps([run.model_dump(mode="json") for run in runs], indent=2))
        else:
            Console().print(_runs_table(runs))
        return
    run, versions = asyncio.run(_run(client, name, limit))
    if as_json:
        found = {
            "run": run.model_dump(mode="json"),
            "versions": [version.model_dump(mode="json") for version in versions],
        }
        click.echo(json.dumps(found, indent=2))
        return
    console = Console()
    for table in (_runs_table([run]), _versions_table(versions), _agents_table(run.regions)):
        console.print(table)
    for version in versions:
        if version.reason:
            console.print(f"version {version.version}: {version.reason}", style="red", markup=False)


async def _runs(connect: Callable[[], CoordinatorClient]) -> list[RunAnswer]:
    async with connect() as client:
        return await client.runs()


async def _run(
    connect: Callable[[], CoordinatorClient], name: str, limit: int
) -> tuple[RunAnswer, list[VersionAnswer]]:
    async with connect() as client:
        return await client.run(name), await client.versions(name, limit=limit)


def _runs_table(runs: Sequence[RunAnswer]) -> Table:
    table = Table(title="Runs" if len(runs) != 1 else None)
    for column in ("run", "version", "undecided", "term", "launch", "regions", "agents"):
        table.add_column(column)
    for run in runs:
        table.add_row(
            run.run,
            str(run.position.version),
            str(run.undecided or ""),
            str(run.term),
            run.launch,
            str(len(run.regions)),
            str(sum(len(region.agents) for region in run.regions)),
        )
    return table


def _versions_table(versions: Sequence[VersionAnswer]) -> Table:
    table = Table(title="Versions")
    for column in ("version", "step", "state"):
        table.add_column(column)
    for column in ("changed", "payload", "of weights", "encode", "upload", "seal"):
        table.add_column(column, justify="right")
    table.add_column("regions: staged, serving of agents")
    for version in versions:
        sealed = version.state == "sealed"
        table.add_row(
            str(version.version),
            str(version.step),
            f"[{_STYLES[version.state]}]{version.state}[/]",
            _share(version.changed, version.elements) if sealed else "",
            in_bytes(version.payload_bytes) if sealed else f"{version.receipts} of {version.world_size} ranks",
            _share(version.payload_bytes, version.weight_bytes) if sealed else "",
            _seconds(version.encode_s),
            _seconds(version.upload_s),
            _seconds(version.seal_s),
            ", ".join(f"{r.region} {r.staged}, {r.serving} of {r.agents}" for r in version.regions),
        )
    return table


def _agents_table(regions: Sequence[RegionAnswer]) -> Table:
    table = Table(title="Agents")
    for column in ("region", "target", "agent", "state", "staged", "serving", "heard from", "error"):
        table.add_column(column)
    for region in regions:
        for agent in region.agents:
            report = agent.report
            table.add_row(
                region.region,
                str(region.target or "head"),
                agent.id,
                report.state,
                str(report.staged or ""),
                str(report.serving or ""),
                f"{agent.age_s:.0f} s ago",
                # rich would take brackets in a foreign sentence for markup
                report.error.replace("[", r"\["),
            )
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3f} %" if whole else ""


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value else ""
