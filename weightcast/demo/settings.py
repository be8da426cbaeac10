"""What a demo is asked to do, and what each rank of its training job is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from weightcast.demo.errors import DemoError

RUN = "demo"
REGIONS = ("eu-west", "us-east", "ap-south", "sa-east", "me-central", "af-south", "eu-north", "us-west")
MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """``steps`` optimiser steps, each published as one version, by ``ranks`` ranks to ``regions`` regions."""

    steps: int = 20
    regions: int = 3
    ranks: int = 2
    model: Path | None = None
    chaos: bool = False
    warm_up: int = 16

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DemoError(f"--steps {self.steps}: at least one step must be published")
        if not 1 <= self.regions <= len(REGIONS):
            raise DemoError(f"--regions {self.regions}: this demo knows 1 to {len(REGIONS)} regions")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise DemoError(f"--ranks {self.ranks}: 1 to {MAX_RANKS} ranks run on one machine")
        if self.chaos and self.steps < MIN_CHAOS_STEPS:
            raise DemoError(f"--chaos needs at least {MIN_CHAOS_STEPS} steps to have something to interrupt")
        if self.model is not None and not any(self.model.glob("*.safetensors")):
            raise DemoError(f"--model {self.model}: no *.safetensors file there; name a Hugging Face model directory")

    @property
    def region_names(self) -> tuple[str, ...]:
        """The regions of this demo, in the order in which they are shown."""
        return REGIONS[: self.regions]


MIN_CHAOS_STEPS = 6


@dataclass(frozen=True, slots=True)
class JobSettings:
    """One start of the training job. ``attempt`` counts starts; ``resume_step`` names the checkpoint to go on from.

    ``shared_memory`` is where ranks hand weights to their sidecars; None: where they always do.
    """

    store: str
    coordinator: str
    work: Path
    world_size: int
    last_step: int
    attempt: int = 0
    model: Path | None = None
    shared_memory: Path | None = None
    resume_step: int | None = None
    checkpoint_step: int | None = None
    learning_rate: float = 1e-6
    warm_up: int = 16
    seed: int = 7

    @property
    def first_step(self) -> int:
        """The first optimiser step that this start takes (they count from 1)."""
        return 1 if self.resume_step is None else self.resume_step + 1

    @property
    def path(self) -> Path:
        """The file in which the ranks of this start find these settings."""
        return self.work / f"job-{self.attempt}.json"

    def checkpoint(self, step: int, rank: int) -> Path:
        """Where rank ``rank`` keeps its part of the trainer's state after ``step``."""
        return self.work / f"checkpoint-{step:06d}-{rank}.safetensors"

    def events(self, rank: int) -> Path:
        """The file to which rank ``rank`` appends what happens."""
        return self.work / f"events-{self.attempt}-{rank}.jsonl"

    def save(self) -> None:
        """Write :attr:`path`."""
        self.path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, path: Path) -> JobSettings:
        """Read what :meth:`save` wrote."""
        fields = json.loads(path.read_text())
        for name in ("work", "model", "shared_memory"):
            fields[name] = Path(fields[name]) if fields[name] else None
        return cls(**fields)
