"""``weightcast demo``: the whole path on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console


@click.command()
@click.option("--steps", default=20, show_default=True, help="Optimiser steps; each is published as one version.")
@click.option("--regions", default=3, show_default=True, help="Regions, with one rollout agent each.")
@click.option("--ranks", default=2, show_default=True, help="Ranks of the training job.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Move this Hugging Face directory by real AdamW steps instead of training the demo's own policy.",
)
@click.option("--store", help="With --coordinator: only train, and publish to this bucket.")
@click.option("--coordinator", help="Address of a coordinator that runs already.")
@click.option("--chaos", is_flag=True, help="Kill coordinator, agent, sidecar and trainer on the way.")
@click.option(
    "--warm-up",
    default=16,
    show_default=True,
    type=click.IntRange(0),
    help="Supervised steps before the first version.",
)
def command(
    steps: int,
    regions: int,
    ranks: int,
    model: Path | None,
    store: str | None,
    coordinator: str | None,
    chaos: bool,
    warm_up: int,
) -> None:
    """Run the whole path on this machine and prove it bit-exact.

    Starts an S3 server, the coordinator, a training job and a rollout agent per region, each its own process, on
    loopback. Exit status 0 only if every region ends with exactly the trainer's bytes. Leaves no process and no file.

    With --store and --coordinator it runs the training job alone, for a bucket, coordinator and agents of yours.
    """
    from weightcast.demo.join import run_job
    from weightcast.demo.run import run_demo
    from weightcast.demo.settings import DemoSettings

    settings = DemoSettings(steps, regions, ranks, model.absolute() if model else None, chaos, warm_up)
    signal.signal(signal.SIGTERM, _interrupt)
    if (store is None) != (coordinator is None):
        raise click.UsageError("--store and --coordinator go together: a training job needs both")
    if chaos and store is not None:
        raise click.UsageError("--chaos kills what the demo started, not what is yours: it goes without --store")
    try:
        if store is not None and coordinator is not None:
            run_job(settings, store, coordinator, Console())
            return
        equal = run_demo(settings, Console())
    except KeyboardInterrupt:
        raise click.Abort from None
    sys.exit(0 if equal else 1)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
