"""Casting rules, offers and copy plans: which bytes of which piece go where in a slot."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_agent import Piece, from_named_tensors, from_state_dict
from trainer_agent.errors import InvalidPieces, PiecesChanged
from trainer_agent.offering import make_offer
from trainer_agent.piece import Casting, make_casting
from trainer_agent.placement import ALIGN_BYTES, place_groups, plan_copies, slot_bytes
from trainer_agent.sources import as_source, stage
from weight_store import grouping
from weight_store.boxes import Box
from weight_store.grouping import resolve_layout
from weight_store.offer import Offer

RUN_ID = "00000000-0000-0000-0000-000000000000"


def offer_of(pieces: list[Piece], rank: int = 0, world_size: int = 1, frozen: tuple[str, ...] = ()) -> Offer:
    rows = [Casting(torch.bfloat16).row(piece) for piece in pieces]
    return make_offer(
        rows, run_id=RUN_ID, term=1, rank=rank, world_size=world_size, frozen=frozen, aliases={"tied": "w"}
    )


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [
        ("w", torch.float32, torch.bfloat16),
        ("w", torch.float16, torch.bfloat16),
        ("w", torch.bfloat16, torch.bfloat16),
        ("w", torch.float8_e4m3fn, torch.float8_e4m3fn),
        ("w", torch.int64, torch.int64),
        ("w", torch.bool, torch.bool),
        ("mlp.gate.e_score_correction_bias", torch.float32, torch.float32),
        ("w_scale_inv", torch.float32, torch.float32),
    ],
)
def test_only_wide_floats_are_cast_and_patterns_keep_theirs(name, dtype, published) -> None:
    assert Casting(torch.bfloat16).of(name, dtype) is published
    assert Casting(None).of(name, dtype) is dtype


def test_a_target_that_is_no_wide_float_is_refused() -> None:
    assert make_casting(torch.float16, "*.bias").keep == ("*.bias",)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(InvalidPieces):
            make_casting(dtype, ())


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), ranks=st.integers(1, 4), data=st.data())
def test_what_all_ranks_copy_is_every_element_once(rows, columns, ranks, data) -> None:
    tensor = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    cuts = [rows * rank // ranks for rank in range(ranks + 1)]
    split = data.draw(st.integers(0, columns))
    pieces = [
        [
            Piece("w", (rows, columns), (cuts[rank], low), tensor[cuts[rank] : cuts[rank + 1], low:high])
            for low, high in ((0, split), (split, columns))
            if high > low and cuts[rank + 1] > cuts[rank]
        ]
        for rank in range(ranks)
    ]
    offers = [offer_of(mine, rank, ranks) for rank, mine in enumerate(pieces)]
    with mock.patch.object(grouping, "PIECE_BYTES", data.draw(st.sampled_from((8, grouping.PIECE_BYTES)))):
        layout = resolve_layout(offers)
    found: list[int] = []
    for rank, mine in enumerate(pieces):
        placed = place_groups(layout.owned(rank))
        plan = plan_copies(offers[rank], placed)
        slot = torch.full((slot_bytes(placed),), 255, dtype=torch.uint8)
        for piece in mine:
            for copy in plan.find("w", "I32", (rows, columns), piece.box).copies:
                part = piece.tensor[tuple(slice(o, o + n) for o, n in zip(copy.offsets, copy.sizes, strict=True))]
                slot[copy.start : copy.start + 4 * part.numel()].view(torch.int32).view(part.shape).copy_(part)
        for group in placed:
            assert group.start % ALIGN_BYTES == 0
            found += slot[group.start : group.end].view(torch.int32).tolist()
    assert sorted(found) == list(range(rows * columns))


def test_a_plan_names_what_changed_since_the_first_publication() -> None:
    pieces = [Piece("w", (4,), (0,), torch.ones(4)), Piece("v", (2,), (0,), torch.ones(2))]
    offer = offer_of(pieces, frozen=("v",))
    plan = plan_copies(offer, place_groups(resolve_layout([offer]).owned(0)))
    box = Box((0,), (4,))
    assert len(plan.find("w", "BF16", (4,), box).copies) == 1
    plan.check_complete({("w", box)})
    for arguments, sentence in (
        (("x", "BF16", (4,), box), "x was added"),
        (("w", "BF16", (5,), box), r"w changed shape from \[4\] to \[5\]"),
        (("w", "F32", (4,), box), "w changed dtype from BF16 to F32"),
        (("w", "BF16", (4,), Box((1,), (3,))), "a box it did not offer"),
    ):
        with pytest.raises(PiecesChanged, match=sentence):
            plan.find(*arguments)
    with pytest.raises(PiecesChanged, match=r"\[0:4\] of w is missing"):
        plan.check_complete(set())


def test_one_name_with_two_shapes_is_refused_before_it_is_offered() -> None:
    with pytest.raises(InvalidPieces, match=r"w is BF16 \[4\] in one piece and BF16 \[5\]"):
        offer_of([Piece("w", (4,), (0,), torch.ones(2)), Piece("w", (5,), (2,), torch.ones(2))])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_tensors_are_shared_out_without_hole_or_overlap(world_size: int) -> None:
    tensors = {"big": torch.zeros(1001, 600), "wide": torch.zeros(1, 400_000), "bias": torch.zeros(3)}
    offers = [
        offer_of(
            [*from_named_tensors([*tensors.items(), ("w", torch.zeros(2))], rank=r, world_size=world_size)],
            r,
            world_size,
        )
        for r in range(world_size)
    ]
    layout = resolve_layout(offers)
    assert layout.elements == sum(t.numel() for t in tensors.values()) + 2


def test_views_of_one_storage_are_tied_only_if_they_are_the_same_elements() -> None:
    storage = torch.randn(8, 4)
    pieces = from_state_dict({"a": storage, "b": storage[:4], "c": storage[4:], "d": storage, "e": storage.t()})
    assert pieces.aliases == {"d": "a"}
    assert [piece.name for piece in pieces] == ["a", "b", "c", "e"]


class WeightSource:
    """As inference engines define it: re-iterable, and it knows which names this rank holds."""

    def metadata(self) -> list[str]:
        return ["a", "b"]

    def held_names(self) -> list[str]:
        return ["b"]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        yield "b", torch.ones(3)


def test_of_a_weight_source_a_rank_offers_what_it_holds() -> None:
    source = as_source(WeightSource(), rank=1, world_size=2)
    assert not source.once
    for _ in range(2):
        assert [(piece.name, piece.global_shape) for piece in source] == [("b", (3,))]


def test_an_iterator_is_staged_cast_so_that_it_can_be_taken_twice() -> None:
    source = as_source(iter([("a", torch.ones(2)), ("n", torch.ones(2, dtype=torch.int64))]), 0, 1)
    assert source.once
    staged = stage(source, Casting(torch.bfloat16))
    for _ in range(2):
        assert [piece.tensor.dtype for piece in staged] == [torch.bfloat16, torch.int64]
    assert list(as_source([], 0, 1)) == []
