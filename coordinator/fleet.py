"""What rollout agents report, summed up by region. Pure: time is passed in, nothing is stored on disk.

Heartbeats live in memory only: a coordinator that restarts knows its fleet again after one heartbeat interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.errors import TooBusy
from coordinator.wire import AgentAnswer, AgentReport, RegionAnswer, RegionVersion
from weight_store.control import Control
from weight_store.position import Position

Stage = Literal["sealed", "staged", "serving"]


@dataclass(frozen=True, slots=True)
class Agent:
    """The last heartbeat of one agent and when it came (monotonic seconds)."""

    region: str
    id: str
    report: AgentReport
    seen_s: float

    def alive(self, now_s: float) -> bool:
        """True until the report's time to live has passed."""
        return now_s - self.seen_s <= self.report.ttl_s

    @property
    def serving(self) -> int:
        """The version its engine serves; 0 for none."""
        return _version(self.report.serving)

    @property
    def staged(self) -> int:
        """The newest version verified on its host; 0 for none. What is served has been staged."""
        return max(_version(self.report.staged), self.serving)


def _version(position: Position | None) -> int:
    return position.version if position else 0


@dataclass(frozen=True, slots=True)
class Room:
    """What clients can make us hold at most: agents of all runs, of one region, and regions of a run."""

    agents: int = 50_000
    region_agents: int = 10_000
    regions: int = 256


KNOWN_AFTER_S = 30.0
"""Time to live of what agents of ours report, three times the time between two reports: who was not heard for so long
is not alive."""


class Fleet:
    """The agents of one run, by region and id. ``since_s``: since when they are listened to (monotonic seconds)."""

    def __init__(self, since_s: float = -math.inf) -> None:
        self.complete_s = since_s + KNOWN_AFTER_S
        """From then on every live agent is known."""
        self._agents: dict[tuple[str, str], Agent] = {}
        self._sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._agents)

    def values(self) -> Iterable[Agent]:
        """All agents, dead ones included until :meth:`drop_dead`."""
        return self._agents.values()

    def get(self, region: str, agent_id: str) -> Agent | None:
        """The last heartbeat of an agent, or None."""
        return self._agents.get((region, agent_id))

    def put(self, agent: Agent) -> None:
        """Take note of a heartbeat."""
        key = (agent.region, agent.id)
        if key not in self._agents:
            self._sizes[agent.region] += 1
        self._agents[key] = agent

    def drop_dead(self, now_s: float) -> bool:
        """Forget agents that are silent for longer than their time to live; True if there were any."""
        live = {key: agent for key, agent in self._agents.items() if agent.alive(now_s)}
        dropped = len(live) != len(self._agents)
        if dropped:
            self._agents, self._sizes = live, Counter(region for region, _ in live)
        return dropped

    def check_room(self, region: str, everywhere: int, room: Room) -> None:
        """``TooBusy`` if there is no room for one more agent in ``region``; ``everywhere``: agents of all runs."""
        if everywhere >= room.agents:
            raise TooBusy(f"{everywhere} agents report to this coordinator already: no more are counted")
        if self._sizes[region] >= room.region_agents:
            raise TooBusy(
                f"{self._sizes[region]} agents report from region {region} already: no more are counted; give an "
                "agent that restarts the id that it had"
            )
        if region not in self._sizes and len(self._sizes) >= room.regions:
            raise TooBusy(f"{len(self._sizes)} regions report already: {region} is not counted")


def by_region(agents: Iterable[Agent], now_s: float) -> dict[str, list[Agent]]:
    """Live agents by region, both in order of name."""
    found: dict[str, list[Agent]] = {}
    for agent in sorted(agents, key=lambda a: (a.region, a.id)):
        if agent.alive(now_s):
            found.setdefault(agent.region, []).append(agent)
    return found


def progress(agents: Iterable[Agent], version: int, age_s: float, now_s: float) -> tuple[RegionVersion, ...]:
    """How far each region is with ``version``, sealed ``age_s`` ago.

    ``lag_versions`` is that of the region's slowest agent; ``lag_s`` is ``age_s`` until all agents serve it, then 0.
    """
    return tuple(
        _region_progress(region, members, version, age_s) for region, members in by_region(agents, now_s).items()
    )


def _region_progress(region: str, members: Sequence[Agent], version: int, age_s: float) -> RegionVersion:
    serving = sum(agent.serving >= version for agent in members)
    return RegionVersion(
        region=region,
        agents=len(members),
        staged=sum(agent.staged >= version for agent in members),
        serving=serving,
        lag_versions=max(0, version - min(agent.serving for agent in members)),
        lag_s=0.0 if serving == len(members) else round(age_s, 3),
    )


def reached(regions: Sequence[RegionVersion], stage: Stage, wanted: Sequence[str], quorum: float) -> bool:
    """True if in every ``wanted`` region (none named: every region known, at least one) the share ``quorum`` of the
    live agents, and at least one, has come to ``stage``.
    """
    if stage == "sealed":
        return True
    known = {region.region: region for region in regions}
    names = wanted or sorted(known)
    return bool(names) and all(name in known and _enough(known[name], stage, quorum) for name in names)


def _enough(region: RegionVersion, stage: Stage, quorum: float) -> bool:
    count = region.serving if stage == "serving" else region.staged
    # Rounding first: 0.7 * 10 is a little more than 7 in binary.
    return count >= max(1, math.ceil(round(quorum * region.agents, 9)))


def region_answers(agents: Iterable[Agent], control: Control | None, now_s: float) -> tuple[RegionAnswer, ...]:
    """Regions with live agents or a target, in order of name."""
    targets = control.targets if control else {}
    live = by_region(agents, now_s)
    return tuple(
        RegionAnswer(
            region=region,
            target=targets.get(region),
            agents=tuple(
                AgentAnswer(id=a.id, region=region, age_s=round(now_s - a.seen_s, 3), report=a.report)
                for a in live.get(region, ())
            ),
        )
        for region in sorted({*live, *targets})
    )
