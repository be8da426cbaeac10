"""One rank: what a reader rebuilds from the bucket is bit for bit what was handed to ``publish``."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch

from trainer_agent import Piece, Publisher
from trainer_agent.shard import BlockHasher


def test_each_version_is_rebuilt_bit_for_bit_and_all_but_the_first_are_deltas(
    service, make_state, moved, check_same
) -> None:
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(4):
            handle = publisher.publish(state, step)
            assert handle.copied
            assert handle.sealed(30) == step + 1 == handle.version
            found = service.read("r")
            check_same(found.tensors, state)
            assert found.manifest.step == step
            assert handle.stats is not None
            if step:
                assert handle.stats.payload_bytes < handle.stats.weight_bytes / 4
                assert found.manifest.full_version == 1
            state = moved(state)


def test_nan_payloads_infinities_and_signed_zeros_survive(service) -> None:
    bits = torch.tensor([0x7FC1, 0x7F81, 0xFFC0, 0x7F80, 0x8000, 0x0001], dtype=torch.int32).to(torch.int16)
    state = {"odd.weight": bits.view(torch.bfloat16)}
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(state, 0).sealed(30)
    assert torch.equal(service.read("r").tensors["odd.weight"].view(torch.int16), bits)


def test_pairs_iterators_and_pieces_give_the_same_as_a_state_dict(service, make_state, moved, check_same) -> None:
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(((name, tensor) for name, tensor in state.items()), 0).sealed(30)
        check_same(service.read("r").tensors, state)
        state = moved(state)
        publisher.publish(list(state.items()), 1).sealed(30)
        check_same(service.read("r").tensors, state)
        state = moved(state)
        pieces = [Piece(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in state.items()]
        publisher.publish(pieces, 2).sealed(30)
        check_same(service.read("r").tensors, state)


def test_columns_of_a_tensor_are_published_as_strided_boxes(service, check_same) -> None:
    tensor = torch.randn(33, 40)
    cuts = [(0, 0, 20, 16), (0, 16, 20, 40), (20, 0, 33, 40)]
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(2):
            pieces = [Piece("w", (33, 40), (a, b), tensor[a:c, b:d]) for a, b, c, d in cuts]
            publisher.publish(pieces, step).sealed(30)
            check_same(service.read("r").tensors, {"w": tensor})
            tensor = tensor + 1e-3


def test_tied_weights_are_stored_once_and_their_alias_is_recorded(service, check_same) -> None:
    embedding = torch.randn(64, 16)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding, "view": embedding[:8]}
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        publisher.publish(state, 0).sealed(30)
    found = service.read("r")
    assert found.layout.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    check_same(found.state(), state)


def test_frozen_tensors_may_stay_away_and_cost_nothing(service, make_state, check_same) -> None:
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url) as publisher:
        for step in range(4):
            given = state if step < 2 else {n: t for n, t in state.items() if "embed" not in n}
            publisher.publish(given, step, frozen="*embed*").sealed(30)
            found = service.read("r")
            check_same(found.tensors, state)
            assert [found.layout.names[i] for i in found.layout.frozen] == ["model.embed_tokens.weight"]
            state = {n: t + 1 if "embed" not in n and t.is_floating_point() else t for n, t in state.items()}


def test_config_and_tokenizer_travel_with_the_weights(service, tmp_path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json", "run.py"):
        (directory / name).write_text(name)
    with Publisher(run="r", store=service.store_url, coordinator=service.url, assets_dir=directory) as publisher:
        for step in range(2):
            publisher.publish({"w": torch.ones(3)}, step).sealed(30)
    names = [asset.name for asset in service.read("r").manifest.assets]
    assert names == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_a_full_is_added_in_the_background_and_becomes_the_newest(service, make_state, moved, check_same) -> None:
    state = make_state()
    with Publisher(run="r", store=service.store_url, coordinator=service.url, full_every=3) as publisher:
        for step in range(30):
            publisher.publish(state, step).sealed(30)
            found = service.read("r")
            check_same(found.tensors, state)
            if found.manifest.extra_full:
                break
            state = moved(state)
            time.sleep(0.05)
    assert found.manifest.full_version in (3, 6, 9)
    assert len(found.manifest.extra_full) == 1


@pytest.mark.parametrize("size", [0, 7, 8, 9, 24])
@pytest.mark.parametrize("step", [1, 3, 8, 24])
def test_every_block_of_a_shard_has_its_digest_the_last_may_be_short(
    monkeypatch: pytest.MonkeyPatch, size: int, step: int
) -> None:
    monkeypatch.setattr("trainer_agent.shard.BLOCK_BYTES", 8)
    data, hasher = bytes(range(size)), BlockHasher()
    for start in range(0, size, step):
        hasher.feed(data[start : start + step])
    blocks = [data[start : start + 8] for start in range(0, size, 8)]
    assert hasher.finish() == "".join(hashlib.sha256(block).hexdigest() for block in blocks)
    assert hasher.total == size
