"""One rank of the soak's training job: ``python -m tests.soak.rank JOB.json RANK``.

Every rank moves the whole model alike and publishes its blocks. Exit status 0: asked to finish; 3: another rank is
gone; 4: fenced; 5: could not start; 6: its sidecar is given up.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.soak.weights import BLOCKS, Bits, Log, digest, fresh, move, part
from trainer_agent import Handle, Piece, Publisher
from trainer_agent.errors import Fenced, SidecarFailed, TrainerError

_KEPT_STEPS = 12
_SEAL_S = 30.0


class Job:
    def __init__(self, about: dict[str, object], rank: int) -> None:
        self.about = about
        self.work, self.attempt, self.rank = Path(str(about["work"])), int(str(about["attempt"])), rank
        share = BLOCKS // int(str(about["world"]))
        self.first, self.last = rank * share, (rank + 1) * share
        self.log = Log(self.work / "published.jsonl")
        self.bits: Bits = {}
        self.step = 0
        self.undone: list[Handle] = []

    def agree(self, value: int, how: object = dist.ReduceOp.MAX) -> int:
        agreed = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(agreed, op=how)
        return int(agreed[0])

    def resume(self) -> None:
        steps = [_step_of(path) for path in self.work.glob("checkpoint-*.npz")] if self.rank == 0 else []
        self.step = self.agree(max(steps, default=0))
        self.bits = fresh(1)
        if self.step:
            with np.load(self.work / f"checkpoint-{self.step}.npz") as held:
                self.bits = {name: held[name].copy() for name in held.files}

    def save(self) -> None:
        if self.rank:
            return
        temporary = self.work / "temporary.npz"
        np.savez(temporary, **self.bits)
        temporary.rename(self.work / f"checkpoint-{self.step}.npz")
        for path in self.work.glob("checkpoint-*.npz"):
            if _step_of(path) < self.step - _KEPT_STEPS:
                path.unlink()

    def publish(self, publisher: Publisher) -> Handle:
        """What is about to be published is written down before."""
        blocks = {block: digest(self.bits, block) for block in range(self.first, self.last)}
        self.log.add(kind="published", attempt=self.attempt, step=self.step, blocks=blocks)
        handle = publisher.publish([self._piece(name, whole) for name, whole in self.bits.items()], self.step)
        self.undone.append(handle)
        return handle

    def _piece(self, name: str, whole: np.ndarray) -> Piece:
        mine = part(whole, self.first, self.last)
        start = self.first * (whole.shape[0] // BLOCKS)
        bits = mine.dtype == np.uint16
        tensor = torch.from_numpy(mine.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(mine)
        return Piece(name, whole.shape, (start, *[0] * (whole.ndim - 1)), tensor)

    def look(self) -> None:
        """Write down what was sealed or has failed since."""
        for handle in [handle for handle in self.undone if handle.done]:
            self.undone.remove(handle)
            facts = {"attempt": self.attempt, "step": handle.step, "version": handle.version}
            if handle.error is None:
                self.log.add(kind="sealed", **facts)
                continue
            self.log.add(kind="failed", code=handle.error.code, said=str(handle.error), **facts)
            if isinstance(handle.error, Fenced | SidecarFailed):
                raise handle.error

    def train(self, publisher: Publisher) -> None:
        """Until the file ``finish`` is there and one more version is sealed."""
        chance = np.random.default_rng([int(str(self.about["seed"])), self.attempt])
        while True:
            finish = self.agree((self.work / "finish").exists())
            self.step += 1
            move(self.bits, self.attempt, self.step, float(chance.choice([0.0, 0.003, 0.003, 0.02, 0.02, 0.6])))
            handle = self.publish(publisher)
            if self.step % 5 == 0:
                self.save()
            if finish:
                with contextlib.suppress(TrainerError, TimeoutError):
                    handle.sealed(_SEAL_S)
                if self.agree(handle.done and handle.error is None, dist.ReduceOp.MIN):
                    self.look()
                    return
            self.look()
            time.sleep(float(chance.choice(self.about["pauses_s"])))


def _step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _run(job: Job) -> None:
    about, rank = job.about, job.rank
    meeting = f"file://{job.work}/meeting-{job.attempt}"
    limit = datetime.timedelta(seconds=float(str(about["peer_s"])))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=int(str(about["world"])), timeout=limit)
    publisher = Publisher(
        run="soak",
        store=about["store"][rank],  # type: ignore[index]
        coordinator=about["coordinator"][rank],  # type: ignore[index]
        assets_dir=job.work / "assets",
        full_every=6,
        max_wait_s=float(str(about["max_wait_s"])),
        start_timeout_s=20.0,
        shm_dir=str(about["shm"]),
    )
    try:
        job.resume()
        job.train(publisher)
    except BaseException:
        publisher.close(1.0)
        raise
    publisher.close()


def main() -> int:
    job = Job(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format=f"rank {job.rank} of {job.attempt}: %(levelname)s %(message)s")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _run(job)
    except TrainerError as error:
        print(f"{error.code}: {error}", flush=True)
        status = 4 if isinstance(error, Fenced) else 6 if isinstance(error, SidecarFailed) else 5
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(
            sign in str(error) for sign in ("gloo", "imeout", "onnect")
        ):
            raise
        print(f"another rank is gone: {error}", flush=True)
        status = 3
    else:
        dist.destroy_process_group()
        return 0
    os._exit(status)  # gloo would wait for its peers


if __name__ == "__main__":
    sys.exit(main())
