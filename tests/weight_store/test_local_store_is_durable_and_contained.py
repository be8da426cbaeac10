"""A local store stays inside its directory, survives the death of a writer, and shares it between processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from weight_store.errors import ObjectNotFound, StoreRefused
from weight_store.local import LocalStore

_COUNT = """
import asyncio, sys
from weight_store.errors import PreconditionFailed
from weight_store.local import LocalStore

async def main():
    store = LocalStore(sys.argv[1])
    left = 25
    while left:
        blob = await store.get("counter", max_bytes=20)
        try:
            await store.replace("counter", b"%d" % (int(blob.data) + 1), etag=blob.etag)
        except PreconditionFailed:
            continue
        left -= 1

asyncio.run(main())
"""
_DIE = """
import asyncio, sys
from weight_store.local import LocalStore

async def main():
    async with LocalStore(sys.argv[1]).upload("v/x.shard") as upload:
        await upload.write(b"half of it")
        print("written", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def test_processes_lose_no_update(root: Path) -> None:
    await LocalStore(root).create("counter", b"0")
    racers = [await asyncio.create_subprocess_exec(sys.executable, "-c", _COUNT, str(root)) for _ in range(3)]
    assert [await racer.wait() for racer in racers] == [0, 0, 0]
    assert (await LocalStore(root).get("counter", max_bytes=20)).data == b"75"


async def test_a_killed_writer_leaves_nothing_to_see(root: Path) -> None:
    writer = await asyncio.create_subprocess_exec(sys.executable, "-c", _DIE, str(root), stdout=asyncio.subprocess.PIPE)
    assert writer.stdout is not None
    assert await writer.stdout.readline() == b"written\n"
    writer.kill()
    await writer.wait()
    store = LocalStore(root)
    assert [entry async for entry in store.list("")] == []
    await store.create("v/x.shard", b"whole")
    leftovers = [name for name in os.listdir(root / ".tmp") if name != "lock"]
    assert len(leftovers) == 1
    # A day later by the injected clock, the next writer sweeps it.
    later = LocalStore(root, clock=lambda: (root / ".tmp" / leftovers[0]).stat().st_mtime + 90_000)
    await later.create("other", b"x")
    assert [name for name in os.listdir(root / ".tmp") if name != "lock"] == []


async def test_what_a_killed_writer_left_goes_a_day_later(root: Path) -> None:
    store = LocalStore(root)
    await store.replace("a", b"y", etag=await store.create("a", b"x"))
    left, now_s = root / ".tmp" / "left", time.time()
    left.write_bytes(b"half of it")
    await LocalStore(root, clock=lambda: now_s + 80_000).create("b", b"x")
    assert left.exists()  # its writer may only be slow
    await LocalStore(root, clock=lambda: now_s + 90_000).create("c", b"x")
    assert os.listdir(root / ".tmp") == ["lock"]  # which others may hold


async def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = LocalStore(root)
    await store.create("a/real", b"x")
    (root / "link").symlink_to(outside / "secret")
    (root / "dir").symlink_to(outside)
    with pytest.raises(StoreRefused, match="symbolic link"):
        await store.get("link", max_bytes=99)
    with pytest.raises((StoreRefused, ObjectNotFound)):
        await store.get("dir/secret", max_bytes=99)
    with pytest.raises(StoreRefused):
        await store.create("dir/new", b"x")
    await store.delete("dir/secret")
    assert [entry.key async for entry in store.list("")] == ["a/real"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert sorted(os.listdir(outside)) == ["secret"]


async def test_a_root_behind_a_link_is_the_users_choice(root: Path, tmp_path: Path) -> None:
    os.mkdir(root)
    (tmp_path / "alias").symlink_to(root)
    await LocalStore(tmp_path / "alias").create("a", b"x")
    assert (root / "a").read_bytes() == b"x"


async def test_what_is_no_regular_file_is_no_object(root: Path) -> None:
    store = LocalStore(root)
    await store.create("a/b", b"x")
    os.mkfifo(root / "pipe")
    for key in ("a", "pipe"):
        with pytest.raises(ObjectNotFound):
            await store.get(key, max_bytes=99)
    with pytest.raises(StoreRefused, match="needs a directory"):
        await store.create("a/b/c", b"x")


async def test_the_place_of_unfinished_writes_is_no_key(root: Path) -> None:
    with pytest.raises(StoreRefused, match="reserved"):
        await LocalStore(root).create(".tmp/x", b"x")


async def test_an_upload_that_ends_leaves_no_file_and_no_descriptor(root: Path) -> None:
    store = LocalStore(root)
    before = len(os.listdir("/proc/self/fd"))
    for commit in (True, False):
        async with store.upload(f"v/{commit}.shard") as upload:
            await upload.write(b"x")
            if commit:
                await upload.commit()
    await store.replace("v/True.shard", b"y", etag=(await store.get("v/True.shard", max_bytes=9)).etag)
    assert os.listdir(root / ".tmp") == ["lock"]
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_directory_that_may_not_be_written_says_so(root: Path) -> None:
    root.parent.joinpath("file").write_bytes(b"")
    with pytest.raises(StoreRefused):
        await LocalStore(root.parent / "file" / "below").create("a", b"x")
    with pytest.raises(ObjectNotFound):
        await LocalStore(root).get("a", max_bytes=1)
    assert "store" not in os.listdir(root.parent)


async def test_each_new_directory_on_the_way_to_an_object_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, set()

    def noted(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    await LocalStore(tmp_path / "a" / "b").create("run/v/one", b"x")
    assert {tmp_path / name for name in ("", "a", "a/b", "a/b/run", "a/b/run/v")} <= synced


async def test_what_was_confirmed_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content is on stable storage before a name leads to it, and the name is before the call returns."""
    store = LocalStore(tmp_path)
    for name in ("beside", "old"):
        await store.create(f"run/v/{name}", b"x")
    steps: list[str] = []

    def noted(name: str, where: Callable[..., int]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            place = Path(f"/proc/self/fd/{where(*arguments, **more)}").readlink().relative_to(tmp_path)
            if name == "fsync" or place.name != ".tmp":
                steps.append(f"{name} {'content' if place.parent.name == '.tmp' else place}")
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, call)

    noted("fsync", lambda descriptor: descriptor)
    noted("unlink", lambda *_, dir_fd: dir_fd)
    for name in ("link", "rename"):
        noted(name, lambda *_, dst_dir_fd, **__: dst_dir_fd)

    async def taken(call: Awaitable[object]) -> list[str]:
        steps.clear()
        await call
        return list(steps)

    async def upload() -> None:
        async with store.upload("run/v/shard") as part:
            await part.write(b"x")
            await part.commit()

    assert await taken(store.create("run/v/new", b"x")) == ["fsync content", "link run/v", "fsync run/v"]
    assert await taken(upload()) == ["fsync content", "link run/v", "fsync run/v"]
    etag = (await store.get("run/v/old", max_bytes=1)).etag
    assert await taken(store.replace("run/v/old", b"y", etag=etag)) == ["fsync content", "rename run/v", "fsync run/v"]
    assert await taken(store.delete("run/v/old")) == ["unlink run/v", "fsync run/v"]


async def test_racing_directories_are_made_once(root: Path) -> None:
    store = LocalStore(root)
    await asyncio.gather(*(store.create(f"a/b/c/{n}", b"x") for n in range(20)))
    assert len([entry async for entry in store.list("a/")]) == 20


async def test_no_directory_outlives_the_objects_in_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("a/b/c", "a/d", "e"):
        await store.create(key, b"1")
    await store.delete("a/b/c")
    assert sorted(os.listdir(tmp_path)) == [".tmp", "a", "e"]
    assert os.listdir(tmp_path / "a") == ["d"]
    await store.delete("a/d")
    await store.delete("e")
    assert os.listdir(tmp_path) == [".tmp"]


async def test_an_object_is_made_while_its_neighbours_are_deleted(tmp_path: Path) -> None:
    """Their directory goes with the last of them, and comes back."""
    stores = [LocalStore(tmp_path) for _ in range(4)]

    async def churn(number: int, store: LocalStore) -> None:
        for _ in range(100):
            await store.create(f"a/b/{number}", b"1")
            await store.delete(f"a/b/{number}")

    await asyncio.gather(*(churn(number, store) for number, store in enumerate(stores)))
    assert os.listdir(tmp_path) == [".tmp"]
