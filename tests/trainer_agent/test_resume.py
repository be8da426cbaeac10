"""A new launch goes on where the run is: version goes on, step may go back, and the first version is a delta."""

from __future__ import annotations

import torch

from trainer_agent import Publisher


def test_a_resume_from_an_older_step_is_a_delta_from_a_rebuilt_base(service, make_state, moved, check_same) -> None:
    states = [make_state()]
    for _ in range(3):
        states.append(moved(states[-1]))
    options = {"run": "r", "store": service.store_url, "coordinator": service.url}
    with Publisher(**options) as publisher:
        for step in range(3):
            publisher.publish(states[step], step).sealed(30)
    with Publisher(**options) as publisher:
        handle = publisher.publish(states[1], 1)
        assert handle.sealed(30) == 4
        found = service.read("r")
        check_same(found.tensors, states[1])
        assert (found.manifest.step, found.manifest.term) == (1, 2)
        assert found.manifest.full_version == 1
        assert len(found.receipts[0].full) < len(found.receipts[0].sizes)
        publisher.publish(states[2], 2).sealed(30)
        check_same(service.read("r").tensors, states[2])


def test_a_full_that_a_launch_left_is_told_of_by_the_next(service, make_state, moved, check_same) -> None:
    state, known = make_state(), []
    for step in range(3):
        with Publisher(run="r", store=service.store_url, coordinator=service.url, full_every=1) as publisher:
            publisher.publish(state, step).sealed(30)
        found = service.read("r")
        check_same(found.tensors, state)
        known.append(found.manifest.full_version)
        state = moved(state)
    assert known == [1, 1, 2]


def test_another_world_size_sends_fulls_inside_an_ordinary_version(service, launch_ranks, check_same) -> None:
    state = {"w": torch.randn(64, 64), "v": torch.randn(3)}
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(state, 0).sealed(30)
    ranks = launch_ranks(service, 2)
    for version in (2, 3):
        state = {name: tensor + 1e-3 for name, tensor in state.items()}
        handles = ranks.together(lambda p, _, state=state, version=version: p.publish(state, version))
        assert [handle.sealed(30) for handle in handles] == [version, version]
        check_same(service.read("r").tensors, state)
    assert service.read("r").manifest.full_version == 2
