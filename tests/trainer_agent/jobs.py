"""What each rank of the distributed tests runs: ``python jobs.py RANK WORLD_SIZE STORE COORDINATOR OUT``.

One process group plays one small training job after the other; each publishes under a run of its own and writes down
what the weights really were (gathered, which the publisher itself must never do).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_agent import Handle, Publisher, from_named_tensors, from_state_dict

STEPS = 2


@dataclass(frozen=True)
class Job:
    rank: int
    world_size: int
    store: str
    coordinator: str
    out: Path

    def publisher(self, run: str) -> Publisher:
        return Publisher(run=run, store=self.store, coordinator=self.coordinator)

    def publish(self, publisher: Publisher, given: Any, step: int, **options: Any) -> Handle:
        with nothing_is_gathered():
            handle = publisher.publish(given, step, **options)
        handle.sealed(60)
        return handle

    def write(self, run: str, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Write the whole state down; collective, because DTensors are gathered here."""
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
        if self.rank == 0:
            save_file({n: t.detach().clone().contiguous() for n, t in whole.items()}, self.out / f"{run}.{step}")


@contextmanager
def nothing_is_gathered() -> Iterator[None]:
    """Fail if anything asks for more of a DTensor than its local shard."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the publisher gathered a tensor")

    saved = {name: getattr(DTensor, name) for name in ("full_tensor", "redistribute")}
    try:
        for name in saved:
            setattr(DTensor, name, refuse)
        yield
    finally:
        for name, method in saved.items():
            setattr(DTensor, name, method)


class Policy(nn.Module):
    """Tied embeddings and extents that four ranks cannot share evenly; the bias has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(2)])
        self.head_bias = nn.Parameter(torch.zeros(3))
        self.lm_head = nn.Linear(12, 50, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.lm_head(hidden) + self.head_bias.sum()


def train(job: Job, run: str, mesh: Any) -> None:
    torch.manual_seed(0)
    model = Policy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with job.publisher(run) as publisher:
        for step in range(STEPS):
            loss = model(torch.randint(0, 50, (2, 8))).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            job.publish(publisher, model.state_dict(), step)
            job.write(run, step, model.state_dict())


def fsdp_uneven(job: Job) -> None:
    train(job, "fsdp-uneven", init_device_mesh("cpu", (job.world_size,)))


def hsdp(job: Job) -> None:
    train(job, "hsdp", init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "shard")))


def mixed(job: Job) -> None:
    """One model whose parts are held in as many ways as trainers hold them; the ranks give pieces of all of it."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("ep", "fsdp"))
    parts = {
        # Layers of a pipeline: rank r holds layer r, the last rank none.
        "pipeline": {f"pipeline.layers.{i}.w": torch.randn(8, 8) for i in range(job.world_size - 1)},
        # Experts shared out on dim 0, FSDP on dim 1 (unevenly): every box is strided in the checkpoint.
        "experts": {"experts.w1": torch.randn(4, 7, 6), "experts.w2": torch.randn(5, 6, 3)},
        # Full tensors that every rank iterates: a large one is shared out by rows.
        "full": {"full.big": torch.randn(701, 1024), **{f"full.small.{i}": torch.randn(5) for i in range(6)}},
        # Replicas: every rank offers all of it, each piece is uploaded once.
        "replicas": {f"replicas.layers.{i}.w": torch.randn(16, 16) for i in range(8)},
    }
    with job.publisher("mixed") as publisher:
        for step in range(STEPS):
            mine = [item for item in parts["pipeline"].items() if item[0].endswith(f"layers.{job.rank}.w")]
            sharded = {n: distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for n, t in parts["experts"].items()}
            pieces = [
                *from_named_tensors(mine),
                *from_state_dict(sharded),
                *from_named_tensors(parts["full"].items(), rank=job.rank, world_size=job.world_size),
                *from_state_dict(parts["replicas"]),
            ]
            job.publish(publisher, pieces, step)
            job.write("mixed", step, {name: t for part in parts.values() for name, t in part.items()})
            parts = {part: {name: t + 1e-3 for name, t in tensors.items()} for part, tensors in parts.items()}


JOBS: tuple[Callable[[Job], None], ...] = (fsdp_uneven, hsdp, mixed)


def main() -> None:
    rank, world_size, store, coordinator, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=int(rank), world_size=int(world_size))
    job = Job(int(rank), int(world_size), store, coordinator, Path(out))
    for run in JOBS:
        run(job)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
