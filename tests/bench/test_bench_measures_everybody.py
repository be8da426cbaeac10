"""``weightcast bench codec`` gives every coder a row on every delta, with peers or without, and checks every bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import codec
from weightcast.commands.bench import command
from weightcast.measure import bench, cases, picture, report
from weightcast.measure.coders import OURS, Coded, Delta
from weightcast.measure.deltasets import Weights, open_delta_set, read_step, write_base, write_step
from weightcast.measure.errors import MeasureError
from weightcast.measure.pairs import Pair, groups
from weightcast.measure.peers import NOT_INSTALLED, PEERS
from weightcast.measure.timing import Budget, best_of

QUICK = Budget(least=1, most=1)
CODERS = ["ulp_v1", "fields_v1", "PULSEPT1 v3", "ARCv3", "ARCv2", "PULSESync", "TRL draft", "XOR + zstd-1"]


@pytest.fixture
def deltas(tmp_path: Path) -> Path:
    """A folder with two steps of one regime."""
    shapes = {"model.w": (40, 100), "norm": (64,)}
    random = np.random.default_rng(0)
    weights = [
        Weights({name: random.integers(0x3C00, 0x3F00, np.prod(s), np.uint16) for name, s in shapes.items()}, shapes)
    ]
    for _ in range(2):
        now = {name: bits.copy() for name, bits in weights[-1].bits.items()}
        now["model.w"][random.choice(4000, 50, replace=False)] += np.uint16(1)
        weights.append(Weights(now, shapes))
    folder = tmp_path / "deltas"
    write_base(folder, weights[0], "for a test")
    for step in (1, 2):
        assert write_step(folder, "steady", step, weights[step - 1], weights[step]) == 50
    return folder


def test_the_command_measures_a_folder_beside_synthetic_deltas(deltas: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        command,
        [
            "codec",
            "--data",
            str(deltas),
            "--weights",
            "3000",
            "--cpu-seconds",
            "0",
            "--out",
            str(tmp_path / "out"),
            "--json",
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    names = [case["name"] for case in found["cases"]]
    assert names[0] == "steady 1->2"
    rates = ["i.i.d. lr 1e-7", "i.i.d. lr 1e-6", "i.i.d. lr 3e-6"]
    assert names[1:7] == [name + more for name in rates for more in ("", ", 1 MiB tensors and norms")]
    assert [name.split()[1] for name in names[7:]] == ["F16", "F32", "F8_E4M3", "F8_E5M2"]
    for case in found["cases"]:
        is_bf16 = case["dtypes"] == ["BF16"]
        assert [row["coder"] for row in case["rows"]] == ([] if is_bf16 else ["auto"]) + CODERS
        assert all(case[key] > 0 for key in ("raw_bytes", "memcpy_gbps", "xxh3_gbps"))
        for row in case["rows"]:
            assert row["note"] in (None, NOT_INSTALLED, "BF16 only")
            assert (row["size_bytes"] is None) == (row["note"] is not None)
        mine = next(row for row in case["rows"] if row["coder"] == "ulp_v1")
        assert mine["percent"] == pytest.approx(100 * mine["size_bytes"] / case["raw_bytes"])
    assert found["cases"][0]["changed"] == 50
    assert {case["floor"] for case in found["cases"]} == {"exact", "empirical"}
    written = (tmp_path / "out" / "bench.md").read_text()
    assert all(name in written for name in [*names, *CODERS, "floor", "memcpy", "XXH3-128"])
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == found


def test_cases_can_be_chosen(deltas: Path) -> None:
    options = ["codec", "--data", str(deltas), "--weights", "3000", "--cpu-seconds", "0"]
    done = CliRunner().invoke(command, [*options, "--json", "--case", "steady", "--case", "lr 3e-6,"])
    names = [case["name"] for case in json.loads(done.stdout)["cases"]]
    assert names == ["steady 1->2", "i.i.d. lr 3e-6, 1 MiB tensors and norms"]
    done = CliRunner().invoke(command, [*options, "--case", "nothing like it"])
    assert (done.exit_code, "no case has 'nothing like it' in its name" in done.output) == (2, True)


def test_where_results_go_is_made_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured for nothing")

    monkeypatch.setattr(bench, "run", never)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        CliRunner().invoke(command, ["codec", "--out", str(tmp_path / "file" / "out")], catch_exceptions=False)


def test_ulp_is_not_compared_with_where_it_codes_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("w", (50, 20), 30)
    case = bench.Case("one", [replace(pair, dtype="I16")])
    notes = {row.coder: row.note for row in bench.run([case], budget=QUICK).cases[0].rows}
    assert notes["ulp_v1"] == "floats of 8, 16 and 32 bits only"
    assert notes["fields_v1"] is None


def test_without_peers_their_rows_say_so(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    measured = bench.run([bench.Case("one", [make_pair("w", (50, 20), 30)])], budget=QUICK)
    notes = {row.coder: row.note for row in measured.cases[0].rows}
    assert {coder: note for coder, note in notes.items() if note} == {peer.name: NOT_INSTALLED for peer in PEERS}
    assert "not installed" in report.to_markdown(measured)
    assert not picture.draw(measured, Path("never-written.png"))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_an_installed_peer_round_trips(peer: bench.Coder, make_pair: Callable[..., Pair]) -> None:
    pairs = [make_pair("a", (50, 20), 30), make_pair("b", (100,), 0, seed=1), make_pair("c", (300, 7), 2000, seed=2)]
    delta = Delta(pairs, groups(pairs))
    if peer.refusal(delta):
        pytest.skip(f"{peer.name} is not installed")
    coded = peer.encode(delta, peer.before_encode(delta))
    assert coded.size > 0
    decoded = peer.decode(delta, coded, peer.before_decode(delta))
    assert all(np.array_equal(new, found) for new, found in peer.decoded(delta, decoded))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # theirs
def test_arc_v3_is_given_the_time_to_find_its_smallest_size(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = next(peer for peer in PEERS if peer.name == "ARCv3")
    pairs = [make_pair("a", (300, 70), 500), make_pair("b", (3000,), 1000, seed=1)]
    delta = Delta(pairs, groups(pairs))
    if peer.refusal(delta):
        pytest.skip("ARCv3 is not installed")
    arc3 = pytest.importorskip("fireworks_delta_compression.backends.arc3")
    monkeypatch.setattr(arc3, "_CANDIDATE_WAIT_MULTIPLIER", 0.0)
    hurried = [peer.encode(delta, peer.before_encode(delta)) for _ in range(5)]
    best = peer.smallest(delta, hurried[0])
    assert best.size <= min(coded.size for coded in hurried)
    assert {peer.smallest(delta, coded).size for coded in hurried} == {best.size}
    assert arc3._CANDIDATE_WAIT_MULTIPLIER == 0.0
    decoded = peer.decode(delta, best, peer.before_decode(delta))
    assert all(np.array_equal(new, found) for new, found in peer.decoded(delta, decoded))


def test_the_smallest_size_is_shown_and_that_payload_decoded(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lucky(type(OURS[0])):  # type: ignore[misc]
        def smallest(self, delta: Delta, coded: Coded) -> Coded:
            return Coded(7, found or coded.payload)

    found: list[codec.EncodedGroup] = []
    pair = make_pair("w", (50,), 3)
    monkeypatch.setattr(bench, "OURS", (Lucky("lucky", "ulp_v1"),))
    assert bench.run([bench.Case("one", [pair])], budget=QUICK).cases[0].rows[0].size_bytes == 7
    found = [codec.encode_group(pair.base, pair.base, "BF16")]
    with pytest.raises(MeasureError, match="lucky does not reproduce the new weights"):
        bench.run([bench.Case("one", [pair])], budget=QUICK)


def test_a_coder_that_does_not_give_back_the_weights_is_an_error(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(type(OURS[0])):  # type: ignore[misc]
        def decode(self, delta: Delta, coded: Coded, state: object) -> object:
            return state

    monkeypatch.setattr(bench, "OURS", (Forgetful("forgetful", "ulp_v1"),))
    with pytest.raises(MeasureError, match="forgetful does not reproduce the new weights"):
        bench.run([bench.Case("one", [make_pair("w", (50,), 3)])], budget=QUICK)


def test_best_of_takes_the_shortest_time_and_the_best_result() -> None:
    ticks = iter([0.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    results = iter([3, 1, 2])
    timed = best_of(
        lambda _: next(results),
        lambda: None,
        lambda candidate, kept: candidate < kept,
        Budget(least=3, most=9, cpu_s=1),
        clock=lambda: next(ticks),
    )
    assert (timed.cpu_s, timed.result) == (2.0, 1)


def test_groups_join_small_tensors_of_one_dtype(make_pair: Callable[..., Pair]) -> None:
    pairs = [make_pair("a", (10,), 1), make_pair("b", (20,), 2), make_pair("c", (5,), 1, "F32"), make_pair("d", (), 0)]
    joined = groups(pairs)
    assert [(group.dtype, group.new.size) for group in joined] == [("BF16", 31), ("F32", 5)]
    assert np.array_equal(joined[0].new, np.concatenate([pairs[0].new, pairs[1].new, pairs[3].new]))


def test_groups_are_those_of_one_rank(make_pair: Callable[..., Pair]) -> None:
    large = make_pair("model.layers.0.w", (5000, 5000), 10)
    joined = groups([large, make_pair("model.norm", (8,), 1), make_pair("empty", (0, 4), 0)])
    assert [group.new.nbytes >> 20 for group in joined] == [47, 0]
    assert np.array_equal(joined[0].new, large.new)
    assert groups([]) == []
    with pytest.raises(MeasureError, match="could not be published"):
        groups([make_pair("a name with spaces", (8,), 1)])
    with pytest.raises(MeasureError, match="twice"):
        groups([make_pair("w", (8,), 1), make_pair("w", (8,), 1)])


def test_steps_of_a_folder_follow_each_other(deltas: Path) -> None:
    found = open_delta_set(deltas)
    assert dict(found.steps) == {"steady": 2}
    first, second = read_step(found, "steady", 1), read_step(found, "steady", 2)
    assert [pair.name for pair in first] == ["model.w", "norm"]
    assert all(np.array_equal(one.new, two.base) for one, two in zip(first, second, strict=True))
    assert [case.name for case in cases.delta_set(deltas)] == ["steady 1->2"]
    assert [case.name for case in cases.delta_set(deltas, [1, 2])] == ["steady 0->1", "steady 1->2"]


def test_a_folder_that_is_none_is_refused_with_the_reason(deltas: Path, tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"holds no base\.safetensors"):
        open_delta_set(tmp_path)
    with pytest.raises(MeasureError, match="none of the steps"):
        list(cases.delta_set(deltas, [9]))
    step = deltas / "steady" / "step001.safetensors"
    good = step.read_bytes()
    step.write_bytes(good[:-4])
    with pytest.raises(MeasureError, match="cannot be read"):
        read_step(open_delta_set(deltas), "steady", 1)
    step.unlink()
    with pytest.raises(MeasureError, match="follow each other from 1"):
        open_delta_set(deltas)


def test_positions_outside_the_tensor_are_refused(deltas: Path) -> None:
    base = read_step(open_delta_set(deltas), "steady", 1)
    shapes = {pair.name: pair.shape for pair in base}
    old = Weights({pair.name: pair.base for pair in base}, shapes)
    longer = {name: np.append(bits, np.uint16(7)) for name, bits in old.bits.items()}
    padded = Weights({name: np.append(bits, np.uint16(0)) for name, bits in old.bits.items()}, shapes)
    write_step(deltas, "steady", 1, padded, replace(old, bits=longer))
    with pytest.raises(MeasureError, match="points outside the tensor"):
        read_step(open_delta_set(deltas), "steady", 1)


def test_two_checkpoints_are_a_case_up_to_a_size(checkpoints: tuple[Path, Path]) -> None:
    case = cases.checkpoints(*checkpoints, most_bytes=1 << 20)
    assert [pair.name for pair in case.pairs] == ["b", "layers.0.a"]
    assert [pair.name for pair in cases.checkpoints(*checkpoints, most_bytes=200).pairs] == ["b"]


def test_a_picture_is_drawn_where_matplotlib_is(make_pair: Callable[..., Pair], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = bench.run([bench.Case("one", [make_pair("w", (50, 20), 30)])], budget=QUICK)
    assert picture.draw(measured, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
