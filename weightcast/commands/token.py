"""``weightcast token``: make bearer tokens, and list those that a file of hashes admits."""

from __future__ import annotations

from pathlib import Path

import click

from coordinator import tokens
from coordinator.access import Scope
from coordinator.errors import TokenFileRefused

_file = click.option(
    "--file",
    "path",
    default=Path("tokens.jsonl"),
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of hashes.",
)


@click.group()
def command() -> None:
    """Make and list the tokens that a coordinator admits.

    The file holds hashes alone and is what 'weightcast coordinator --token-file' reads, again whenever it changes. To
    revoke a token delete its line. To rotate one add a new one, hand it out, then delete the old line.
    """


@command.command()
@click.option(
    "--scope",
    "scopes",
    required=True,
    multiple=True,
    type=click.Choice([scope.value for scope in Scope]),
    help="What it may be used for; may be given several times.",
)
@_file
@click.option("--note", default="", help="Who has it, for people.")
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the token to this new file, readable by you alone, instead of printing it.",
)
def new(scopes: tuple[str, ...], path: Path, note: str, secret_file: Path | None) -> None:
    """Make a token and print it, once.

    Give it to its user as WEIGHTCAST_TOKEN or in a file named by WEIGHTCAST_TOKEN_FILE, never on a command line.
    """
    issued = tokens.issue([Scope(scope) for scope in scopes], note[:200])
    if secret_file is not None:
        tokens.write_secret(secret_file, issued.token)
    try:
        tokens.add(path, issued.stored)
    except TokenFileRefused:
        if secret_file is not None:
            secret_file.unlink()
        raise
    if secret_file is None:
        click.echo(issued.token)
    click.echo(f"added {issued.stored.id} to {path}", err=True)


@command.command("list")
@_file
def list_(path: Path) -> None:
    """List ids, scopes and notes."""
    for stored in tokens.read(path).values():
        click.echo(f"{stored.id}  {','.join(stored.scopes)}  {stored.note}".rstrip())
