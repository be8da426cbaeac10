"""Bad input is named: what, where, what to do. At the first publication it raises, later it never stops training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainer_agent import Piece, Publisher
from trainer_agent.errors import ArenaTooSmall, InvalidPieces, LayoutRefused, Misuse, PiecesChanged, SetupRefused
from trainer_agent.launching import resolve_launch, resolve_ranks

STATE = {"a": torch.ones(4, 4), "b": torch.ones(3)}

CHANGES = {
    "c was added": STATE | {"c": torch.ones(2)},
    "b is missing|of b is missing": {"a": STATE["a"]},
    r"a changed shape from \[4, 4\] to \[4, 5\]": STATE | {"a": torch.ones(4, 5)},
    "b changed dtype from BF16 to I64": STATE | {"b": torch.ones(3, dtype=torch.int64)},
}


def test_changed_pieces_are_named_and_the_next_publication_goes_on(service, check_same) -> None:
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(STATE, 0).sealed(30)
        for sentence, changed in CHANGES.items():
            handle = publisher.publish(changed, 1)
            with pytest.raises(PiecesChanged, match=sentence):
                handle.sealed(0)
        state = {name: tensor * 2 for name, tensor in STATE.items()}
        assert publisher.publish(state, 2).sealed(30) == 2
        check_same(service.read("r").tensors, state)


def test_strict_raises_what_is_otherwise_left_on_the_handle(service) -> None:
    with Publisher(run="r", store=service.store_url, coordinator=service.url, strict=True) as publisher:
        publisher.publish(STATE, 0).sealed(30)
        with pytest.raises(PiecesChanged):
            publisher.publish({"a": STATE["a"]}, 1)


def test_a_new_launch_with_other_tensors_is_refused_at_once(service) -> None:
    options = {"run": "r", "store": service.store_url, "coordinator": service.url}
    with Publisher(**options) as publisher:
        publisher.publish(STATE, 0).sealed(30)
    with Publisher(**options) as publisher, pytest.raises(LayoutRefused, match="c was added"):
        publisher.publish(STATE | {"c": torch.ones(2)}, 1)


def test_another_store_than_the_coordinators_is_named_at_once(service, tmp_path) -> None:
    other = f"file://{tmp_path}/other"
    with (
        Publisher(run="r", store=other, coordinator=service.url) as publisher,
        pytest.raises(SetupRefused, match=r"holds no run r.*different stores"),
    ):
        publisher.publish(STATE, 0)


def test_overlapping_rows_are_refused_by_name_on_both_ranks(service, launch_ranks) -> None:
    ranks = launch_ranks(service, 2)
    tensor = torch.ones(8, 2)
    rows = [(0, 5), (4, 8)]

    def publish(publisher: Publisher, rank: int) -> None:
        first, end = rows[rank]
        publisher.publish([Piece("model.w", (8, 2), (first, 0), tensor[first:end])], 0)

    for error in ranks.together(publish):
        assert isinstance(error, LayoutRefused)
        assert "model.w: box [0:5, 0:2] of rank 0 and box [4:8, 0:2] of rank 1" in str(error)


def test_a_small_shared_memory_is_named_with_the_size_needed(service, small_tmpfs) -> None:
    options = {"run": "r", "store": service.store_url, "coordinator": service.url, "shm_dir": small_tmpfs("20m")}
    with (
        Publisher(**options) as publisher,
        pytest.raises(ArenaTooSmall, match=r"has 20 MiB free; this rank needs 32 MiB .*--shm-size"),
    ):
        publisher.publish({"w": torch.ones(4 << 20)}, 0)


def test_a_bucket_that_does_not_exist_raises_at_the_first_publication(service, s3_url) -> None:
    url = s3_url("exists").replace("s3://exists", "s3://does-not-exist")
    with (
        Publisher(run="r", store=url, coordinator=service.url) as publisher,
        pytest.raises(SetupRefused, match="does-not-exist"),
    ):
        publisher.publish(STATE, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"run": "Not A Run"}, "not a run name"),
        ({"rank": 1}, "both rank and world_size"),
        ({"rank": 2, "world_size": 2, "launch": "x"}, "rank 2 is not one of"),
        ({"rank": 0, "world_size": 2}, "pass launch"),
        ({"launch": "a b"}, "launch is 1 to 128"),
        ({"full_every": -1}, "full_every"),
    ],
)
def test_arguments_that_cannot_work_start_nothing(arguments, sentence, shm_dir) -> None:
    options = {"run": "r", "store": "file:///nowhere", "coordinator": "http://127.0.0.1:1", **arguments}
    with pytest.raises(Misuse, match=sentence):
        Publisher(**options)
    assert not list(shm_dir.iterdir())


def test_a_process_group_of_another_size_agrees_on_no_launch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert resolve_ranks(None, None) == (0, 1)
        with pytest.raises(Misuse, match="2 ranks need one launch"):
            resolve_launch(None, 0, 2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.nn.Linear(2, 2), "pass its state_dict"),
        (7, "a state dict, pieces, or pairs"),
        ({"a": "text"}, "a: expected a tensor"),
        ({"a b": torch.ones(1)}, "not a tensor name"),
        ([("a", torch.ones(1)), "b"], "pairs of name and tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a: a sparse"),
        ({"a": torch.ones(2, device="meta")}, "a: a sparse, quantised or meta tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "a: checkpoints have no dtype"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "comes twice"),
    ],
)
def test_what_is_no_weights_is_refused_before_anything_is_sent(given, sentence, publisher_at_work) -> None:
    with pytest.raises(InvalidPieces, match=sentence):
        publisher_at_work.publish(given, 0)


@pytest.fixture(scope="module")
def publisher_at_work(start_service, tmp_path_factory) -> Iterator[Publisher]:
    """A Publisher whose first publication is still to come."""
    service = start_service(f"file://{tmp_path_factory.mktemp('bucket')}")
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        yield publisher
    service.stop()


def test_a_box_outside_its_tensor_is_no_piece() -> None:
    with pytest.raises(InvalidPieces, match="w: box"):
        Piece("w", (4, 4), (2, 0), torch.ones(3, 4))


def test_a_step_is_any_integer_and_nothing_else(service) -> None:
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        assert publisher.publish(STATE, np.int64(3)).sealed(60) == 1
        for step in (1.5, "4", -1, 2**63):
            handle = publisher.publish(STATE, step)  # type: ignore[arg-type]
            assert "step is a count from 0" in str(handle.error)
        assert publisher.publish(STATE, 4).sealed(60) == 2


def test_a_publisher_closed_before_its_sidecar_listens_leaves_no_traceback(service, capfd) -> None:
    publisher = Publisher(run="r", store=service.store_url, coordinator=service.url)
    pid = publisher.sidecar_pid
    publisher.close()
    deadline_s = time.monotonic() + 60
    while pid is not None and Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ({"__metadata__": torch.ones(2)}, {}, "__metadata__ is no tensor name"),
        ({"w": torch.ones(2)}, {"aliases": {"__metadata__": "w"}}, "__metadata__ is no tensor name"),
        ({1: torch.ones(2)}, {}, "1 is no tensor name"),
        ({"w": torch.ones((1,) * 9)}, {}, "has 9 axes"),
        ({"w": torch.ones(2)}, {"dtype": "int8"}, "dtype is a torch.dtype or None, not 'int8'"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(service, given, options, sentence) -> None:
    with (
        Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher,
        pytest.raises(InvalidPieces, match=sentence),
    ):
        publisher.publish(given, 0, **options)


def test_shared_memory_too_deep_for_a_socket_is_named_at_once(service, tmp_path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with pytest.raises(Misuse, match=r"is too long a path: the sidecar's socket .* choose another shm_dir"):
        Publisher(run="r", store=service.store_url, coordinator=service.url, shm_dir=deep)
    assert not list(deep.iterdir())
