"""``weightcast verify``: check a model directory or a version of the bucket against its digests."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from rollout_agent.verifying import Verdict, verify_dir, verify_dir_against, verify_version
from weight_store.errors import ChainError
from weight_store.opening import open_store
from weight_store.position import GENESIS, Position
from weight_store.reading import read_head, read_manifest
from weight_store.store import Store
from weightcast.commands._options import run_option, store_option


@click.command()
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@store_option(required=False, text="Compare with this bucket.")
@run_option(required=False, text="Without DIRECTORY: the run whose bucket objects are checked.")
@click.option("--version", type=click.IntRange(min=1), help="Without DIRECTORY: this version instead of the head.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    directory: Path | None,
    store_url: str | None,
    run: str | None,
    version: int | None,
    as_json: bool,
) -> None:
    """Check a model directory or a version of the bucket against its digests.

    With DIRECTORY every group of weights is hashed and compared with what the agent recorded, or with the bucket if
    --store is given. Without it every block of every object from the newest full to the version is. Exit status 1 if
    anything differs. A running agent repairs what was edited within seconds, and what rotted when its scrub or an
    engine at `weightcast gate` meets it; one that is started looks at everything.
    """
    if directory is not None:
        if version is not None:
            raise click.UsageError("a DIRECTORY holds one version: --version goes without it")
        verdict = asyncio.run(_directory(directory, store_url))
        _say_directory(directory, verdict, as_json)
        sys.exit(0 if verdict.good else 1)
    if store_url is None or run is None:
        raise click.UsageError("name a DIRECTORY, or --store and --run")
    faults = asyncio.run(_bucket(store_url, run, version, as_json))
    sys.exit(1 if faults else 0)


async def _directory(directory: Path, store_url: str | None) -> Verdict:
    if store_url is None:
        return await asyncio.to_thread(verify_dir, directory)
    store = open_store(store_url)
    try:
        return await verify_dir_against(store, directory)
    finally:
        await store.close()


def _say_directory(directory: Path, verdict: Verdict, as_json: bool) -> None:
    faults = verdict.findings.sentences()
    if as_json:
        position = verdict.whole.position
        body = {"run": verdict.whole.run, "version": position.version, "sha256": position.sha256}
        click.echo(json.dumps({**body, "groups": verdict.groups, "bytes": verdict.nbytes, "faults": faults}))
        return
    for fault in faults:
        click.echo(fault)
    outcome = "all good" if verdict.good else _counted(len(faults), "fault")
    click.echo(
        f"{directory}: version {verdict.whole.position} of {verdict.whole.run}, "
        f"{_counted(verdict.groups, 'group')}, {verdict.nbytes} bytes: {outcome}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


async def _bucket(store_url: str, run: str, version: int | None, as_json: bool) -> list[str]:
    store = open_store(store_url)
    faults: list[str] = []
    try:
        async for loaded, found in verify_version(store, run, await position_of(store, run, version)):
            faults += found
            if not as_json:
                size = sum(receipt.shard_bytes for receipt in loaded.receipts)
                state = "good" if not found else _counted(len(found), "damaged block")
                click.echo(f"version {loaded.hop.position} ({loaded.hop.kind}): {size} bytes, {state}")
    finally:
        await store.close()
    if as_json:
        click.echo(json.dumps({"run": run, "faults": faults}))
    else:
        for fault in faults:
            click.echo(fault)
    return faults


async def position_of(store: Store, run: str, version: int | None) -> Position:
    """The head's position, or that of an older version that its links lead to. ``ChainError`` if none do."""
    head, _ = await read_head(store, run)
    position = head.position
    while version is not None and position.version > version:
        manifest = await read_manifest(store, run, position)
        older = [link.position for link in manifest.chain if link.version <= version]
        position = older[-1] if older else (manifest.chain[0].position if manifest.chain else manifest.parent)
        if older and position.version != version:
            break
    if position == GENESIS or (version is not None and position.version != version):
        raise ChainError(f"run {run!r} has no sealed version {version or ''} before its head {head.position}")
    return position
