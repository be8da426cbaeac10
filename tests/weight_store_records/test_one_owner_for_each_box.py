"""From offers to a layout: one owner a box, balanced by bytes; groups of blocks of layers; conflicts refused."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store import grouping
from weight_store.boxes import Box, whole
from weight_store.errors import LayoutError
from weight_store.grouping import (
    BLOCK_BYTES,
    GROUP_BYTES,
    PIECE_BYTES,
    layer_of,
    layer_order,
    layers_in_a_block,
    resolve_layout,
)
from weight_store.layout import MAX_GROUP_BYTES, Layout, check_same_tensors
from weight_store.offer import Offer

MIB = 1 << 20


def rows_of(size: int, count: int) -> list[Box]:
    return [Box((i * size, 0), (size, 4)) for i in range(count)]


def test_each_rank_keeps_the_rows_it_alone_holds(make) -> None:
    a, b = Box((0, 0), (3, 4)), Box((3, 0), (1, 4))
    layout = resolve_layout(make.offers(make.rows("w", (4, 4), a), make.rows("w", (4, 4), b)))
    assert [(g.owner, g.pieces[0].box) for g in layout.groups] == [(0, a), (1, b)]


def owners_of(layout: Layout) -> Counter[int]:
    """Bytes owned by each rank."""
    load: Counter[int] = Counter()
    for group in layout.groups:
        load[group.owner] += group.nbytes
    return load


def test_identical_boxes_get_one_owner_and_the_bytes_are_balanced(make) -> None:
    rows = [row for i in range(100) for row in make.rows(f"layers.{i}.w", (1 + i % 7, 64))]
    layout = resolve_layout(make.offers(rows, rows, rows, rows))
    load = owners_of(layout)
    assert sum(load.values()) == layout.nbytes == sum((1 + i % 7) * 64 * 2 for i in range(100))
    assert max(load.values()) - min(load.values()) <= 7 * 64 * 2


def test_replicas_go_to_whoever_holds_least_of_its_own(make) -> None:
    big = make.rows("big", (1000, 4))
    norms = [row for i in range(4) for row in make.rows(f"norm{i}", (8,))]
    layout = resolve_layout(make.offers([*big, *norms], norms))
    assert [g.owner for g in layout.groups if g.pieces[0].tensor.name != "big"] == [1]
    assert owners_of(layout) == {0: 8000, 1: 64}


def test_a_rank_may_own_nothing(make) -> None:
    layout = resolve_layout(make.offers(make.rows("w", (4, 4)), []))
    assert layout.owned(1) == ()
    assert layout.world_size == 2


def test_the_owner_of_a_replica_is_one_of_its_holders(make) -> None:
    top, bottom = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    ranks = [make.rows("w", (4, 4), box) for box in (top, bottom, top, bottom)]
    layout = resolve_layout(make.offers(*ranks))
    for group in layout.groups:
        for piece in group.pieces:
            assert group.owner % 2 == (0 if piece.box == top else 1)


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            [[Box((0, 0), (3, 4))], [Box((2, 0), (2, 4))]],
            r"w: box \[0:3, 0:4\] of rank 0 and box \[2:4, 0:4\] of rank 1 overlap",
        ),
        ([[Box((0, 0), (4, 4))], [Box((1, 1), (1, 1))]], r"w: box .* of rank 0 and box .* of rank 1 overlap"),
        ([[Box((0, 0), (1, 4))], [Box((2, 0), (2, 4))]], r"w: no rank offers \[1:2, 0:4\]"),
        ([[Box((0, 0), (0, 4))], []], r"w: no rank offers \[0:4, 0:4\]"),
        ([[Box((0, 0), (4, 4))] * 2, []], r"rank 0 offers box \[0:4, 0:4\] of w twice"),
    ],
)
def test_boxes_that_do_not_tile_are_refused_by_name_and_rank(ranks: list[list[Box]], sentence: str, make) -> None:
    offers = make.offers(*[make.rows("w", (4, 4), *boxes) if boxes else [] for boxes in ranks])
    with pytest.raises(LayoutError, match=sentence):
        resolve_layout(offers)


def test_ranks_must_agree_on_shape_and_dtype(make) -> None:
    first = make.offer(0, 2, make.rows("w", (4, 4)))
    with pytest.raises(LayoutError, match=r"rank 0 offers w as BF16 \[4, 4\], rank 1 as F32 \[4, 4\]"):
        resolve_layout([first, make.offer(1, 2, make.rows("w", (4, 4)), dtype="F32", itemsize=4)])
    with pytest.raises(LayoutError, match=r"rank 0 offers w as BF16 \[4, 4\], rank 1 as BF16 \[4, 5\]"):
        resolve_layout([first, make.offer(1, 2, make.rows("w", (4, 5)))])


def test_offers_must_be_of_one_world_and_term(make) -> None:
    rows = make.rows("w", (4, 4))
    with pytest.raises(LayoutError, match="rank 1 offers for a world of 3 in term 1, expected rank 1 of 2"):
        resolve_layout([make.offer(0, 2, rows), make.offer(1, 3, rows)])
    with pytest.raises(LayoutError, match=r"rank 0 .* expected rank 1"):
        resolve_layout([make.offer(0, 2, rows), make.offer(0, 2, rows)])
    with pytest.raises(LayoutError, match="in term 2, expected rank 1 of 2 in term 1"):
        resolve_layout([make.offer(0, 2, rows), make.offer(1, 2, rows, term=2)])


def test_there_must_be_a_tensor(make) -> None:
    with pytest.raises(LayoutError, match="no rank offers a tensor"):
        resolve_layout(make.offers([], []))


def test_frozen_tensors_are_groups_of_their_own_and_agreed(make) -> None:
    rows = [*make.rows("layers.0.a", (2, 2)), *make.rows("layers.0.b", (2, 2))]
    layout = resolve_layout(make.offers(rows, frozen=("layers.0.a", "elsewhere")))
    assert [(g.frozen, [p.tensor.name for p in g.pieces]) for g in layout.groups] == [
        (False, ["layers.0.b"]),
        (True, ["layers.0.a"]),
    ]
    with pytest.raises(LayoutError, match=r"layers.0.a is frozen on some ranks but not on rank 1"):
        resolve_layout([make.offer(0, 2, rows, frozen=("layers.0.a",)), make.offer(1, 2, rows)])
    elsewhere = [make.offer(0, 2, rows[:1], frozen=("layers.0.a",)), make.offer(1, 2, rows[1:])]
    assert resolve_layout(elsewhere).tensors[0].frozen


def test_tied_weights_are_stored_once_and_recorded(make) -> None:
    embed, other = make.rows("embed", (4, 4)), make.rows("x", (2, 2))
    layout = resolve_layout([make.offer(0, 2, embed), make.offer(1, 2, other, aliases={"lm_head": "embed"})])
    assert layout.aliases == {"lm_head": "embed"}
    for aliases, sentence in [
        ({"lm_head": "gone"}, "lm_head is tied to gone, which no rank offers"),
        ({"x": "embed"}, "x is offered as a tensor and, on rank 1, as tied to embed"),
    ]:
        with pytest.raises(LayoutError, match=sentence):
            resolve_layout([make.offer(0, 2, embed), make.offer(1, 2, other, aliases=aliases)])
    both = [make.offer(0, 2, embed, aliases={"h": "embed"}), make.offer(1, 2, other, aliases={"h": "x"})]
    with pytest.raises(LayoutError, match="h is tied to embed and, on rank 1, to x"):
        resolve_layout(both)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 0), (1,)])
def test_scalars_and_empty_tensors_have_an_owner(shape: tuple[int, ...], make) -> None:
    rows = make.rows("w", shape)
    layout = resolve_layout(make.offers(rows, rows))
    assert [p.box for g in layout.groups for p in g.pieces] == [whole(shape)]
    assert Layout.parse(layout.to_bytes()) == layout


def test_layers_come_in_natural_order() -> None:
    names = ["m.layers.10.a", "m.layers.2.b", "m.layers.2.a", "m.embed", "lm_head", "m.layers.02.a"]
    assert sorted(names, key=layer_order)[:3] == ["lm_head", "m.embed", "m.layers.2.a"]
    assert [layer_of(name) for name in names[:4]] == ["m.layers.10", "m.layers.2", "m.layers.2", "m"]
    assert layer_of("w") == ""
    assert layer_of("h.3.mlp.experts.7.up") == "h.3"


def test_large_layers_have_groups_of_their_own_of_at_least_32_mib_where_they_have_them(make) -> None:
    def weights(layer: int, mib: list[int]) -> list[object]:
        return [row for i, m in enumerate(mib) for row in make.rows(f"layers.{layer}.w{i}", (m * MIB // 2,))]

    rows = [*weights(0, [10, 10, 10, 10, 5]), *weights(1, [1]), *weights(2, [31, 31, 31]), *weights(3, [200])]
    layout = resolve_layout(make.offers(rows))
    sizes = [(layer_of(g.pieces[0].tensor.name), g.nbytes // MIB) for g in layout.groups]
    assert sizes == [
        ("layers.0", 45),
        ("layers.1", 1),
        ("layers.2", 93),
        *[("layers.3", 32)] * 5,
        ("layers.3", 40),
    ]


def test_small_layers_share_groups(make) -> None:
    def offer(ranks: int, mib_a_layer: int) -> list[list[object]]:
        elements = mib_a_layer * MIB // 2
        boxes = [Box((r * elements // ranks,), (elements // ranks,)) for r in range(ranks)]
        rows = [(f"m.layers.{i}.w", (elements,)) for i in range(10)]
        return [
            [*make.rows("m.norm", (8,)), *(row for name, shape in rows for row in make.rows(name, shape, box))]
            for box in boxes
        ]

    def blocks(ranks: int, mib_a_layer: int) -> list[list[int]]:
        """Layers of each group, all ranks agreeing."""
        layout = resolve_layout(make.offers(*offer(ranks, mib_a_layer)))
        found = [
            [[int(p.tensor.name.split(".")[2]) for p in g.pieces] for g in layout.owned(rank) if len(g.pieces) > 1]
            for rank in range(ranks)
        ]
        assert all(rank == found[0] for rank in found)
        assert [[p.tensor.name for p in g.pieces] for g in layout.groups if g.nbytes < MIB] == [["m.norm"]]
        return found[0]

    assert blocks(1, 16) == []
    assert blocks(1, 15) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert blocks(4, 16) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert blocks(1, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    (tiny,) = resolve_layout(make.offers(*offer(1, 1))).groups
    assert len(tiny.pieces) == 11


@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 2**34), st.integers(1, 64), st.integers(1, 2**34))
def test_blocks_of_layers_nest(layers: int, owners: int, nbytes: int, other_owners: int, other_nbytes: int) -> None:
    """A selection of layers is closed under the blocks of several layouts once it is under the coarsest."""
    joined = layers_in_a_block(layers, owners, nbytes)
    other = layers_in_a_block(layers, other_owners, other_nbytes)
    assert joined % other == 0 or other % joined == 0
    assert joined == 1 or joined < 2 * layers
    assert joined >= layers or joined * nbytes >= BLOCK_BYTES * layers * owners


def test_experts_without_a_layer_share_groups_too(make) -> None:
    rows = [row for i in range(100) for row in make.rows(f"experts.{i}.w", (MIB // 2,))]
    assert [g.nbytes // MIB for g in resolve_layout(make.offers(rows)).groups] == [16] * 6 + [4]


def test_layers_count_in_their_order_whatever_their_numbers(make) -> None:
    rows = [row for i in (3, 21, 40, 41) for row in make.rows(f"layers.{i}.w", (8 * MIB // 2,))]
    layout = resolve_layout(make.offers(rows))
    assert [[p.tensor.name for p in g.pieces] for g in layout.groups] == [
        ["layers.3.w", "layers.21.w"],
        ["layers.40.w", "layers.41.w"],
    ]


def test_the_bytes_of_a_tensor_beside_the_layers_of_its_stack_keep_none_apart(make) -> None:
    rows = [row for i in range(4) for row in make.rows(f"layers.{i}.w", (8 * MIB // 2,))]
    rows += make.rows("layers.weight", (24 * MIB // 2,))
    layout = resolve_layout(make.offers(rows))
    assert [[p.tensor.name for p in g.pieces] for g in layout.groups] == [
        ["layers.0.w", "layers.weight"],
        ["layers.1.w", "layers.2.w"],
        ["layers.3.w"],
    ]


def test_one_tensor_of_many_alike_that_is_cut_otherwise_is_found(make) -> None:
    names = [f"layers.{i}.w" for i in range(20)]
    halves = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    ranks = [[row for name in names for row in make.rows(name, (4, 4), half)] for half in halves]
    assert len(resolve_layout(make.offers(*ranks)).piece_tensor) == 40
    short = [
        *(row for name in names[:-1] for row in make.rows(name, (4, 4), halves[1])),
        *make.rows(names[-1], (4, 4), Box((3, 0), (1, 4))),
    ]
    with pytest.raises(LayoutError, match=r"layers.19.w: no rank offers \[2:3, 0:4\]"):
        resolve_layout(make.offers(ranks[0], short))


def test_frozen_layers_do_not_keep_others_apart(make) -> None:
    shape = (20 * MIB // 2,)
    names = [f"layers.{i}.{part}" for i in range(4) for part in ("frozen", "trained")]
    frozen = tuple(name for name in names if name.endswith("frozen"))
    rows = [row for name in names for row in make.rows(name, shape if name in frozen else (MIB // 2,))]
    layout = resolve_layout([make.offer(0, 1, rows, frozen=frozen)])
    assert [len(g.pieces) for g in layout.groups if not g.frozen] == [4]


GROUPED = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 400), st.sampled_from([("BF16", 2), ("F32", 4)]), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(GROUPED, st.integers(1, 3), st.sampled_from([0, 128, 4096]))
def test_groups_hold_one_block_dtype_owner_and_freeze(
    make, tensors: list[tuple[int, int, tuple[str, int], bool]], world_size: int, block_bytes: int
) -> None:
    names = [f"layers.{layer}.w{i}" for i, (layer, _, _, _) in enumerate(tensors)]
    shapes = [(elements,) for _, elements, _, _ in tensors]
    frozen = tuple(name for name, (*_, frozen) in zip(names, tensors, strict=True) if frozen)

    def offer(rank: int) -> Offer:
        return make.offer(
            rank,
            world_size,
            [(name, shape, whole(shape)) for name, shape in zip(names, shapes, strict=True)],
            dtype=[dtype for _, _, (dtype, _), _ in tensors],
            itemsizes=tuple(itemsize for _, _, (_, itemsize), _ in tensors),
            frozen=frozen,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "GROUP_BYTES", 256)
        patch.setattr(grouping, "PIECE_BYTES", 256)
        patch.setattr(grouping, "BLOCK_BYTES", block_bytes)
        layout = resolve_layout([offer(rank) for rank in range(world_size)])
    live = {t.name: t.nbytes for t in layout.tensors if not t.frozen and t.nbytes}
    layers, owners = {layer_of(name) for name in live}, {g.owner for g in layout.groups if not g.frozen and g.nbytes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "BLOCK_BYTES", block_bytes)
        joined = layers_in_a_block(len(layers), len(owners), sum(live.values()))
    if sum(live.values()) < 2 * block_bytes:
        joined = len(tensors)
    places = sorted({layer for layer, *_ in tensors})
    grouped = Counter()
    for group in layout.groups:
        blocks = {places.index(int(piece.tensor.name.split(".")[1])) // joined for piece in group.pieces}
        assert len(blocks) == 1
        assert all(
            (p.tensor.dtype, p.tensor.itemsize, p.tensor.frozen) == (group.dtype, group.itemsize, group.frozen)
            for p in group.pieces
        )
        assert group.nbytes < 3 * 256
        starts = [piece.start for piece in group.pieces]
        assert starts == [sum(p.box.elements for p in group.pieces[:i]) for i in range(len(starts))]
        grouped[blocks.pop(), group.owner, group.dtype, group.frozen, group.nbytes < 256] += 1
    # Only a block that has less than a group's worth keeps a small group, and then it is its only one.
    for (block, owner, dtype, is_frozen, small), count in grouped.items():
        assert not small or (count == 1 and not grouped[block, owner, dtype, is_frozen, False])


def test_a_group_never_exceeds_what_an_agent_allocates() -> None:
    assert GROUP_BYTES + 2 * PIECE_BYTES <= MAX_GROUP_BYTES


@st.composite
def shardings(draw: st.DrawFn) -> tuple[int, dict[str, tuple[tuple[int, ...], list[tuple[Box, list[int]]]]]]:
    """World size and, per tensor, a grid of boxes, each held by one or several ranks."""
    world_size = draw(st.integers(1, 4))
    tensors = {}
    for i in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        boxes = [whole(shape)]
        for axis, extent in enumerate(shape):
            cuts = sorted(draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=2))) if extent > 1 else []
            edges = [0, *cuts, extent]
            boxes = [
                Box(
                    (*box.offsets[:axis], low, *box.offsets[axis + 1 :]),
                    (*box.sizes[:axis], high - low, *box.sizes[axis + 1 :]),
                )
                for box in boxes
                for low, high in itertools.pairwise(edges)
            ]
        holders = st.lists(st.integers(0, world_size - 1), min_size=1, unique=True)
        tensors[f"layers.{i % 2}.w{i}"] = (shape, [(box, draw(holders)) for box in boxes])
    return world_size, tensors


@given(shardings(), st.randoms(use_true_random=False))
def test_every_sharding_tiles_whatever_the_order_of_the_rows(make, sharding, random) -> None:
    world_size, tensors = sharding
    rows = [
        [(name, shape, box) for name, (shape, held) in tensors.items() for box, ranks in held if rank in ranks]
        for rank in range(world_size)
    ]
    layout = resolve_layout(make.offers(*rows))
    shuffled = [random.sample(row, len(row)) for row in rows]
    assert resolve_layout(make.offers(*shuffled)).to_bytes() == layout.to_bytes()
    assert Layout.parse(layout.to_bytes()) == layout  # parsing checks that pieces tile every tensor
    assert {t.name: t.shape for t in layout.tensors} == {name: shape for name, (shape, _) in tensors.items()}
    for group in layout.groups:
        for piece in group.pieces:
            assert (piece.tensor.name, piece.tensor.shape, piece.box) in rows[group.owner]
    assert sum(owners_of(layout).values()) == layout.nbytes


def test_names_that_sort_alike_do_not_depend_on_the_order_of_the_rows(make) -> None:
    rows = [*make.rows("layers.1.w", (2,)), *make.rows("layers.01.w", (3,))]
    assert resolve_layout(make.offers(rows)).to_bytes() == resolve_layout(make.offers(rows[::-1])).to_bytes()


def test_a_run_keeps_its_tensors(make) -> None:
    before = resolve_layout(make.offers([*make.rows("a", (4, 4)), *make.rows("b", (2,))])).tensors
    check_same_tensors(before, reversed(before))
    after = resolve_layout(make.offers([*make.rows("a", (4, 5)), *make.rows("c", (2,))])).tensors
    with pytest.raises(
        LayoutError, match=r"a changed shape from \[4, 4\] to \[4, 5\]; b is missing; c was added\. A run"
    ):
        check_same_tensors(before, after)
    other = resolve_layout(make.offers([*make.rows("a", (4, 4)), *make.rows("b", (2,))], dtype="F16")).tensors
    with pytest.raises(LayoutError, match="a changed dtype from BF16 to F16; b changed dtype"):
        check_same_tensors(before, other)
    with pytest.raises(LayoutError, match="and 1 more"):
        check_same_tensors(
            [], resolve_layout(make.offers([r for i in range(6) for r in make.rows(f"t{i}", (1,))])).tensors
        )
