"""``bench.make_deltas`` writes what optimiser steps changed, the same for the same seed; GGUF is read exactly."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import gguf, smollm2
from bench.make_deltas import kept, main
from weightcast.measure.deltasets import Weights, open_delta_set, read_step
from weightcast.measure.errors import MeasureError
from weightcast.measure.training import REGIMES, Sums, Training, published, tiny_policy, train


def test_tiny_deltas_are_sparse_real_and_repeatable(tmp_path: Path) -> None:
    assert main([str(tmp_path / "one"), "--tiny", "--steps", "2"]) == 0
    assert main([str(tmp_path / "two"), "--tiny", "--steps", "2", "--regime", "pure"]) == 0
    one, two = (open_delta_set(tmp_path / folder) for folder in ("one", "two"))
    assert dict(one.steps) == dict.fromkeys(sorted(REGIMES), 2)
    for regime in REGIMES:
        pairs = read_step(one, regime, 2)
        changed = sum(int((pair.base != pair.new).sum()) for pair in pairs)
        assert 0 < changed < 0.1 * sum(pair.new.size for pair in pairs)
    again = read_step(two, "pure", 2)
    assert all(np.array_equal(a.new, b.new) for a, b in zip(read_step(one, "pure", 2), again, strict=True))


def test_a_wrong_call_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.safetensors").touch()
    assert main([str(tmp_path), "--tiny"]) == 1
    assert "holds deltas already" in capsys.readouterr().err
    assert main([str(tmp_path / "x"), "--tiny", "--layers", "three"]) == 1
    assert "--layers is 'all' or numbers" in capsys.readouterr().err
    assert main([str(tmp_path / "x"), "--tiny", "--steps", "0"]) == 1
    assert "--steps and --prompts start at 1" in capsys.readouterr().err
    for option, number in (("--rows", "-5"), ("--seed", "-1"), ("--seed", str(1 << 99))):
        assert main([str(tmp_path / "x"), "--tiny", option, number]) == 1
        assert "--rows starts at 0, --seed lies between" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "folder"):
        assert main([str(out), "--tiny", "--steps", "1"]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"make_deltas: {out / 'base.safetensors'} cannot be written: ")
        assert len(said.splitlines()) == 1
    assert main([str(tmp_path / "x"), "--cache", str(file)]) == 1
    assert "name another --cache" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pure").touch()
    assert main([str(tmp_path / "out"), "--tiny", "--steps", "1", "--regime", "pure"]) == 1
    assert "step001.safetensors cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("regime", REGIMES)
def test_masters_start_where_the_regime_says(regime: str) -> None:
    model = tiny_policy()
    history = train(model, Sums(), Training(regime, lr=1e-12))
    before, after = next(history), next(history)
    rounded = published(model)
    assert all(np.array_equal(before.bits[name], bits) for name, bits in rounded.bits.items())
    changed = sum(int((before.bits[name] != after.bits[name]).sum()) for name in before.bits)
    # Almost no step at all: only masters that lie anywhere in the interval can be next to its end.
    assert changed == 0 if regime != "steady" else changed < 100
    with pytest.raises(MeasureError, match="unknown regime"):
        next(train(model, Sums(), Training("other")))


def test_layers_and_rows_are_kept_as_asked() -> None:
    shapes = {
        "model.embed_tokens.weight": (4, 3),
        "model.layers.0.x": (2,),
        "model.layers.1.x": (2,),
        "model.norm": (3,),
    }
    weights = Weights({name: np.arange(np.prod(s), dtype=np.uint16) for name, s in shapes.items()}, shapes)
    part = kept(weights, frozenset({1}), rows=2)
    assert part.shapes == {"model.embed_tokens.weight": (2, 3), "model.layers.1.x": (2,), "model.norm": (3,)}
    assert part.bits["model.embed_tokens.weight"].tolist() == [0, 1, 2, 3, 4, 5]
    assert kept(weights, None, rows=0).shapes == shapes


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _file(tensors: list[tuple[str, tuple[int, ...], int, bytes]], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 2)
    head += _string("llama.block_count") + struct.pack("<II", 4, 30)
    head += _string("words") + struct.pack("<IIQ", 9, 8, 2) + _string("a") + _string("bc")
    offset, data = 0, b""
    for name, shape, kind, raw in tensors:
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        data += raw + b"\0" * (-len(raw) % 32)
        offset = len(data)
    return head + b"\0" * (-len(head) % 32) + data


def test_gguf_is_read_and_its_grid_dithered_within_half_a_cell() -> None:
    plain = np.arange(6, dtype=np.float32)
    cells = np.arange(32) % 16
    q4 = np.float16(0.5).tobytes() + np.float16(-3).tobytes() + bytes((cells[:16] | cells[16:] << 4).astype(np.uint8))
    q8 = np.float16(0.25).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    file = gguf.parse(_file([("f", (2, 3), 0, plain.tobytes()), ("q4", (1, 32), 3, q4), ("q8", (32,), 8, q8)]))
    assert file.metadata == {"llama.block_count": 30, "words": [b"a", b"bc"]}
    random = np.random.default_rng(0)
    assert np.array_equal(file.read("f", random), plain.reshape(2, 3))
    for name, grid, scale in (("q4", cells * 0.5 - 3, 0.5), ("q8", np.arange(-16, 16) * 0.25, 0.25)):
        off = file.read(name, random).reshape(-1) - grid
        assert np.abs(off).max() <= scale / 2
        assert len(np.unique(off)) > 20


def test_a_file_that_is_no_gguf_is_refused() -> None:
    good = _file([("f", (2,), 0, b"\0" * 8), ("strange", (32,), 2, b"\0" * 18)])
    for raw, sentence in (
        (b"nonsense", "no GGUF file"),
        (_file([], version=2), "version 2"),
        (good[:60], "damaged"),
    ):
        with pytest.raises(MeasureError, match=sentence):
            gguf.parse(raw)
    with pytest.raises(MeasureError, match="ggml type 2"):
        gguf.parse(good).read("strange", np.random.default_rng(0))


def test_names_become_those_of_hugging_face() -> None:
    assert smollm2.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2.hf_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    with pytest.raises(MeasureError, match="no tensor of a Llama model"):
        smollm2.hf_name("blk.0.ffn_gate_exps.weight")


def test_rewards_count_new_tokens_that_begin_right() -> None:
    starts = {"a": torch.tensor([True, True, False]), "b": torch.tensor([False, False, True])}
    task = smollm2.Words(torch.tensor([[7, 1], [7, 2]]), ("a", "b"), starts, answer_tokens=2)
    prompt = torch.tensor([[7, 1], [7, 1], [7, 2]])
    answer = torch.tensor([[0, 1], [0, 0], [0, 2]])
    assert task.rewards(prompt, answer).tolist() == pytest.approx([1.1, 0.55, 0.6])
