"""The program of one rank of the training job: ``python -m weightcast.demo.trainer JOB.json RANK``.

It is what a user's training loop looks like: a process group, a sharded model, an optimiser, and one ``publish`` after
each step. Around that it proves things: rewards vary, weights change, nothing sharded is ever gathered to publish.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from trainer_agent import Handle, Publisher, TrainerError
from trainer_agent.arena import DEFAULT_ROOT
from weightcast.demo import events
from weightcast.demo.boxes import save_bytes, save_places, sha256_of
from weightcast.demo.errors import DemoError
from weightcast.demo.files_job import FilesJob
from weightcast.demo.guard import nothing_gathered
from weightcast.demo.job import Job, PolicyJob, checked_step, load_checkpoint, save_checkpoint
from weightcast.demo.policy import PolicyConfig
from weightcast.demo.settings import RUN, JobSettings

_SEAL_TIMEOUT_S = 120.0
_HURRIED_CLOSE_S = 1.0
_NICENESS = 5


def main(arguments: list[str]) -> int:
    """Run rank ``arguments[1]`` of the job in ``arguments[0]``; an expected failure is told as an event."""
    settings, rank = JobSettings.load(Path(arguments[0])), int(arguments[1])
    # One thread a rank: the ranks are the parallelism, and agents share the cores.
    torch.set_num_threads(1)
    # Elsewhere agents have machines of their own; here training must not starve them.
    os.nice(_NICENESS)
    signal.signal(signal.SIGTERM, _leave)
    log = events.EventLog(settings.events(rank))
    try:
        with _process_group(settings, rank):
            _train(settings, rank, log)
    except (DemoError, TrainerError) as error:
        log.add(events.Failed(rank, str(error)))
        return 1
    finally:
        log.close()
    return 0


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def _process_group(settings: JobSettings, rank: int) -> Iterator[None]:
    # A file rather than a port: nobody can take it in between.
    meeting = f"file://{settings.work}/rendezvous-{settings.attempt}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=settings.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _make_job(settings: JobSettings, log: events.EventLog) -> Job:
    seed, rate = settings.seed, settings.learning_rate
    job: Job = (
        PolicyJob(seed=seed, learning_rate=rate)
        if settings.model is None
        else FilesJob(settings.model, seed=seed, learning_rate=rate)
    )
    if settings.resume_step is not None:
        load_checkpoint(job, settings.checkpoint(settings.resume_step, dist.get_rank()))
    else:
        total = settings.warm_up
        job.warm_up(total, lambda done, loss: log.add(events.Warming(done, total, loss)))
    return job


def _train(settings: JobSettings, rank: int, log: events.EventLog) -> None:
    job = _make_job(settings, log)
    save_places(settings.work / f"places-{rank}.json", job.boxes())
    with _publisher(settings) as publisher:
        handle: Handle | None = None
        watchers: list[threading.Thread] = []
        for step in range(settings.first_step, settings.last_step + 1):
            earned, changed, elements, step_s = checked_step(job, step)
            if rank == 0:
                reward, spread = (None, None) if earned is None else (earned.mean, earned.spread)
                log.add(events.Stepped(step, changed, elements, step_s, reward, spread))
            if handle is not None:
                _settle(handle)
            log.add(events.Exported(rank, step, sha256_of(job.boxes())))
            handle = _publish(job, publisher, step)
            if rank == 0:
                watchers.append(_watch(handle, log))
            if step == settings.checkpoint_step:
                save_checkpoint(job, settings.checkpoint(step, rank))
        if handle is not None:
            _settle(handle)
        for watcher in watchers:
            watcher.join()
        save_bytes(settings.work / f"testimony-{rank}.bin", job.boxes())
        log.add(events.Finished(rank, settings.last_step))


@contextlib.contextmanager
def _publisher(settings: JobSettings) -> Iterator[Publisher]:
    publisher = Publisher(
        run=RUN,
        store=settings.store,
        coordinator=settings.coordinator,
        assets_dir=_assets(settings),
        strict=True,
        shm_dir=settings.shared_memory or DEFAULT_ROOT,
    )
    try:
        yield publisher
    except BaseException:
        # Somebody wants to leave, or the demo has failed: nothing is worth waiting for.
        publisher.close(timeout=_HURRIED_CLOSE_S)
        raise
    publisher.close()


def _assets(settings: JobSettings) -> Path:
    """The directory whose config and tokenizer go with the weights."""
    if settings.model is not None:
        return settings.model
    directory = settings.work / f"assets-{settings.attempt}-{dist.get_rank()}"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(PolicyConfig().to_hugging_face(), indent=2))
    return directory


def _publish(job: Job, publisher: Publisher, step: int) -> Handle:
    with nothing_gathered(job.sharded()):
        return publisher.publish(job.published(), step=step, dtype=torch.bfloat16)


def _settle(handle: Handle) -> None:
    """Wait until a publication is a version; raises its error, as every version of the demo counts."""
    try:
        handle.sealed(_SEAL_TIMEOUT_S)
    except TimeoutError as error:
        raise DemoError(str(error)) from None


def _watch(handle: Handle, log: events.EventLog) -> threading.Thread:
    """Tell of a version as soon as it is sealed, while training goes on."""

    def watch() -> None:
        try:
            version = handle.sealed(_SEAL_TIMEOUT_S)
        except (TrainerError, TimeoutError):
            return  # the training loop meets the same error, and tells of it
        at_s, stats = time.monotonic(), handle.stats
        if stats is not None:
            log.add(
                events.Sealed(
                    step=handle.step,
                    version=version,
                    payload_bytes=stats.payload_bytes,
                    weight_bytes=stats.weight_bytes,
                    copy_s=stats.copy_s,
                    encode_s=stats.encode_s,
                    upload_s=stats.upload_s,
                    seal_s=stats.seal_s,
                    at_s=at_s,
                )
            )

    thread = threading.Thread(target=watch, name=f"step {handle.step}", daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
