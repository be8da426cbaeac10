"""What the demo claims to check, it does: each check is made to fail."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.demo import learning
from weightcast.demo.boxes import LocalBox, save_bytes, save_places, sha256_of
from weightcast.demo.engines import Claims, Engines
from weightcast.demo.errors import DemoError
from weightcast.demo.guard import nothing_gathered
from weightcast.demo.job import PolicyJob, checked_step
from weightcast.demo.loaded import LoadedModel
from weightcast.demo.policy import PolicyConfig
from weightcast.demo.proof import prove


@pytest.fixture
def small_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PolicyConfig(width=48, inner=64, layers=1)
    monkeypatch.setattr("weightcast.demo.job.PolicyConfig", lambda: config)


@pytest.mark.usefixtures("one_rank", "small_policy")
def test_rewards_without_variance_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PolicyJob(seed=1, learning_rate=1e-6)
    monkeypatch.setattr(learning, "rewards", lambda prompt, answer: torch.ones(len(prompt)))
    with pytest.raises(DemoError, match="no variance"):
        job.step(1)


@pytest.mark.usefixtures("one_rank", "small_policy")
def test_a_step_that_changes_no_weight_ends_the_job() -> None:
    job = PolicyJob(seed=1, learning_rate=0.0)
    job.warm_up(1, lambda done, loss: None)
    with pytest.raises(DemoError, match="step 1 changed no published weight"):
        checked_step(job, 1)


GATHER = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from weightcast.demo.errors import DemoError
from weightcast.demo.guard import nothing_gathered
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
sharded = distribute_tensor(torch.randn(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
ways = {
    "full_tensor": lambda: sharded.full_tensor(),
    "redistribute": lambda: sharded.redistribute(placements=[Shard(1)]),
    "all_gather": lambda: dist.all_gather([torch.empty(4, 4), torch.empty(4, 4)], sharded.to_local()),
    "cat": lambda: torch.cat([sharded.to_local(), sharded.to_local()]),
    "nothing": lambda: sharded.to_local().bfloat16(),
}
for way, attempt in ways.items():
    try:
        with nothing_gathered([sharded]):
            attempt()
    except DemoError as error:
        print(way, "refused:", error)
    else:
        print(way, "allowed")
sharded.full_tensor()
dist.destroy_process_group()
"""


def test_a_rank_that_makes_a_whole_sharded_tensor_ends_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GATHER]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, complaints = rank.communicate(timeout=200)
        assert rank.returncode == 0, complaints
        outcome = dict(line.split(maxsplit=2)[:2] for line in said.splitlines())
        assert outcome.pop("nothing") == "allowed"
        assert set(outcome) == {"full_tensor", "redistribute", "all_gather", "cat"}
        assert set(outcome.values()) == {"refused:"}, said


def test_outside_the_guard_nothing_is_refused() -> None:
    with nothing_gathered([]):
        pass
    assert torch.distributed.all_gather.__module__ == "torch.distributed.distributed_c10d"


BOXES = [
    LocalBox("a", (4, 3), 0, torch.arange(6, dtype=torch.bfloat16).view(2, 3)),
    LocalBox("b", (), 0, torch.tensor(2.5, dtype=torch.bfloat16)),
]
REST = [LocalBox("a", (4, 3), 2, torch.arange(6, 12, dtype=torch.bfloat16).view(2, 3))]


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path]:
    """(work directory with the testimony of two ranks, model directory that agrees with it)."""
    for rank, boxes in enumerate([BOXES, REST]):
        save_places(tmp_path / f"places-{rank}.json", boxes)
        save_bytes(tmp_path / f"testimony-{rank}.bin", boxes)
    model = tmp_path / "model"
    write_model(model, {"a": torch.arange(12, dtype=torch.bfloat16).view(4, 3), "b": BOXES[1].tensor})
    return tmp_path, model


def write_model(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    model.mkdir(exist_ok=True)
    save_file(tensors, str(model / "model-00001-of-00001.safetensors"))
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def test_equal_bytes_are_proved(published: tuple[Path, Path]) -> None:
    work, model = published
    (proof,) = prove(work, 2, {"eu-west": model})
    assert proof.equal
    assert (proof.tensors, proof.compared_bytes) == (2, 26)


def flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"].view(torch.int16)[3, 2] ^= 1


def extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["c"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("alter", "different"), [(flip, "a rows 2 to 3 of rank 1"), (extra, "c: not published")], ids=["flip", "extra"]
)
def test_one_other_bit_or_tensor_is_found_and_named(
    alter: Callable[[dict[str, torch.Tensor]], None], different: str, published: tuple[Path, Path]
) -> None:
    work, model = published
    tensors = {"a": torch.arange(12, dtype=torch.bfloat16).view(4, 3), "b": BOXES[1].tensor}
    alter(tensors)
    write_model(model, tensors)
    (proof,) = prove(work, 2, {"eu-west": model})
    assert proof.different == (different,)
    assert not proof.equal


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"b": BOXES[1].tensor}, "has no tensor a"),
        ({"a": torch.zeros(3, 4, dtype=torch.bfloat16)}, "a has shape"),
        ({"a": torch.zeros(4, 3, dtype=torch.float16)}, "a is torch.float16"),
    ],
)
def test_another_tensor_list_is_an_error(
    tensors: dict[str, torch.Tensor], sentence: str, published: tuple[Path, Path]
) -> None:
    work, model = published
    write_model(model, tensors)
    with pytest.raises(DemoError, match=sentence):
        prove(work, 2, {"eu-west": model})


def test_an_engine_refuses_a_version_that_no_rank_exported(published: tuple[Path, Path]) -> None:
    work, model = published
    claims = Claims(work, 2)
    claims.add(1, 0, sha256_of(BOXES))
    claims.add(1, 1, sha256_of(REST))
    claims.compare("eu-west", 1, 1, model)
    assert claims.compared("eu-west") == 1
    claims.add(2, 0, sha256_of(BOXES))
    claims.add(2, 1, "0" * 64)
    with pytest.raises(DemoError, match="eu-west serves other bytes for version 2 than rank 1 exported"):
        claims.compare("eu-west", 2, 2, model)
    assert claims.compared("eu-west") == 1


def test_an_engine_that_cannot_load_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.demo.engines._GATE_TIMEOUT_S", 0.1)
    with Engines(["eu-west"], Claims(tmp_path, 1)) as engines:
        body = json.dumps({"run": "demo", "version": 1, "step": 1, "path": str(tmp_path)}).encode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(engines.addresses["eu-west"], data=body), timeout=10)
        refused.value.close()
        with pytest.raises(DemoError, match="no whole version"):
            engines.check()


def test_names_of_a_loaded_model_are_those_of_its_index(published: tuple[Path, Path]) -> None:
    with LoadedModel(published[1]) as model:
        assert model.names == {"a", "b"}
