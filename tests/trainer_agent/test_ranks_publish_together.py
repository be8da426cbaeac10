"""Four real gloo processes, sharded in all the ways trainers shard: a reader finds what the ranks held, once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SHM_PREFIX

WORLD_SIZE = 4
JOBS = Path(__file__).with_name("jobs.py")


@pytest.fixture(scope="module")
def played(tmp_path_factory, start_service) -> Iterator[tuple[object, Path]]:
    """All jobs of jobs.py, run once: the service, and the directory with what the weights were."""
    out = tmp_path_factory.mktemp("jobs")
    (out / "bucket").mkdir()
    service = start_service(f"file://{out / 'bucket'}")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=SHM_PREFIX) as shm:
        environment = {**os.environ, "WEIGHTCAST_SHM_DIR": shm, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(JOBS)]
        arguments = [str(WORLD_SIZE), service.store_url, service.url, str(out)]
        ranks = [
            subprocess.Popen([*command, str(rank), *arguments], env=environment, stderr=subprocess.STDOUT)
            for rank in range(WORLD_SIZE)
        ]
        deadline = time.monotonic() + 240
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
                if any(rank.poll() for rank in ranks):
                    break
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE
        assert not list(Path(shm).iterdir())
    yield service, out
    service.stop()


def weights(out: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / f"{run}.{step}")


@pytest.mark.parametrize("run", ["fsdp-uneven", "hsdp", "mixed"])
def test_every_version_is_rebuilt_bit_for_bit(played, check_same, run: str) -> None:
    service, out = played
    for step in range(2):
        found = service.read(run, step + 1)
        check_same(found.state(), weights(out, run, step))
    assert found.manifest.full_version == 1


def test_replicated_boxes_have_one_owner_balanced_by_bytes(played) -> None:
    service, _ = played
    layout = service.read("hsdp").layout
    assert {group.owner for group in layout.groups} == set(range(WORLD_SIZE))
    pieces = [(g.owner, p) for g in service.read("mixed").layout.groups for p in g.pieces]
    replicas = [(owner, piece.tensor.name) for owner, piece in pieces if "replicas" in piece.tensor.name]
    assert sorted(name for _, name in replicas) == [f"replicas.layers.{i}.w" for i in range(8)]
    assert len({owner for owner, _ in replicas}) > 1


def test_tied_weights_are_stored_once_even_where_a_rank_has_no_rows(played) -> None:
    service, _ = played
    assert service.read("fsdp-uneven").layout.aliases == {"lm_head.weight": "embed_tokens.weight"}


def test_a_large_full_tensor_is_shared_out_by_rows(played) -> None:
    service, _ = played
    layout = service.read("mixed").layout
    owners = {group.owner for group in layout.groups for piece in group.pieces if piece.tensor.name == "full.big"}
    assert owners == set(range(WORLD_SIZE))


def test_boxes_are_cut_on_both_axes_of_a_mesh(played) -> None:
    service, _ = played
    layout = service.read("mixed").layout
    pieces = [p for g in layout.groups for p in g.pieces if p.tensor.name == "experts.w1"]
    boxes = {str(piece.box) for piece in pieces}
    assert boxes == {"[0:2, 0:4, 0:6]", "[0:2, 4:7, 0:6]", "[2:4, 0:4, 0:6]", "[2:4, 4:7, 0:6]"}
