"""``weightcast gc``: delete what no reader can reach and nobody will need, and say why."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import click

from weight_store.gc import Collector, Report, Wish
from weight_store.gc.plan import Verdict
from weight_store.opening import open_store
from weightcast.commands._options import store_option
from weightcast.commands._sizes import in_bytes

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SHOWN = 20


class _Duration(click.ParamType[float]):
    """A time such as 90s, 10m, 1h or 2d."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,9})([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time such as 90s, 10m, 1h or 2d", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


@click.command()
@store_option()
@click.option("--run", "run", required=True, help="The run to collect; WEIGHTCAST_RUN does not stand for it.")
@click.option("--keep-versions", type=click.IntRange(1), help="Keep this many of the newest sealed versions.")
@click.option("--floor", type=click.IntRange(1), help="Keep this version and all after it.")
@click.option(
    "--min-age",
    "min_age_s",
    default="1h",
    show_default=True,
    type=_Duration(),
    help="How long readers get to finish, by the store's clock. Longer than the slowest download takes. --dry-run, "
    "which writes nothing to read that clock from, goes by this machine's.",
)
@click.option("--no-wait", is_flag=True, help="Leave what has to age to the next call, as from cron.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and why, once the floor has aged; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every object.")
def command(
    store_url: str,
    run: str,
    keep_versions: int | None,
    floor: int | None,
    min_age_s: float,
    no_wait: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete old versions and the remains of failed ones.

    Without --keep-versions or --floor only remains go: shards of aborted versions and of attempts that lost, offers
    of past terms, unfinished uploads. The floor never passes what the head, or a version that a region is told to
    run, needs. May be interrupted at any time; the next call goes on.
    """
    if keep_versions is not None and floor is not None:
        raise click.UsageError("give --keep-versions or --floor, not both")
    wish = Wish(keep_versions, floor)
    report = asyncio.run(_collect(store_url, run, wish, min_age_s, wait=not no_wait, dry_run=dry_run))
    click.echo(json.dumps(_as_json(report), indent=2) if as_json else _sentences(report))


async def _collect(store_url: str, run: str, wish: Wish, min_age_s: float, *, wait: bool, dry_run: bool) -> Report:
    store = open_store(store_url)
    try:
        collector = Collector(store, run, min_age_s=min_age_s, tell=lambda line: click.echo(line, err=True))
        if dry_run:
            return await collector.preview(wish, time.time())
        return await collector.collect(wish, wait=wait)
    finally:
        await store.close()


def _as_json(report: Report) -> dict[str, object]:
    verdicts = [{"key": v.key, "bytes": v.size, "upload": v.upload is not None, "why": v.why} for v in report.doomed]
    verb = "would_delete" if report.dry_run else "deleted"
    return {
        "run": report.run,
        "head_version": report.head_version,
        "dry_run": report.dry_run,
        "floor": asdict(report.floor),
        "pending": report.pending,
        verb: verdicts,
        f"{verb}_bytes": sum(verdict.size for verdict in report.doomed),
        "kept": dict(Counter(verdict.why for verdict in report.verdicts if not verdict.delete)),
    }


def _sentences(report: Report) -> str:
    floor = report.floor
    would = "would " if report.dry_run else ""
    lines = [f"run {report.run}, head at version {report.head_version}, floor {floor.before}"]
    if floor.after > floor.before:
        lines.append(
            f"floor {would}rise to version {floor.after}" if would else f"floor raised to version {floor.after}"
        )
    if floor.limited_by:
        lines.append(f"no further, because {floor.limited_by}")
    if report.pending:
        lines.append("what lies below the floor has to age and stays for a later call")
    lines += _table(f"{would}delete" if would else "deleted", report.doomed)
    lines += _table("kept", [verdict for verdict in report.verdicts if not verdict.delete])
    return "\n".join(lines)


def _table(title: str, verdicts: Sequence[Verdict]) -> list[str]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for verdict in verdicts:
        counts[verdict.why] += 1
        sizes[verdict.why] += verdict.size
    total = sum(sizes.values())
    lines = [f"{title} {len(verdicts)} objects, {in_bytes(total)}" + (":" if verdicts else "")]
    lines += [f"  {count:6d}  {in_bytes(sizes[why]):>9}  {why}" for why, count in counts.most_common(_SHOWN)]
    rest = len(counts) - _SHOWN
    return lines + ([f"  and {rest} more reasons; --json lists every object"] if rest > 0 else [])
