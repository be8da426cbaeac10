"""What lies outside the groups of a weight file, its header, is checked and put right as the weights are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.errors import NotWhole
from rollout_agent.replica import Replica
from rollout_agent.segments import each, segments_of
from rollout_agent.verifying import verify_dir
from tests.rollout_agent.following import before_commit, enters
from tests.rollout_agent.harming import forge, swap_names
from tests.rollout_agent.training import Training

ReadDir = Callable[[Path], dict[str, bytes]]


async def opened(training: Training, path: Path, **options: object) -> Replica:
    return await Replica.open(run="tiny", model_dir=path, store=training.store, **options)  # type: ignore[arg-type]


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


async def test_a_header_edited_under_a_running_agent_is_put_right(
    training: Training, tmp_path: Path, read_dir: ReadDir, caplog: pytest.LogCaptureFixture
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        fetched = replica.fetched_bytes
        path = only_file(tmp_path)
        swap_names(path)
        assert read_dir(tmp_path) != training.tensors(1)
        with pytest.raises(NotWhole, match=f"{path.name} is edited: its first bytes"):
            enters(tmp_path)
        assert not verify_dir(tmp_path).good
        await replica.check()
        assert enters(tmp_path) == 1
        assert read_dir(tmp_path) == training.tensors(1)
        assert verify_dir(tmp_path).good
        assert replica.faults.found_by_kind["working"] == 1
        assert replica.faults.repaired_by_route["layout"] == 1
        assert replica.fetched_bytes == fetched
        training.step(0.01)
        await training.publish()
        assert await replica.catch_up() == training.position
        assert read_dir(tmp_path) == training.tensors(2)
    assert f"{path} is damaged: its first bytes" in caplog.text


async def test_a_header_that_is_noticed_on_the_way_to_the_next_version(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        training.step(0.01)
        await training.publish()

        def edit_once() -> None:
            if replica.faults.found_by_kind["working"] == 0:
                swap_names(only_file(tmp_path))

        before_commit(replica, monkeypatch, edit_once)
        assert await replica.catch_up() == training.position
        assert replica.faults.found_by_kind["working"] == 1
    assert read_dir(tmp_path) == training.tensors(2)


async def test_a_header_edited_while_no_agent_runs_costs_no_fetch(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    swap_names(only_file(tmp_path))
    async with await opened(training, tmp_path) as replica:
        assert replica.position == training.position
        assert enters(tmp_path) == 1
        assert replica.fetched_bytes == 0
        assert replica.faults.found_by_kind["working"] == 1
    assert read_dir(tmp_path) == training.tensors(1)


async def test_a_header_that_rotted_silently_is_found(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        for find in (lambda: replica.scrub(0), replica.repair):
            swap_names(only_file(tmp_path))
            forge(tmp_path)
            assert enters(tmp_path) == 1, "nothing tells"
            with pytest.raises(NotWhole, match="its first bytes"):
                enters(tmp_path, verify=True)
            await find()
            assert enters(tmp_path, verify=True) == 1
            assert read_dir(tmp_path) == training.tensors(1)


async def test_a_copy_with_another_header_is_no_checkpoint(
    training: Training, memory_dir: Path, tmp_path: Path, read_dir: ReadDir
) -> None:
    model, state = memory_dir / "model", tmp_path / "state"
    await training.publish()
    async with await opened(training, model, state_dir=state) as replica:
        await replica.catch_up()
        await replica.checkpoint()
        (copy,) = state.glob("checkpoint-*/*.safetensors")
        swap_names(copy)
        only_file(model).unlink()
        await replica.check()
        assert await replica.catch_up() == training.position
        assert read_dir(model) == training.tensors(1)


@pytest.mark.parametrize("include", [(), ("model.layers.0.*", "lm_head.weight")], ids=["all", "included"])
async def test_groups_and_header_cover_every_byte(training: Training, tmp_path: Path, include: tuple[str, ...]) -> None:
    """Tensors kept because of a pattern, and those that tied names lead to, too: nothing is left unchecked."""
    await training.publish()
    async with await opened(training, tmp_path, include=include, file_bytes=1500) as replica:
        await replica.catch_up()
        held, weights = replica._holding.held, replica._holding.weights
        assert held is not None
        assert weights is not None
        covered = [
            bytearray(b"\1" * len(file.head) + bytes(file.size - len(file.head))) for file in weights.table.files
        ]
        for group in held.groups:
            for part in each(segments_of(group, weights.table)):
                for row in range(part.rows):
                    start = (part.at + row * part.stride) * group.itemsize
                    end = start + part.run * group.itemsize
                    covered[part.file][start:end] = b"\1" * (end - start)
        assert all(all(file) for file in covered)
