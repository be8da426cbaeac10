"""What was found damaged and what was repaired, counted since the start, for logs, reports and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rollout_agent.disk import Disk

FOUND = ("working", "asset", "log", "checkpoint", "layout", "record", "object")
"""Kinds of damage: groups of weights or heads of their files, other files an engine loads, logs, groups of the
checkpoint, layouts, small records of the state directory, objects of the bucket."""
REPAIRED = ("checkpoint", "store", "layout")
"""Where repaired groups were taken from: the local checkpoint with its logs, or the bucket; heads of files: the layout
kept locally."""


class Faults:
    """Counters of one agent. Written by one thread at a time."""

    def __init__(self) -> None:
        self._found = Counter(dict.fromkeys(FOUND, 0))
        self._repaired = Counter(dict.fromkeys(REPAIRED, 0))
        self.touched_files = 0
        """Files that somebody had touched, right or wrong inside."""
        self.scrubbed_bytes = 0
        """Bytes hashed by the scrub."""
        self._stopped = False

    @property
    def found_by_kind(self) -> Mapping[str, int]:
        """What was found damaged, by the kinds in :data:`FOUND`."""
        return MappingProxyType(self._found)

    @property
    def repaired_by_route(self) -> Mapping[str, int]:
        """Groups of weights that were repaired, by the routes in :data:`REPAIRED`."""
        return MappingProxyType(self._repaired)

    def found(self, kind: str, count: int = 1) -> None:
        """Count damage."""
        self._found[kind] += count

    def stopped_by_object(self) -> None:
        """Count a damaged object of the bucket: once, however often it is fetched in vain."""
        self._found["object"] += not self._stopped
        self._stopped = True

    def followed(self) -> None:
        """Nothing that the bucket leads to is damaged any more."""
        self._stopped = False

    def lost(self, kind: str, disk: Disk, path: Path) -> None:
        """Count a file that could not be used, if it is there at all."""
        if disk.size(path) is not None:
            self.found(kind)

    def repaired(self, route: str, count: int) -> None:
        """Count repaired groups."""
        self._repaired[route] += count

    def text(self) -> str:
        """All counters in the Prometheus text format."""
        lines: list[str] = []
        for name, label, values in (
            ("weightcast_faults_found_total", "kind", self._found),
            ("weightcast_groups_repaired_total", "route", self._repaired),
        ):
            lines.append(f"# TYPE {name} counter")
            lines += [f'{name}{{{label}="{key}"}} {value}' for key, value in values.items()]
        for name, value in (
            ("weightcast_files_touched_total", self.touched_files),
            ("weightcast_scrubbed_bytes_total", self.scrubbed_bytes),
        ):
            lines += [f"# TYPE {name} counter", f"{name} {value}"]
        return "\n".join(lines) + "\n"
