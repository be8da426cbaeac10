"""The pure parts: groups to files and back, the log's bytes, the error tree."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from codec import Change
from rollout_agent import errors, segments
from rollout_agent.changelog import LogHead, LogWriter, changes, scan
from rollout_agent.disk import LocalDisk
from rollout_agent.filetable import plan_files
from rollout_agent.state import Version
from tests.rollout_agent.training import RUN_ID, Training, group_bits
from weight_store.layout import Layout, Tensor
from weight_store.memory import MemoryStore
from weight_store.position import GENESIS, Position

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)
TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["BF16", "F32", "F8_E4M3", "I64"]), SHAPES, st.sampled_from(["rows", "cols", "all", "1"])
    ),
    min_size=1,
    max_size=6,
)


def spec(rows: list[tuple[str, tuple[int, ...], str]]) -> tuple[tuple[str, str, tuple[int, ...], str], ...]:
    def how(shape: tuple[int, ...], wanted: str) -> str:
        need = {"rows": 1, "cols": 2}.get(wanted, 0)
        return wanted if len(shape) >= need else "all"

    return tuple((f"m.layers.{i // 2}.t{i}", dtype, shape, how(shape, w)) for i, (dtype, shape, w) in enumerate(rows))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TENSORS, st.integers(1, 3), st.integers(0, 2**32 - 1))
@example([("BF16", (4,), "all"), ("BF16", (4, 4), "cols"), ("BF16", (4, 4), "1")], 2, 0)  # columns right behind a range
def test_groups_gather_and_scatter_as_numpy_slices_do(
    rows: list[tuple[str, tuple[int, ...], str]], world: int, seed: int
) -> None:
    training = Training(MemoryStore(), specs=spec(rows), aliases={}, world=world, seed=seed)
    layout = training.layout()
    table = plan_files(layout.tensors, {}, file_bytes=200)
    files = [np.zeros(file.size, np.uint8) for file in table.files]
    for name, place in table.places.items():
        assert place.offset % place.tensor.itemsize == 0
        raw = np.frombuffer(training.weights[name].tobytes(), np.uint8)
        files[place.file][place.offset : place.offset + raw.size] = raw
    random = np.random.default_rng(seed)
    for group in layout.groups:
        found = segments.segments_of(group, table)
        bits = segments.gather(files, found, group)
        assert not bits.flags.writeable
        assert np.array_equal(bits, group_bits(group, training.weights))
        picked = np.sort(random.choice(group.elements, group.elements // 3, replace=False)).astype(np.uint32)
        new = bits.copy()
        new[picked] ^= 1
        both = (Change(picked, new[picked], None, b""), Change(picked[:0], new[:0], new, b""))
        for change, many in itertools.product(both, (0, 500)):
            stored = [file.copy() for file in files]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(segments, "_MANY", many)
                for file, rows in segments.by_file(found):
                    segments.store(stored[file], rows, group.itemsize, change)
            assert np.array_equal(segments.gather(stored, found, group), new)
            assert sum(map(np.count_nonzero, map(np.not_equal, stored, files))) == len(picked)


def test_one_contiguous_range_is_not_copied() -> None:
    layout = Training(MemoryStore(), world=1).layout()
    table = plan_files(layout.tensors, {})
    files = [np.zeros(file.size, np.uint8) for file in table.files]
    group = next(g for g in layout.groups if len(g.pieces) == 1 and g.elements)
    assert np.shares_memory(segments.gather(files, segments.segments_of(group, table), group), files[0])


def test_files_are_cut_between_layers_in_layer_order() -> None:
    tensors = [Tensor(f"model.layers.{n}.{part}", "BF16", 2, (100,), False) for n in range(12) for part in "ab"]
    table = plan_files(tensors, {"x": "model.layers.0.a", "y": "not.kept"}, file_bytes=1300)
    names = [[t.name for t in file.tensors] for file in table.files]
    assert [name for file in names for name in file] == [t.name for t in tensors]
    assert all(len(file) == 6 for file in names)
    assert table.aliases == {"x": "model.layers.0.a"}
    assert json.loads(table.index)["metadata"]["total_size"] == 24 * 200


def test_f4_is_counted_in_values_in_the_header() -> None:
    table = plan_files([Tensor("w", "F4", 1, (4, 8), False)], {})
    header = json.loads(table.files[0].head[8:])
    assert header["w"] == {"dtype": "F4", "shape": [4, 16], "data_offsets": [0, 32]}


@pytest.fixture
def log(tmp_path: Path) -> bytes:
    to = Version(position=Position(version=1, sha256="a" * 64), term=1, step=0, layout="b" * 64)
    writer = LogWriter(LocalDisk(), tmp_path / "x.log", LogHead(run_id=RUN_ID, base=GENESIS, to=to))
    index = np.array([1, 5, 7], np.uint32)
    writer.add(0, Change(index, np.array([3, 4, 5], np.uint16), None, b"d" * 16))
    writer.add(1, Change(index[:0], index[:0], np.arange(5, dtype=np.uint32), b"e" * 16))
    writer.add(2, Change(index[:0], np.zeros(0, np.uint8), None, b"f" * 16))
    writer.commit()
    return (tmp_path / "x.log").read_bytes()


def test_a_log_says_what_was_added(log: bytes) -> None:
    data = np.frombuffer(log, np.uint8)
    scanned = scan(data)
    assert scanned is not None
    found = dict(changes(data, scanned))
    assert found[0].index.tolist() == [1, 5, 7]
    assert found[0].bits.tolist() == [3, 4, 5]
    assert found[1].whole is not None
    assert found[1].whole.tolist() == [0, 1, 2, 3, 4]
    assert found[2].index.size == 0
    assert [item.digest for item in scanned.groups] == [b"d" * 16, b"e" * 16, b"f" * 16]


def test_no_truncated_log_counts(log: bytes) -> None:
    data = np.frombuffer(log, np.uint8)
    assert all(scan(data[:size]) is None for size in range(len(log)))


def test_no_altered_log_counts(log: bytes) -> None:
    for at in range(len(log)):
        for bit in (0, 3, 7):
            altered = np.frombuffer(log, np.uint8).copy()
            altered[at] ^= 1 << bit
            assert scan(altered) is None, f"byte {at}, bit {bit}"


def test_the_error_tree_is_the_one_that_is_drawn() -> None:
    classes = {name: c for name, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    drawn = [line for line in (errors.__doc__ or "").splitlines() if "──" in line or line.strip() == "RolloutError"]
    parents: list[str] = []
    found: dict[str, str | None] = {}
    for line in drawn:
        name = line.replace("├──", "   ").replace("└──", "   ").replace("│", " ").split()[0]
        depth = (line.index(name) - 4) // 4
        parents = [*parents[:depth], name]
        found[name] = parents[depth - 1] if depth else None
    real = {n: c.__bases__[0].__name__ if c.__bases__[0] is not Exception else None for n, c in classes.items()}
    assert found == real
    assert len({c.code for c in classes.values()}) == len(classes)


def test_a_layout_larger_than_its_files_needs_no_walk_per_element() -> None:
    """Tens of thousands of pieces are laid out without trouble (a bound on work, not on time)."""
    specs = tuple((f"m.layers.{n}.w", "BF16", (4, 4), "rows") for n in range(1000))
    layout: Layout = Training(MemoryStore(), specs=specs, aliases={}).layout()
    table = plan_files(layout.tensors, {})
    assert sum(len(segments.segments_of(group, table)) for group in layout.groups) == 2000
