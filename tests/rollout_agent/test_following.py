"""A replica ends up, bit for bit, where the trainer was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from codec import to_bits
from rollout_agent import BlockingReplica
from rollout_agent.errors import NotWhole
from rollout_agent.gate import shared
from rollout_agent.replica import Replica
from tests.rollout_agent.training import ASSETS, Training
from weight_store.keys import head_key, manifest_key, receipt_key
from weight_store.local import LocalStore
from weight_store.memory import MemoryStore
from weight_store.opening import open_store
from weight_store.store import Blob

ReadDir = Callable[[Path], dict[str, bytes]]


async def follow(training: Training, path: Path, **options: object) -> Replica:
    return await Replica.open(run="tiny", model_dir=path, store=training.store, **options)  # type: ignore[arg-type]


async def test_follows_each_version(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        assert replica.position is None
        for _ in range(5):
            assert await replica.catch_up() == training.position
            assert read_dir(tmp_path) == training.tensors(training.position.version)
            assert replica.step == training.published - 1
            training.step()
            await training.publish()


async def test_a_step_reads_each_record_once(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    get = MemoryStore.get

    async def counted(self: MemoryStore, key: str, *, max_bytes: int) -> Blob:
        read.append(key)
        return await get(self, key, max_bytes=max_bytes)

    await training.publish()
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        training.step()
        await training.publish()
        monkeypatch.setattr(MemoryStore, "get", counted)
        await replica.catch_up()
    receipts = [receipt_key("tiny", 2, rank) for rank in range(training.world)]
    assert sorted(read) == sorted([head_key("tiny"), manifest_key("tiny", 2), *receipts])


async def test_a_late_joiner_starts_from_the_full_and_ends_equal(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    for _ in range(6):
        await training.publish()
        training.step()
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(6)


async def test_an_extra_full_spares_a_late_joiner_the_deltas(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    for number in range(8):
        if number == 5:
            await training.extra_full(5)
        await training.publish()
        training.step(0.5)
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(8)
        full = sum(ref.shard_bytes for ref in training.fulls[5])
        deltas = sum(training.manifests[version].payload_bytes for version in (6, 7, 8))
        assert replica.fetched_bytes <= full + deltas


async def test_a_laggard_takes_whichever_way_is_cheaper(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        for _ in range(6):
            training.step(0.9)
            await training.publish()
        await training.extra_full(7)
        await training.publish()
        await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(8)
        assert replica.fetched_bytes < sum(training.manifests[v].payload_bytes for v in range(1, 9))


async def test_groups_that_are_full_inside_a_delta_version(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        training.step()
        await training.publish(full=lambda group: group.owner == 1)
        await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(2)


@pytest.mark.parametrize("late", [False, True])
async def test_layouts_may_change_between_versions(
    training: Training, tmp_path: Path, read_dir: ReadDir, late: bool
) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        for world in (3, 1, 4):
            if not late:
                await replica.catch_up()
            training.step()
            await training.publish(world=world)
        await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(4)


async def test_a_resumed_trainer_is_followed_back_in_steps_but_forward_in_versions(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    async with await follow(training, tmp_path) as replica:
        for step in (10, 11, 5):
            training.step()
            await training.publish(step=step)
            await replica.catch_up()
        assert replica.step == 5
        assert read_dir(tmp_path) == training.tensors(3)


async def test_a_run_without_a_version_is_waited_for(training: Training, tmp_path: Path) -> None:
    await training.move_head(training.position)
    async with await follow(training, tmp_path) as replica:
        assert await replica.catch_up() is None
        with pytest.raises(NotWhole):
            replica.tensors()


async def test_restarting_fetches_nothing_again(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        training.step()
        await training.publish()
        await replica.catch_up()
    async with await follow(training, tmp_path) as replica:
        assert replica.position == training.position
        await replica.catch_up()
        assert replica.fetched_bytes == 0
    assert read_dir(tmp_path) == training.tensors(2)


async def test_the_directory_is_one_that_anybody_can_load(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await follow(training, tmp_path, file_bytes=1500) as replica:
        await replica.catch_up()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["metadata"]["tied_weights"] == {"lm_head.weight": "model.embed_tokens.weight"}
    loaded: dict[str, torch.Tensor] = {}
    for name in files:
        part = load_file(tmp_path / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        loaded |= part
        with safe_open(tmp_path / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    truth = training.tensors(1)
    assert {name: to_bits(tensor).tobytes() for name, tensor in loaded.items()} == truth
    assert {name: list(t.shape) for name, t in loaded.items()} == {s[0]: list(s[2]) for s in training.specs}
    for name, data in ASSETS.items():
        assert (tmp_path / name).read_bytes() == data


async def test_assets_may_change(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        await replica.catch_up()
        training.assets = {"config.json": b'{"model_type": "tiny", "v": 2}', "chat_template.jinja": b"x"}
        training.step()
        await training.publish()
        await replica.catch_up()
    assert (tmp_path / "config.json").read_bytes() == training.assets["config.json"]
    assert (tmp_path / "chat_template.jinja").read_bytes() == b"x"
    assert not (tmp_path / "tokenizer.json").exists()


async def test_tensors_are_views_of_the_files(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await follow(training, tmp_path) as replica:
        for version in (1, 2):
            await replica.catch_up()
            views = replica.tensors()
            truth = training.tensors(version)
            assert {name: to_bits(views[name]).tobytes() for name in truth} == truth
            assert views["lm_head.weight"].data_ptr() == views["model.embed_tokens.weight"].data_ptr()
            assert views["model.layers.1.mlp.packed"].dtype == torch.float8_e4m3fn
            training.step()
            await training.publish()
        views["model.norm.weight"].zero_()  # stays private
        assert to_bits(replica.tensors()["model.norm.weight"]).tobytes() == training.tensors(2)["model.norm.weight"]


def test_without_an_event_loop(tmp_path: Path, read_dir: ReadDir) -> None:
    import asyncio

    training = Training(LocalStore(tmp_path / "bucket"))
    asyncio.run(training.publish())
    with BlockingReplica(run="tiny", model_dir=tmp_path / "model", store=f"file://{tmp_path}/bucket") as replica:
        assert replica.catch_up() == training.position == replica.position
        replica.repair()
        replica.checkpoint(force=True)
        assert replica.tensors()["model.norm.weight"].shape == (33,)
    assert read_dir(tmp_path / "model") == training.tensors(1)


async def test_through_a_real_s3_server(s3_url: Callable[..., str], tmp_path: Path, read_dir: ReadDir) -> None:
    store = open_store(s3_url("rollout", "following"))
    training = Training(store, world=3)
    try:
        await training.publish()
        async with await follow(training, tmp_path) as replica:
            for _ in range(3):
                await replica.catch_up()
                assert read_dir(tmp_path) == training.tensors(training.position.version)
                training.step()
                await training.publish()
    finally:
        await store.close()


async def test_groups_larger_than_what_may_be_in_memory_at_once_are_decoded_one_by_one(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_agent.fetching.DECODE_BYTES", 1000)
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica, asyncio.timeout(30):
        await replica.catch_up()
    assert read_dir(tmp_path) == training.tensors(1)


async def test_more_than_one_group_a_rank(tmp_path: Path, read_dir: ReadDir) -> None:
    layers = range(40)
    specs = tuple((f"model.layers.{n}.w", "BF16", (64, 48), "rows" if n % 2 else "cols") for n in layers)
    training = Training(MemoryStore(), specs=specs, aliases={}, world=3)
    await training.publish()
    async with await follow(training, tmp_path, file_bytes=30_000) as replica:
        await replica.catch_up()
        training.step(names=["model.layers.7.w"])
        await training.publish()
        await replica.catch_up()
        with shared(tmp_path, timeout_s=1) as whole:
            assert whole.position == training.position
            assert read_dir(tmp_path) == training.tensors(2)
