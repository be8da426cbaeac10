"""Directs a demo from the first process to the proof."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import httpx
from pydantic import TypeAdapter
from rich.console import Console

from coordinator.wire import RegionAnswer
from weightcast.demo import chaos, events
from weightcast.demo.cast import Cast
from weightcast.demo.engines import Claims, Engines
from weightcast.demo.errors import DemoError
from weightcast.demo.proof import prove
from weightcast.demo.settings import RUN, DemoSettings, JobSettings
from weightcast.demo.show import Show
from weightcast.demo.story import Story

_POLL_S = 0.2
_SILENCE_S = 180.0
"""A demo in which nothing happens for so long has failed."""
_REGIONS = TypeAdapter(tuple[RegionAnswer, ...])


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Run everything; True only if each region ends with the trainer's bytes.

    ``DemoError`` if a process ends early, an engine loads a wrong weight, or nothing happens for three minutes.
    """
    story = Story(settings.region_names)
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(Show(story, console))
        show.status("starting the S3 server")
        show.refresh()
        cast = stack.enter_context(Cast(settings.region_names))
        director = _Director(settings, cast, story, show)
        stack.enter_context(director.engines)
        director.start()
        director.follow()
        return director.prove()


class _Director:
    def __init__(self, settings: DemoSettings, cast: Cast, story: Story, show: Show) -> None:
        self._settings, self._cast, self._story, self._show = settings, cast, story, show
        self._claims = Claims(cast.work, settings.ranks)
        self.engines = Engines(settings.region_names, self._claims)
        self._plan = chaos.plan(settings.steps) if settings.chaos else chaos.Plan()
        self._blows = 0
        self._finished: set[int] = set()
        self._http = httpx.Client(base_url=cast.coordinator, timeout=5)
        self._job = JobSettings(
            store=cast.store,
            coordinator=cast.coordinator,
            work=cast.work,
            world_size=settings.ranks,
            last_step=settings.steps,
            model=settings.model,
            shared_memory=cast.memory,
            warm_up=settings.warm_up,
            checkpoint_step=self._plan.checkpoint_step,
        )

    def start(self) -> None:
        """Start coordinator, agents and training job."""
        self._show.status("starting the coordinator")
        self._show.refresh()
        self._cast.start_coordinator()
        for region, engine in self.engines.addresses.items():
            self._cast.start_agent(region, engine)
        self._start_job(self._job)

    def follow(self) -> None:
        """Show what happens until every region serves the last version."""
        heard_s = time.monotonic()
        while not self._done():
            before = self._progress()
            self._read_events()
            self._read_regions()
            self._strike()
            self.engines.check()
            self._cast.check()
            if self._cast.ranks.ended() - self._finished:
                self._read_events()
                self._cast.ranks.check(self._finished)
            self._show.status(self._words())
            self._show.refresh()
            if self._progress() != before:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > _SILENCE_S:
                raise DemoError(f"nothing happened for {_SILENCE_S:.0f} s; {self._cast.log_tails()}")
            time.sleep(_POLL_S)
        self._show.status("")
        self._show.refresh()

    def prove(self) -> bool:
        """Compare and show the result."""
        self._show.stop()
        proofs = prove(self._cast.work, self._settings.ranks, self._cast.model_dirs)
        self._show.prove(proofs, [self._claims.compared(region) for region in self._settings.region_names])
        return all(proof.equal for proof in proofs)

    def _start_job(self, job: JobSettings) -> None:
        self._job = job
        self._finished.clear()
        self._cast.ranks.start(job)

    def _done(self) -> bool:
        return len(self._finished) == self._settings.ranks and self._story.everywhere(self._story.newest)

    def _progress(self) -> tuple[object, ...]:
        story = self._story
        settled = sum(len(row.settled) for row in story.rows)
        return story.newest, story.training, story.warming, settled, self._blows, len(self._finished)

    def _read_events(self) -> None:
        for event in self._cast.ranks.events():
            match event:
                case events.Failed(rank, message):
                    raise DemoError(f"rank {rank} of the training job gave up: {message}")
                case events.Exported(rank, step, sha256):
                    self._claims.add(step, rank, sha256)
                case events.Finished(rank, _):
                    self._finished.add(rank)
                case _:
                    self._story.add(event)

    def _read_regions(self) -> None:
        """Ask the coordinator; while it is away nothing is learned, and nothing stops."""
        try:
            answer = self._http.get(f"/v1/runs/{RUN}/regions")
        except httpx.HTTPError:
            return
        if answer.is_success:
            for region in _REGIONS.validate_json(answer.content):
                for agent in region.agents:
                    staged, serving = agent.report.staged, agent.report.serving
                    self._story.report(
                        region.region, staged.version if staged else 0, serving.version if serving else 0
                    )

    def _strike(self) -> None:
        for blow in list(self._plan.due(self._story.newest, self._blows))[:1]:
            self._blows += 1
            self._show.say(f"chaos after version {self._story.newest}: {blow.value}")
            match blow:
                case chaos.Blow.COORDINATOR:
                    self._cast.restart("coordinator")
                case chaos.Blow.AGENT:
                    self._cast.restart(f"agent {self._settings.region_names[0]}")
                case chaos.Blow.SIDECAR:
                    self._cast.ranks.kill_sidecar()
                case chaos.Blow.RESUME:
                    self._resume()

    def _resume(self) -> None:
        self._cast.ranks.kill()
        self._read_events()
        job = dataclasses.replace(
            self._job, attempt=self._job.attempt + 1, resume_step=self._plan.checkpoint_step, checkpoint_step=None
        )
        self._start_job(job)

    def _words(self) -> str:
        if self._story.rows:
            return "training and publishing" if not self._finished else "waiting for every region to serve the last one"
        warming = self._story.warming
        if warming is None:
            return "starting the training job"
        return f"warming the policy up: step {warming.done} of {warming.total}" if self._show.is_live else "warming up"
