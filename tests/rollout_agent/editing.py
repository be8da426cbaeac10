"""Ways to edit weight files, or only to handle them, and a replica to do it to."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_agent import checking
from rollout_agent.agent import Agent, Pace
from rollout_agent.disk import LocalDisk, Stamp
from rollout_agent.engine import Staged
from rollout_agent.replica import Replica
from tests.rollout_agent.following import followed
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Training

ReadDir = Callable[[Path], dict[str, bytes]]
QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, watch_s=0.02)
FILE_BYTES = 1500
"""Several small files, so that hashing one of them differs from hashing all."""


class Blind(LocalDisk):
    """A disk that does not notice: every stamp is as it was when :attr:`frozen` was set."""

    def __init__(self) -> None:
        self.known: dict[Path, Stamp | None] = {}
        self.frozen = False

    def stat(self, path: Path) -> Stamp | None:
        if not self.frozen:
            self.known[path] = super().stat(path)
        return self.known.get(path)

    def mark(self, path: Path) -> Stamp | None:
        self.known[path] = super().mark(path)
        return self.known[path]


class Loads:
    """An engine that reads the directory without a gate whenever it is told to."""

    def __init__(self, read_dir: ReadDir) -> None:
        self.read_dir = read_dir
        self.loaded: list[dict[str, bytes]] = []

    async def load(self, staged: Staged) -> None:
        self.loaded.append(self.read_dir(staged.path))


async def opened(training: Training, path: Path, **options: object) -> Replica:
    options.setdefault("store", training.store)
    return await Replica.open(run="tiny", model_dir=path, file_bytes=FILE_BYTES, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def following(replica: Replica, engine: Loads | None = None, pace: Pace = QUICK) -> AsyncIterator[Agent]:
    async with followed(Agent(replica, "tiny", "eu-west", "a1", engine=engine, pace=pace)) as agent:
        yield agent


def edit_and_restore_mtime(path: Path) -> None:
    before = path.stat()
    edit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_through_a_map(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[len(data) - 3] ^= 0x10


def replace(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


def rewrite_equal(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)


def replace_by_equal(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def touch(path: Path) -> None:
    path.touch()


def change_mode(path: Path) -> None:
    path.chmod(0o600)


def link(path: Path) -> None:
    path.with_suffix(".backup").hardlink_to(path)


def misspell(path: Path) -> None:
    """A byte of the header."""
    with path.open("r+b") as file:
        data = file.read()
        file.seek(data.index(b"data_offsets") + 4)
        file.write(b"-")


EDITS = [edit, edit_and_restore_mtime, edit_through_a_map, replace]
HARMLESS = [rewrite_equal, replace_by_equal, touch, change_mode, link]


def note_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    hashed: list[int] = []
    damaged = checking.damaged

    def noting(weights: object, held: object, wanted: frozenset[int], pool: object):  # type: ignore[no-untyped-def]
        hashed.extend(wanted)
        return damaged(weights, held, wanted, pool)  # type: ignore[arg-type]

    monkeypatch.setattr(checking, "damaged", noting)
    return hashed
