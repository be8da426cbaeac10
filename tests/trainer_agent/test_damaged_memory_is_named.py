"""Shared memory that changes by itself is never published: not the copy that waits, not the base, and both are told."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from trainer_agent import Publisher
from trainer_agent.errors import WeightsDamaged
from trainer_agent.state import STATE_FILE, State, unseal

MakeState = Any


def state_of(publisher: Publisher) -> State:
    """What a restarted sidecar would find."""
    found = unseal(publisher._arena.read(STATE_FILE) or b"")
    assert found is not None
    return found


def flip(publisher: Publisher, slot: int, at: int = 100) -> None:
    """One bit of a slot."""
    memory = publisher._arena.map(f"slot{slot}")
    memory[at] ^= 1


def publish_while_away(publisher: Publisher, service: Any, state: dict[str, torch.Tensor], *, kill: bool) -> Any:
    """Publish while no coordinator answers, and let a bit of the copy flip before one does."""
    service.stop()
    handle = publisher.publish(state, 1)
    while (waiting := state_of(publisher).waiting) is None or waiting.ordinal != handle.ordinal:
        time.sleep(0.02)
    if kill:
        assert publisher.sidecar_pid is not None
        os.kill(publisher.sidecar_pid, signal.SIGKILL)
    flip(publisher, waiting.slot)
    service.start()
    return handle


@pytest.mark.parametrize("kill", [False, True], ids=["the same sidecar", "a restarted one"])
def test_a_copy_that_changed_while_it_waited_is_not_published(
    service: Any, make_state: MakeState, moved: Any, check_same: Any, kill: bool
) -> None:
    first = make_state()
    second = moved(first)
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(first, 0).sealed(30)
        handle = publish_while_away(publisher, service, second, kill=kill)
        with pytest.raises(WeightsDamaged, match=r"the group of \S+: XXH3-128 [0-9a-f]{32}, expected [0-9a-f]{32}"):
            handle.sealed(60)
        assert service.read("r").position.version == 1
        after = publisher.publish(second, 2)
        after.sealed(30)
        assert after.stats is not None
        assert after.stats.damaged_groups == 0
        check_same(service.read("r").tensors, second)


def test_a_base_that_changed_is_counted_and_its_group_is_named(
    service: Any, make_state: MakeState, moved: Any, check_same: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    first = make_state()
    second = moved(first)
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(first, 0).sealed(30)
        base = state_of(publisher).base
        assert base is not None
        flip(publisher, base.slot)
        handle = publisher.publish(second, 1)
        handle.sealed(30)
        assert handle.stats is not None
        assert handle.stats.damaged_groups == 1
        check_same(service.read("r").tensors, second)
    told = capfd.readouterr().err
    assert "the base in shared memory changed by itself, and 1 of its groups were sent whole" in told
    assert f"expected {base.digests[:32]}" in told
