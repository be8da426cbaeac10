"""``weightcast doctor``: try out a store and say what is safe on it."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from dataclasses import asdict

import click

from weight_store.doctor import Diagnosis, Examination, Observations, diagnose
from weight_store.s3_settings import MIB
from weightcast.commands._options import store_option

_MARKS = {"ok": ("ok", "green"), "warning": ("!!", "yellow"), "failed": ("no", "red")}


@click.command()
@store_option()
@click.option("--writers", default=8, show_default=True, type=click.IntRange(2, 64), help="Connections that race.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(1, 1000), help="Races of each kind.")
@click.option(
    "--size",
    "size_mib",
    default=32,
    show_default=True,
    type=click.IntRange(11, 4096),
    help="MiB to time transfers with.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(store_url: str, writers: int, rounds: int, size_mib: int, as_json: bool) -> None:
    """Try out a store and say what is safe on it.

    Writes below _doctor/ in the store and removes it again; a directory keeps .tmp, where all its writers lock.
    Exit status 0 only if any number of coordinators and trainers may share the store.
    """

    def tell(line: str) -> None:
        if not as_json:
            click.echo(f"trying {line}", err=True)

    examination = Examination(store_url, secrets.token_hex(8), writers, rounds, size_mib * MIB, tell)
    seen = asyncio.run(examination.run())
    diagnosis = diagnose(seen)
    click.echo(json.dumps(_as_json(seen, diagnosis), indent=2) if as_json else _sentences(diagnosis))
    sys.exit(0 if diagnosis.safe else 1)


def _as_json(seen: Observations, diagnosis: Diagnosis) -> dict[str, object]:
    return {**asdict(diagnosis), "observations": asdict(seen)}


def _sentences(diagnosis: Diagnosis) -> str:
    lines = []
    for check in diagnosis.checks:
        mark, colour = _MARKS[check.state]
        lines.append(f"{click.style(mark, fg=colour)}  {check.name}: {check.sentence}")
    return "\n".join([*lines, "", f"{diagnosis.kind}: {diagnosis.verdict}"])
