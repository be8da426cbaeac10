"""One simulated world: a bucket, coordinators, training jobs, agents, garbage collection, all from one seed."""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from tests.rollout_agent.training import Spec, Training, Weights
from tests.sim.agents import OFTEN_S, WATCH_S, SimAgent
from tests.sim.clocks import Clock
from tests.sim.collectors import MIN_AGE_S, SimCollector
from tests.sim.coordinators import SimClient, SimCoordinator
from tests.sim.errors import Defect, Violation
from tests.sim.loop import Process, SimLoop
from tests.sim.model import RUN, Model
from tests.sim.network import Network
from tests.sim.store import Bucket, SimStore, retried
from tests.sim.trainers import Launch
from weight_store.memory import MemoryStore
from weight_store.retry import RetryingStore

KEPT_LINES = 400
STEPS_S = ((0.0, 0.5, 3.0), (0.0, 0.5, 3.0), (8.0,))
"""How long steps of training take: in some jobs each longer than publishing may hold it up."""
SPECS: tuple[tuple[Spec, ...], ...] = (
    (("layers.0.a", "BF16", (80, 30), "rows"), ("layers.0.b", "BF16", (30, 80), "cols"), ("norm", "F32", (16,), "all")),
    (("layers.0.a", "BF16", (80, 30), "0"), ("layers.0.b", "BF16", (30, 80), "1"), ("norm", "F32", (16,), "0")),
)
"""The same tensors, shared by the ranks in two ways: the layout changes from one launch to another."""


@dataclass
class World:
    """See the module. ``chance`` draws everything but weights, which come from ``numbers``."""

    seed: int
    loop: SimLoop
    run: str = RUN
    chaotic: bool = True
    over: bool = False
    jump: int = 0
    """The most versions that an engine went on at once, from one to another."""
    coordinators: list[SimCoordinator] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    agents: list[SimAgent] = field(default_factory=list)
    collectors: list[SimCollector] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=dict)
    _lines: list[tuple[float, str]] = field(default_factory=list)
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)
        self.full_every = self.chance.choice((0, 2, 3))
        self.watch_s = OFTEN_S if self.chance.random() < 0.1 else WATCH_S
        self.network = Network(self.chance)
        self.bucket = Bucket(self.loop)
        self.bucket.part_bytes = self.chance.choice((0, 0, 900, 4000))
        self.model = Model(self.bucket, MIN_AGE_S - 1.0)  # the store tells its time in whole seconds
        self.bucket.watcher = self._Watch(self)
        self._first = Training(MemoryStore(), specs=SPECS[0], seed=self.seed, aliases={}).weights

    # ---- what happens, and what may not

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        self._lines.append((self.loop.now_s, line))

    @property
    def digest(self) -> str:
        """Names everything that happened so far."""
        return hashlib.sha256("\n".join(self._told(self._lines)).encode()).hexdigest()

    @property
    def steps(self) -> int:
        """How much happened so far."""
        return len(self._lines)

    @property
    def trace(self) -> list[str]:
        """The last lines."""
        return self._told(self._lines[-KEPT_LINES:])

    @staticmethod
    def _told(lines: list[tuple[float, str]]) -> list[str]:
        return [f"{now_s:.4f} {line}" for now_s, line in lines]

    def violation(self, sentence: str) -> None:
        """A promise is broken, found where an exception would not reach the end of the run."""
        self._failure = self._failure or Violation(sentence)

    def defect(self, sentence: str, error: BaseException) -> None:
        """Production code raised what no rule foresees."""
        if isinstance(error, Violation):
            self._failure = self._failure or error
        else:
            self._failure = self._failure or Defect(f"{sentence}\n{''.join(traceback.format_exception(error))}")

    def check(self) -> None:
        """Raise what was found."""
        if self._failure is not None:
            raise self._failure
        if self.loop.defects:
            error = self.loop.defects[0]
            raise error if isinstance(error, Violation) else Defect(repr(error)) from error

    @dataclass
    class _Watch:
        """Hands the bucket's changes to the model; what it finds must not be taken for an answer of the store."""

        world: World

        def wrote(self, key: str, before: bytes | None, after: bytes) -> None:
            self._guarded(lambda: self.world.model.wrote(key, before, after))

        def deleted(self, key: str) -> None:
            self._guarded(lambda: self.world.model.deleted(key))

        def aborted(self, key: str) -> None:
            self._guarded(lambda: self.world.model.aborted(key))

        def _guarded(self, look: object) -> None:
            try:
                look()  # type: ignore[operator]
            except Exception as error:
                self.world.defect("the model", error)

    # ---- making things

    def nonce(self) -> str:
        """16 hex digits."""
        return f"{self.chance.getrandbits(64):016x}"

    def store(self, process: Process, node: str, *, distrust: Collection[str] = ()) -> RetryingStore:
        """The bucket as ``process`` sees it."""
        clock = self.clock(node)
        found = SimStore(
            self.bucket, self.network, process, node, clock, self.chance, self.note, distrust=frozenset(distrust)
        )
        return retried(found, clock, process, self.chance)

    def clock(self, node: str) -> Clock:
        """The clocks of a machine."""
        if node not in self.clocks:
            self.clocks[node] = Clock.draw(self.loop, self.chance)
        return self.clocks[node]

    def client(self, process: Process, node: str) -> SimClient:
        """A coordinator's client."""
        return SimClient(self, process, node)

    def launch(self) -> Launch:
        """Start the training job anew, from a checkpoint: one of the last publications, or the very first weights."""
        known = list(self.model.published.values())[-6:]
        weights: Weights = dict(self.chance.choice([*known, self._first]))
        found = Launch(
            world=self,
            name=f"launch-{len(self.launches)}",
            world_size=self.chance.choice((1, 2, 2)),
            specs=self.chance.choice(SPECS) if self.chance.random() < 0.3 else SPECS[0],
            weights=weights,
            first_step=self.chance.choice((0, 0, 0, 7)),
            max_wait_s=self.chance.choice((3.0, 30.0, 100.0)),
            assets=self.chance.choice((0, 0, 1)),
            steps_s=self.chance.choice(STEPS_S),
        )
        self.launches.append(found)
        found.start()
        return found
