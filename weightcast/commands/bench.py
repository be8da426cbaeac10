"""``weightcast bench``: measure the codec on your own data, beside its peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weightcast.commands._seconds import Seconds

if TYPE_CHECKING:
    from weightcast.measure.bench import Case

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_CHECKPOINT = click.Path(exists=True, path_type=Path)
_USUAL_WEIGHTS = 1 << 24
_QUICK_WEIGHTS = 1 << 19


@click.group()
def command() -> None:
    """Measure the codec on your own data, beside its peers."""


@command.command("codec")
@click.option("--data", type=_DIRECTORY, help="A folder of deltas, as bench/make_deltas.py writes it.")
@click.option("--step", "steps", multiple=True, type=click.IntRange(min=1), help="Steps of --data (usually 4 and 7).")
@click.option(
    "--checkpoints",
    nargs=2,
    type=_CHECKPOINT,
    metavar="BASE NEW",
    help="Two checkpoints of one model: safetensors files or Hugging Face directories.",
)
@click.option("--case", "wanted", multiple=True, help="Only cases with this in their names, as in 'lr 1e-6'.")
@click.option(
    "--most", default=1024, show_default=True, type=click.IntRange(min=1), help="MiB of --checkpoints at most."
)
@click.option("--weights", type=click.IntRange(min=1000), help="Weights of each synthetic delta.")
@click.option("--cpu-seconds", default=0.4, show_default=True, type=Seconds(0, 60), help="To repeat each call for.")
@click.option("--seed", default=0, show_default=True, help="Of the synthetic deltas and the tiny model.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write bench.json, .md and .png here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of Markdown.")
def codec(
    data: Path | None,
    steps: tuple[int, ...],
    checkpoints: tuple[Path, Path] | None,
    wanted: tuple[str, ...],
    most: int,
    weights: int | None,
    cpu_seconds: float,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Size and speed of this codec and of the others that are installed, on the same deltas.

    Without --data and --checkpoints it trains a tiny model to have real deltas. Synthetic deltas, whose entropy is
    known exactly, are always there. Speeds are CPU time: run it on a machine that has nothing else to do.

    The peers are measured if they are installed (pip install fireworks-delta-compression basilica-sdk), the picture
    is drawn if matplotlib is.
    """
    from weightcast.measure import bench, cases, picture, report
    from weightcast.measure.timing import Budget

    def chosen() -> Iterator[Case]:
        found = False
        for case in known():
            if not wanted or any(text in case.name for text in wanted):
                found = True
                yield case
        if not found:
            raise click.UsageError(f"no case has {' or '.join(map(repr, wanted))} in its name")

    def known() -> Iterator[Case]:
        if data is not None:
            yield from cases.delta_set(data, steps)
        if checkpoints is not None:
            yield cases.checkpoints(*checkpoints, most_bytes=most << 20)
        if data is None and checkpoints is None:
            yield from cases.tiny(seed)
        yield from cases.synthetic(weights or (_USUAL_WEIGHTS if data or checkpoints else _QUICK_WEIGHTS), seed)

    if steps and data is None:
        raise click.UsageError("--step chooses among the steps of --data, which is not given")
    if out is not None:  # before it has measured for minutes
        out.mkdir(parents=True, exist_ok=True)
    budget = Budget(cpu_s=cpu_seconds)
    measured = bench.run(chosen(), budget=budget, progress=lambda what: click.echo(what, err=True))
    if out is not None:
        (out / "bench.json").write_text(report.to_json(measured), encoding="utf-8")
        (out / "bench.md").write_text(report.to_markdown(measured), encoding="utf-8")
        if not picture.draw(measured, out / "bench.png"):
            click.echo("no picture: matplotlib is not installed", err=True)
    click.echo(report.to_json(measured) if as_json else report.to_markdown(measured))
