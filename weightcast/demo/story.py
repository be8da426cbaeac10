"""What has happened so far in a demo: the facts that are shown, gathered from events and from the coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from weightcast.demo.events import Sealed, Stepped, Warming


@dataclass(slots=True)
class Row:
    """One version: what sealing told, what training told, and how far each region is (name -> short words)."""

    sealed: Sealed
    stepped: Stepped | None
    regions: dict[str, str]
    settled: set[str] = field(default_factory=set)

    @property
    def ratio(self) -> float:
        """Payload bytes as a share of the weights' bytes."""
        return self.sealed.payload_bytes / max(1, self.sealed.weight_bytes)

    @property
    def changed(self) -> float:
        """Share of the published weights that the step changed."""
        return 0.0 if self.stepped is None else self.stepped.changed / max(1, self.stepped.elements)


class Story:
    """The demo's state as a reader sees it. Times are ``time.monotonic`` seconds."""

    def __init__(self, regions: Iterable[str]) -> None:
        self.regions = tuple(regions)
        self.rows: list[Row] = []
        self.warming: Warming | None = None
        self.training: Stepped | None = None
        self.notes: list[str] = []
        self._stepped: dict[int, Stepped] = {}

    def add(self, event: Warming | Stepped | Sealed) -> Row | None:
        """Take in an event; the new row if it was a version."""
        if isinstance(event, Warming):
            self.warming = event
            return None
        if isinstance(event, Stepped):
            self.training = self._stepped[event.step] = event
            return None
        row = Row(event, self._stepped.get(event.step), dict.fromkeys(self.regions, ""))
        self.rows.append(row)
        return row

    @property
    def newest(self) -> int:
        """The newest version told of; 0 if there is none."""
        return self.rows[-1].sealed.version if self.rows else 0

    def report(self, region: str, staged: int, serving: int) -> None:
        """Take in how far a region is. Times run from sealing to the moment this was heard."""
        now_s = time.monotonic()
        for row in self.rows:
            if region in row.settled or region not in row.regions:
                continue
            version, lag_s = row.sealed.version, now_s - row.sealed.at_s
            if serving >= version:
                row.regions[region] = f"serving +{lag_s:.1f} s"
                row.settled.add(region)
            elif staged >= version:
                row.regions[region] = f"staged +{lag_s:.1f} s"
            else:
                row.regions[region] = f"{version - max(staged, serving)} behind"

    def everywhere(self, version: int) -> bool:
        """Whether every region serves ``version``."""
        return any(row.sealed.version == version and row.settled.issuperset(self.regions) for row in self.rows)
