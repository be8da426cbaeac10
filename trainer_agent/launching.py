"""Who this process is in the training job: rank, world size, and the launch that all its ranks share."""

from __future__ import annotations

import re
import secrets

import torch
import torch.distributed as dist

from trainer_agent.errors import Misuse

_LAUNCH = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LAUNCH_BYTES = 16


def resolve_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else from torch.distributed, else alone. Raises ``Misuse``."""
    if (rank is None) != (world_size is None):
        raise Misuse("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        if not _distributed():
            return 0, 1
        return dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < world_size:
        raise Misuse(f"rank {rank} is not one of a world of {world_size}")
    return rank, world_size


def resolve_launch(launch: str | None, rank: int, world_size: int) -> str:
    """The launch: as given, else agreed on over torch.distributed (a collective call), else random. ``Misuse``."""
    if launch is not None:
        if not _LAUNCH.fullmatch(launch):
            raise Misuse("launch is 1 to 128 of letters, digits and . _ : -, and the same on all ranks")
        return launch
    if world_size == 1:
        return secrets.token_hex(_LAUNCH_BYTES)
    if not _distributed() or dist.get_world_size() != world_size:
        raise Misuse(
            f"{world_size} ranks need one launch: initialise torch.distributed with that world size before making the "
            "Publisher, or pass launch, the same on all ranks and new at every start of the job"
        )
    return _broadcast(rank)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _broadcast(rank: int) -> str:
    """Rank 0 draws it. As a tensor: broadcasting objects would unpickle what comes over the network."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    drawn = torch.tensor(list(secrets.token_bytes(_LAUNCH_BYTES)), dtype=torch.uint8)
    value = (drawn if rank == 0 else torch.zeros_like(drawn)).to(device)
    dist.broadcast(value, src=0)
    return bytes(value.cpu().tolist()).hex()
