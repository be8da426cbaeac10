"""``weightcast publish``: one checkpoint directory becomes one version."""

from __future__ import annotations

from pathlib import Path

import click

from trainer_agent.checkpoint import open_checkpoint
from trainer_agent.handle import Handle
from trainer_agent.publisher import Publisher
from weightcast.commands._seconds import Seconds
from weightcast.commands._trainer_options import dtype_of, publishing_options

_START_TIMEOUT_S = 120.0
"""A coordinator that has not answered by then is not there."""
_SILENT_S = 20.0
"""Nobody is left to wonder for longer."""


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--step",
    required=True,
    type=click.IntRange(min=0),
    help="The trainer's label of this version; it may repeat or go back, as after a resume.",
)
@publishing_options
@click.option("--timeout", default=3600.0, show_default=True, type=Seconds(min=0), help="Seconds to wait for the seal.")
def command(
    directory: Path, step: int, run: str, store: str, coordinator: str, dtype: str, full_every: int, timeout: float
) -> None:
    """Publish the Hugging Face checkpoint in DIRECTORY as one version of a run.

    Takes the run over: a trainer that still publishes to it is fenced. Every version after the first is a delta. Where
    a full is due (--full-every) it ends once that is uploaded, too; readers hear of it with the next version.
    """
    checkpoint = open_checkpoint(directory)
    with Publisher(
        run=run,
        store=store,
        coordinator=coordinator,
        rank=0,
        world_size=1,
        assets_dir=directory,
        strict=True,
        full_every=full_every,
        start_timeout_s=min(timeout, _START_TIMEOUT_S),
    ) as publisher:
        handle = publisher.publish(checkpoint, step, dtype=dtype_of(dtype))
        try:
            _wait(handle, timeout)
        except TimeoutError as error:
            raise click.ClickException(f"{error}: look at the coordinator and at the store") from None
        click.echo(sealed_line(handle))
        publisher.close(timeout)  # with a full that is due: no training is held up here


def _wait(handle: Handle, timeout_s: float) -> None:
    """Wait for the seal, and say after a while that it is waited for, and why."""
    try:
        handle.sealed(min(timeout_s, _SILENT_S))
    except TimeoutError as error:
        if timeout_s <= _SILENT_S:
            raise
        click.echo(f"{error}; waiting for {timeout_s:g} s in all (--timeout)", err=True)
        handle.sealed(timeout_s - _SILENT_S)


def sealed_line(handle: Handle) -> str:
    """One line about a sealed version."""
    stats = handle.stats
    if stats is None:
        return f"version {handle.version} (step {handle.step}) sealed"
    changed = 100 * stats.changed / max(1, stats.elements)
    share = 100 * stats.payload_bytes / max(1, stats.weight_bytes)
    return (
        f"version {handle.version} (step {handle.step}) sealed: {changed:.3f}% of the weights changed, "
        f"{stats.payload_bytes} bytes sent ({share:.3f}% of the weights)"
    )
