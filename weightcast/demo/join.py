"""Runs the demo's training job alone, against a bucket and a coordinator that somebody else runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console

from trainer_agent.arena import DEFAULT_ROOT, remove_abandoned
from weightcast.demo import events
from weightcast.demo.errors import DemoError
from weightcast.demo.ranks import Ranks, environment
from weightcast.demo.settings import DemoSettings, JobSettings
from weightcast.demo.show import say_sealed
from weightcast.demo.story import Story

_POLL_S = 0.2


def run_job(settings: DemoSettings, store: str, coordinator: str, console: Console) -> None:
    """Train and publish ``settings.steps`` versions; ``DemoError`` if a rank gives up.

    Credentials come from this process: those of the store from ``AWS_*``, those of the coordinator from
    ``WEIGHTCAST_*``.
    """
    with contextlib.ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="weightcast-demo-"))
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        stack.callback(remove_abandoned, DEFAULT_ROOT)
        ours = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "WEIGHTCAST_"))}
        ranks = Ranks(environment(work, ours))
        stack.callback(ranks.end)
        job = JobSettings(
            store, coordinator, work, settings.ranks, settings.steps, model=settings.model, warm_up=settings.warm_up
        )
        ranks.start(job)
        finished: set[int] = set()
        story = Story(())
        while len(finished) < settings.ranks:
            _tell(ranks, story, finished, console)
            if ranks.ended() - finished:
                _tell(ranks, story, finished, console)
                ranks.check(finished)
            time.sleep(_POLL_S)


def _tell(ranks: Ranks, story: Story, finished: set[int], console: Console) -> None:
    for event in ranks.events():
        match event:
            case events.Failed(rank, message):
                raise DemoError(f"rank {rank} of the training job gave up: {message}")
            case events.Finished(rank, _):
                finished.add(rank)
            case events.Exported():
                pass
            case _:
                row = story.add(event)
                if row is not None:
                    say_sealed(console, row)
