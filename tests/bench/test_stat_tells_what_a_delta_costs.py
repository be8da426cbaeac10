"""``weightcast codec stat`` tells what changed, by how much and what it costs; bad input is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from weightcast.commands.codec import command
from weightcast.measure.errors import MeasureError


def stat(*arguments: object) -> str:
    done = CliRunner().invoke(command, ["stat", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_json_has_changes_histogram_and_bytes_of_every_format(checkpoints: tuple[Path, Path]) -> None:
    found = json.loads(stat(*checkpoints, "--json"))
    assert (found["elements"], found["raw_bytes"], found["changed"]) == (816, 1600 + 128, 4)
    assert [tensor["name"] for tensor in found["tensors"]] == ["b", "layers.0.a"]
    assert found["tensors"][1] == {
        "name": "layers.0.a",
        "dtype": "BF16",
        "shape": [8, 100],
        "elements": 800,
        "changed": 4,
        "median_step": 1.0,
        "largest_step": 3,
    }
    assert found["histogram"] == [
        {"low": 1, "high": 1, "up": 2, "down": 1},
        {"low": 3, "high": 3, "up": 1, "down": 0},
    ]
    sizes = {row["name"]: row["bytes"] for row in found["formats"]}
    assert list(sizes) == ["auto", "fields_v1", "XOR + zstd-1", "PULSESync", "TRL draft", "full"]
    assert sizes["TRL draft"] == 4 * 6 + 128
    assert sizes["auto"] < sizes["TRL draft"] < sizes["full"] < found["raw_bytes"] + 64


def test_tables_name_every_format_and_tensor(checkpoints: tuple[Path, Path]) -> None:
    shown = stat(*checkpoints)
    assert "4 of 816 weights changed" in shown
    assert all(word in shown for word in ("auto", "PULSESync", "TRL draft", "full", "layers.0.a", "I64", "ulps"))
    assert "(1 left out)" in stat(*checkpoints, "--tensors", 1)


def test_nothing_changed_is_a_few_bytes(checkpoints: tuple[Path, Path]) -> None:
    found = json.loads(stat(checkpoints[0], checkpoints[0], "--json"))
    assert (found["changed"], found["histogram"]) == (0, [])
    assert found["formats"][0]["bytes"] < 100
    assert "0 of 816" in stat(checkpoints[0], checkpoints[0])


def test_directories_are_read_through_their_index(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    for name, file in zip(("old", "now"), checkpoints, strict=True):
        folder = tmp_path / name
        folder.mkdir()
        file.rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"layers.0.a": "model-00001-of-00001.safetensors"}})
        )
    assert json.loads(stat(tmp_path / "old", tmp_path / "now", "--json"))["changed"] == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.bool])
def test_every_dtype_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    old = torch.zeros(1000, dtype=torch.float32)
    now = old.clone()
    now[::10] = 1
    save_file({"w": old.to(dtype), "empty": torch.empty(0, dtype=dtype)}, tmp_path / "old.safetensors")
    save_file({"w": now.to(dtype), "empty": torch.empty(0, dtype=dtype)}, tmp_path / "now.safetensors")
    files = tmp_path / "old.safetensors", tmp_path / "now.safetensors"
    assert json.loads(stat(*files, "--json"))["changed"] == 100
    far = dtype == torch.float32  # from 0 to 1 is 2**30 steps
    assert ("and more" in stat(*files)) == far


def _save(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def test_what_does_not_belong_together_is_named(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = checkpoints
    a, b = torch.ones(8, 100, dtype=torch.bfloat16), torch.arange(16)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(base.read_bytes()[:-1])
    wrong = {
        "b is in .* and not in": _save(tmp_path / "less.safetensors", **{"layers.0.a": a}),
        r"layers.0.a is BF16 \[8, 100\] in .* and BF16 \[800\]": _save(
            tmp_path / "shape.safetensors", **{"layers.0.a": a.reshape(800), "b": b}
        ),
        "b is I64 .* and I32": _save(tmp_path / "dtype.safetensors", **{"layers.0.a": a, "b": b.int()}),
        "does not exist": tmp_path / "nothing",
        "cannot be read as safetensors": damaged,
    }
    for sentence, new in wrong.items():
        with pytest.raises(MeasureError, match=sentence):
            stat(base, new)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("a b", (8,), "'a b' is not a tensor name: use 1 to 512 printable ASCII characters without spaces"),
        ("a" * 600, (8,), f"'{'a' * 80}' is not a tensor name"),
        ("w [red]x[/red]\x1b[31m", (8,), r"'w [red]x[/red]\x1b[31m' is not a tensor name"),
        ("w", (1,) * 8 + (2,), "w has 9 axes: tensors have 0 to 8"),
    ],
)
def test_tensors_that_could_not_be_published_are_one_sentence(
    name: str, shape: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    file = _save(tmp_path / "odd.safetensors", **{name: torch.ones(shape)})
    with pytest.raises(MeasureError) as raised:
        stat(file, file)
    assert str(raised.value).startswith(f"these tensors could not be published: {why}")
    assert str(raised.value).isprintable()


def test_bad_input_is_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("not a checkpoint")
    done = subprocess.run(
        [sys.executable, "-m", "weightcast", "codec", "stat", str(tmp_path / "text.safetensors"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("weightcast: ")
    assert len(done.stderr.splitlines()) == 1
