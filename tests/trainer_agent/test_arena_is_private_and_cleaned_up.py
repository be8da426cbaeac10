"""Shared memory: private, allocated for real, atomic small files, and nothing left of a crashed trainer."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_agent.arena import Arena, remove_abandoned
from trainer_agent.errors import ArenaTooSmall


def test_only_the_user_can_look_into_an_arena(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path)
    arena.write("offer", b"x")
    arena.allocate_slots(100)
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in arena.path.iterdir()} == {0o600}
    arena.remove()
    assert not list(tmp_path.iterdir())


def test_slots_are_allocated_and_shared_between_maps(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path)
    arena.allocate_slots(1 << 20)
    assert os.stat(arena.slot_path(1)).st_blocks * 512 >= 1 << 20
    one, two = arena.map("slot0"), Arena(arena.path).map("slot0")
    one[5] = 7
    assert two[5] == 7
    arena.remove()
    assert two[5] == 7, "maps outlive the files"


def test_more_than_there_is_names_what_is_there_and_what_is_needed(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path)
    with pytest.raises(ArenaTooSmall, match=r"MiB free; this rank needs \d+ MiB .*shm_dir"):
        arena.allocate_slots(1 << 60)
    arena.remove()


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path)
    assert arena.read("state.json") is None
    arena.write("state.json", b"old")
    arena.write("state.json", b"new")
    assert arena.read("state.json") == b"new"
    assert sorted(path.name for path in arena.path.iterdir()) == ["lock", "state.json"]
    arena.remove()


def test_an_arena_is_abandoned_only_when_its_trainer_is_gone(tmp_path: Path) -> None:
    living = Arena.create(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from trainer_agent.arena import Arena; "
        "print(Arena.create(Path(sys.argv[1])).path, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    dead = Path(done.stdout.strip())
    assert dead.exists()
    assert remove_abandoned(tmp_path) == [dead]
    assert living.path.exists()
    assert not dead.exists()
    living.remove()
