"""``include`` keeps, and fetches, only the groups that hold a selected tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.errors import NothingSelected
from rollout_agent.replica import Replica
from rollout_agent.selection import select
from rollout_agent.verifying import verify_dir_against
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Training
from weight_store import grouping
from weight_store.layout import Layout
from weight_store.memory import MemoryStore

ReadDir = Callable[[Path], dict[str, bytes]]
LAYER_0 = {"model.layers.0.mlp.down.weight", "model.layers.0.mlp.experts", "model.layers.0.norm.weight"}


@pytest.fixture(autouse=True)
def groups_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model whose layers are large; layers as small as those of these tests would share groups."""
    monkeypatch.setattr(grouping, "BLOCK_BYTES", 0)


class Counting(MemoryStore):
    """Counts bytes read by range."""

    read = 0

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.read += len(buffer)
        await super().read_into(key, offset, buffer)


async def test_fetches_only_the_bytes_of_selected_groups(tmp_path: Path, read_dir: ReadDir) -> None:
    store = Counting()
    training = Training(store)
    await training.publish()
    layout = training.layout()
    async with await Replica.open(
        run="tiny", model_dir=tmp_path, store=store, include=["model.layers.[0-0].*"]
    ) as replica:
        for version in (1, 2):
            await replica.catch_up()
            truth = training.tensors(version)
            assert read_dir(tmp_path) == {name: truth[name] for name in LAYER_0}
            training.step()
            await training.publish()
        whole = sum(manifest.payload_bytes for manifest in training.manifests.values())
        share = sum(g.nbytes for g in layout.groups if g.pieces[0].tensor.name in LAYER_0) / layout.nbytes
        assert replica.fetched_bytes == store.read < whole * (share + 0.15)


async def test_another_selection_later_fetches_only_what_is_missing(tmp_path: Path, read_dir: ReadDir) -> None:
    store = Counting()
    training = Training(store)
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store, include=["*.layers.0.*"]) as replica:
        await replica.catch_up()
    first = store.read
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store) as replica:
        await replica.catch_up()
    assert read_dir(tmp_path) == training.tensors(1)
    assert store.read < training.manifests[1].payload_bytes + first // 4
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store, include=["*norm*"]) as replica:
        read = store.read
        await replica.catch_up()
        assert store.read == read
    assert set(read_dir(tmp_path)) == {"model.layers.0.norm.weight", "model.norm.weight"}


async def test_what_is_kept_of_a_version_is_verified_against_the_bucket(training: Training, tmp_path: Path) -> None:
    await training.publish()
    kept = sum(group.pieces[0].tensor.name in LAYER_0 for group in training.layout().groups)
    async with await Replica.open(
        run="tiny", model_dir=tmp_path, store=training.store, include=["*.layers.0.*"]
    ) as replica:
        await replica.catch_up()
    verdict = await verify_dir_against(training.store, tmp_path)
    assert verdict.good
    assert 0 < verdict.groups == kept < len(training.layout().groups)
    edit(next(tmp_path.glob("*.safetensors")))  # noqa: ASYNC240
    assert not (await verify_dir_against(training.store, tmp_path)).good


async def test_a_layout_that_joins_more_tensors_widens_the_selection(tmp_path: Path, read_dir: ReadDir) -> None:
    specs = (("a.0.x", "BF16", (40, 8), "0"), ("a.0.y", "BF16", (40, 8), "1"))
    training = Training(MemoryStore(), specs=specs, aliases={})
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store, include=["a.0.x"]) as replica:
        await replica.catch_up()
        assert set(read_dir(tmp_path)) == {"a.0.x"}
        training.step()
        await training.publish(world=1)
        await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(2)


def test_patterns() -> None:
    layout = Training(MemoryStore()).layout()
    assert select([layout], ["model.layers.0.*"]) == LAYER_0
    assert select([layout], ["re:model\\.layers\\.[0]\\..*"]) == LAYER_0
    assert select([layout], ["lm_head.weight"]) == {"model.embed_tokens.weight"}
    assert select([layout], []) == set(layout.names)
    # A group is kept whole: experts share one with the projection beside them.
    assert select([layout], ["*.experts"]) == {"model.layers.0.mlp.experts", "model.layers.0.mlp.down.weight"}


def test_layers_that_share_a_group_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "BLOCK_BYTES", 1024)
    layers = ((f"model.layers.{i}.w", "BF16", (40, 8), "rows") for i in range(5))
    specs = (*layers, ("norm", "BF16", (3,), "0"))
    layout = Training(MemoryStore(), specs=specs, aliases={}).layout()
    assert select([layout], ["model.layers.0.*"]) == {f"model.layers.{i}.w" for i in range(4)}
    assert select([layout], ["norm"]) == {"norm"}


@pytest.mark.timeout(60)
def test_a_long_chain_of_shared_groups_does_not_hold_the_agent_up() -> None:
    """Each tensor shares a group with the next, and the groups lie in the order that tells least at a time."""
    tensors_n = 50_000
    pairs = [(k, k + 1) for k in range(tensors_n - 1)][::-1]
    ends = {0, tensors_n - 1}
    layout = Layout(
        world_size=1,
        names=tuple(f"t{k}" for k in range(tensors_n)),
        dtypes=("BF16",) * tensors_n,
        itemsizes=(2,) * tensors_n,
        shapes=tuple((1,) if k in ends else (2,) for k in range(tensors_n)),
        piece_tensor=tuple(k for pair in pairs for k in pair),
        piece_offsets=tuple((offset,) for a, _ in pairs for offset in (0 if a in ends else 1, 0)),
        piece_sizes=((1,),) * (2 * len(pairs)),
        group_owner=(0,) * len(pairs),
        group_start=tuple(range(0, 2 * len(pairs), 2)),
    )
    assert select([layout], ["t0"]) == set(layout.names)


def test_expressions_do_not_reach_into_each_other() -> None:
    layout = Training(MemoryStore()).layout()
    patterns = ["re:(?i)LM_HEAD.weight", "re:(?P<n>x)y", "re:(?P<n>z)y", "re:model\\.layers\\.(0).*\\1?"]
    assert select([layout], patterns) == {*LAYER_0, "model.embed_tokens.weight"}


@pytest.mark.parametrize("pattern", ["model.layers.9*", "re:(", "re:a{1,99999999999}", "re:" + "(" * 9000])
def test_patterns_that_select_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(NothingSelected):
        select([Training(MemoryStore()).layout()], [pattern])
