"""What the simulated disk of the other tests takes for granted: each sync of the real one reaches the kernel.

No test can cut the power of a machine, so this looks at which files and directories the kernel is asked to write out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout_agent.disk import LocalDisk, sync_file, write_file


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes that the kernel was asked to write out, in order."""
    asked: list[int] = []
    for name in ("fsync", "fdatasync"):

        def note(file: int, call: object = getattr(os, name)) -> None:
            asked.append(os.fstat(file).st_ino)
            call(file)  # type: ignore[operator]

        monkeypatch.setattr(os, name, note)
    return asked


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_directory_is_made_with_each_name_on_the_way(tmp_path: Path, synced: list[int]) -> None:
    LocalDisk().make_dir(tmp_path / "a" / "b")
    assert synced == [inode(tmp_path), inode(tmp_path / "a")]


def test_a_file_is_written_out_before_its_name(tmp_path: Path, synced: list[int]) -> None:
    write_file(LocalDisk(), tmp_path / "file", b"content")
    assert synced == [inode(tmp_path / "file"), inode(tmp_path)]


def test_a_file_that_grows_is_written_out_when_asked(tmp_path: Path, synced: list[int]) -> None:
    file = LocalDisk().append(tmp_path / "log")
    file.write(b"record")
    assert synced == []
    file.sync()
    file.close()
    assert synced == [inode(tmp_path / "log")]


def test_what_was_stored_through_a_map_is_written_out(tmp_path: Path, synced: list[int]) -> None:
    (tmp_path / "weights").write_bytes(bytes(10))
    sync_file(LocalDisk(), tmp_path / "weights")
    assert synced == [inode(tmp_path / "weights")]
