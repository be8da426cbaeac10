"""A run, a simulated disk and a replica on it, with the same effects in the same order every time, for crash tests."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rollout_agent import disk as disk_module
from rollout_agent import replica as replica_module
from rollout_agent.gate import holds
from rollout_agent.places import INDEX, Places
from rollout_agent.replica import Replica
from rollout_agent.saving import Saving
from tests.rollout_agent.inline import Inline
from tests.rollout_agent.simdisk import SimDisk
from tests.rollout_agent.training import Spec, Training, read_model
from weight_store.errors import StoreUnavailable
from weight_store.memory import MemoryStore

MODEL, STATE = Path("/model"), Path("/state")
SEED = int(os.environ.get("WEIGHTCAST_SEED", "1"))
TINY: tuple[Spec, ...] = (
    ("model.layers.0.a", "BF16", (24, 12), "rows"),
    ("model.layers.0.b", "BF16", (12, 24), "cols"),
    ("model.layers.1.c", "F32", (16,), "all"),
)


class Counting:
    """The same store, counting bytes read from shards."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.read = store, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.read += len(buffer)
        await self.store.read_into(key, offset, buffer)


class Breaking(Counting):
    """A store that goes away when ``left`` more ranges of shards have been read."""

    left = 1 << 30

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.left -= 1
        if self.left < 0:
            for _ in range(50):  # until what was read before is stored
                await asyncio.sleep(0)
            raise StoreUnavailable("gone", key=key)
        await super().read_into(key, offset, buffer)


@dataclass
class World:
    """Versions published beforehand; the head says which of them the replica can see."""

    training: Training
    store: MemoryStore
    tmpfs: bool
    now: int = 0

    @classmethod
    def of(cls, shares: tuple[float, ...], *, tmpfs: bool, drops: int = 0) -> World:
        """A full, and after it a version for each of the ``shares`` of the weights that change in it.

        Version ``drops`` and later ones have no tokenizer.
        """
        origin, training = _published(shares, drops)
        store = MemoryStore()
        store._objects = dict(origin._objects)
        return cls(replace(training, store=store), store, tmpfs)

    async def head(self, version: int) -> None:
        self.now = version
        await self.training.move_head(self.training.positions[version])

    async def open(self, disk: SimDisk, store: object = None, **options: object) -> Replica:
        return await Replica.open(
            run="tiny",
            model_dir=MODEL,
            state_dir=STATE if self.tmpfs else None,
            store=store or self.store,  # type: ignore[arg-type]
            disk=disk,
            threads=1,
            file_bytes=700,
            **options,  # type: ignore[arg-type]
        )


def visible(disk: SimDisk) -> tuple[int, dict[str, bytes]] | None:
    """What an engine that enters through the gate would load: version and tensors."""
    whole = holds(disk, Places.of(MODEL))
    if whole is None:
        return None
    found = {name: bytes(inode.data) for name, inode in disk.volume.files_in(MODEL).items()}
    assert INDEX in found
    assert found["config.json"] == b'{"model_type": "tiny"}'
    return whole.position.version, read_model({n: d for n, d in found.items() if n.endswith(".safetensors")})


def without_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever would run in a thread runs at once."""
    in_one_thread(monkeypatch, random.Random(SEED))
    caplog.set_level(logging.CRITICAL)


def in_one_thread(patch: pytest.MonkeyPatch, luck: random.Random) -> None:
    """The same; ``luck`` says for how long what goes on beside has its turn."""

    def run(self: asyncio.BaseEventLoop, executor: Executor | None, call: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work(turns: int) -> None:
            if turns:
                self.call_soon(work, turns - 1)
                return
            try:
                result = call(*args)
            except BaseException as error:
                future.cancelled() or future.set_exception(error)
            else:
                future.cancelled() or future.set_result(result)

        # The turn of what goes on beside; a checkpoint is slow, so that versions overtake each of its steps.
        self.call_soon(work, luck.randrange(16) if getattr(call, "__func__", None) is Saving.step else 0)
        return future

    async def to_thread(call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)

    patch.setattr(replica_module, "ThreadPoolExecutor", Inline)
    patch.setattr(asyncio.BaseEventLoop, "run_in_executor", run)
    patch.setattr(asyncio, "to_thread", to_thread)
    patch.setattr(disk_module, "COPY_BYTES", 300)


@functools.cache
def _published(shares: tuple[float, ...], drops: int) -> tuple[MemoryStore, Training]:
    """Made once for all worlds."""

    async def make() -> tuple[MemoryStore, Training]:
        store = MemoryStore()
        training = Training(store, specs=TINY, aliases={}, seed=SEED)
        await training.publish()
        for version, share in enumerate(shares, 2):
            training.step(share)
            if version == drops:
                training.assets = {"config.json": training.assets["config.json"]}
            await training.publish()
        return store, training

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
        return thread.submit(lambda: asyncio.run(make())).result()


async def first_fetch(world: World, disk: SimDisk) -> None:
    async with await world.open(disk) as replica:
        await replica.catch_up()
        await replica.checkpoint()


def last_of(world: World) -> tuple[int, dict[str, bytes]]:
    return world.now, world.training.tensors(world.now)


def check(
    world: World, seen: tuple[int, dict[str, bytes]] | None, known: tuple[int, object] | None, where: str
) -> None:
    if seen is not None:
        version, tensors = seen
        assert tensors == world.training.tensors(version), f"a mixture at version {version}: {where}"
        assert known is None or version >= known[0], f"went back to {version}: {where}"


def check_assets(world: World, disk: SimDisk, where: str) -> None:
    """What engines see beside weights and index is what the version has, nothing that one before it had."""
    whole = holds(disk, Places.of(MODEL))
    if whole is not None:
        found = {name for name in disk.volume.files_in(MODEL) if not name.endswith((".safetensors", INDEX, ".tmp"))}
        wanted = {asset.name for asset in world.training.manifests[whole.position.version].assets}
        assert found == wanted, f"assets of other versions at {whole.position.version}: {where}"
