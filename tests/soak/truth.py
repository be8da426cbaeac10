"""What was published and what was loaded, compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

Key = tuple[int, int]
"""Attempt and step."""
_NEVER = {"misuse", "layout", "weights-damaged", "arena-too-small", "setup-refused"}
"""What no publication of the soak has a reason to fail with."""
_REMEMBERED = 200


class Truth:
    """Reads what ranks and engines wrote down; ``find`` is told what must not be."""

    def __init__(self, published: Path, loads: Path, find: Callable[[str], None]) -> None:
        self._find = find
        self._published, self._loads = _Tail(published), _Tail(loads)
        self._blocks: dict[Key, dict[str, str]] = {}
        self._versions: dict[int, Key] = {}
        """As trainers were told and engines found it."""
        self._zombies: set[int] = set()
        self._ends: dict[str, list[tuple[float, int]]] = {}
        self.sealed: set[int] = set()
        self.newest: dict[str, int] = {}
        """The newest version that was loaded in each region."""
        self.failed: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()

    def forget(self, region: str) -> None:
        """Somebody laid hands on the region's files: it may come back at an older version, whole."""
        self.look()
        self._ends[region] = []
        self.newest[region] = 0

    def look(self) -> None:
        """Compare what is new."""
        for line in self._published.new():
            key = line["attempt"], line["step"]
            if line["kind"] == "published":
                self._blocks.setdefault(key, {}).update(line["blocks"])
            elif line["kind"] == "sealed":
                self.sealed.add(line["version"])
                self._is(line["version"], key, "the trainer was told")
            else:
                self.failed[line["code"]] += 1
                # A bit of the request may have been flipped on its way, and so the layout's name.
                if line["code"] in _NEVER and "is not in the bucket" not in line["said"]:
                    self._find(f"a publication failed: {line}")
        for line in self._loads.new():
            if line["kind"] == "trouble":
                self._find(f"an engine met {line}")
            else:
                self._load(line)

    def _load(self, line: dict[str, Any]) -> None:
        version, region = line["version"], line["region"]
        who = f"{region} ({line['via']}, {line['start']:.1f} to {line['end']:.1f})"
        self.loads[f"{region} {line['via']}"] += 1
        if len(line["stamps"]) != 1:
            self._find(f"{who} loaded a mixture of {line['stamps']} as version {version}")
            return
        key = tuple(line["stamps"][0])
        known = self._blocks.get(key, {})
        if wrong := [block for block, digest in line["blocks"].items() if known.get(block) != digest]:
            self._find(f"{who} loaded version {version}: blocks {wrong} are not what was published as {key}")
        self._is(version, key, f"{who} found")
        ends = self._ends.setdefault(region, [])
        before = max((held for end, held in ends if end < line["start"]), default=0)
        if version < before:
            self._find(f"{who} loaded version {version} after {before}")
        ends.append((line["end"], version))
        del ends[:-_REMEMBERED]
        self.newest[region] = max(self.newest.get(region, 0), version)

    def _is(self, version: int, key: Key, who: str) -> None:
        known = self._versions.get(version)
        if known == key:
            return
        if known is not None:
            self._find(f"{who} that version {version} is {key}, and it was {known}")
            return
        self._versions[version] = key
        # Who lost the run does not get it back: the versions of one job are in a row, others before and after them.
        jobs = [attempt for attempt, _ in groupby(self._versions[number][0] for number in sorted(self._versions))]
        if again := {attempt for attempt in jobs if jobs.count(attempt) > 1} - self._zombies:
            self._zombies |= again
            self._find(f"{who} version {version} of job {key[0]}, and so jobs {again} went on after others took over")

    def __str__(self) -> str:
        return f"{len(self.sealed)} versions sealed, {dict(self.failed)} failed; loads {dict(self.loads)}"


class _Tail:
    """Whole lines that were added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
