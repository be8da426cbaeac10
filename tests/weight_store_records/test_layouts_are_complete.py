"""A layout that parses is complete: whoever wrote it, its pieces tile every tensor and its groups are uniform."""

from __future__ import annotations

from typing import Any

import pytest

from weight_store.boxes import Box
from weight_store.errors import FormatError
from weight_store.layout import Layout
from weight_store.offer import MAX_AXES
from weight_store.records import MAX_COLUMNS_BYTES, pack, sha256_hex, unpack

TOP, BOTTOM = Box((0, 0), (1, 3)), Box((1, 0), (1, 3))


def good(make) -> dict[str, Any]:
    columns = make.columns([(0, TOP), (0, BOTTOM), (1, Box((0,), (4,)))], {"a": (2, 3), "b": (4,)})
    return {**columns, "aliases": {"c": "a"}, "frozen": ()}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dtypes": ("BF16",)}, "tensor columns differ in length"),
        ({"piece_sizes": ((1, 3),)}, "piece columns differ in length"),
        ({"names": ("a", "a")}, "a tensor name appears twice"),
        ({"piece_tensor": (0, 0, 2)}, "names a tensor that is not there"),
        ({"frozen": (2,)}, "names a tensor that is not there"),
        ({"frozen": (1,)}, "group 0 mixes dtypes or frozen tensors"),
        ({"dtypes": ("BF16", "F16")}, "group 0 mixes dtypes"),
        ({"itemsizes": (2, 4)}, "group 0 mixes dtypes"),
        ({"group_start": (1,)}, "groups do not start at the first piece"),
        ({"group_start": (0, 2)}, "groups do not start"),
        ({"group_owner": (), "group_start": ()}, "groups do not start"),
        ({"group_start": (0, 0), "group_owner": (0, 0)}, "an empty group, or groups out of order"),
        ({"group_start": (0, 3), "group_owner": (0, 0)}, "an empty group, or groups out of order"),
        ({"group_owner": (1,)}, "owned by a rank outside the world size"),
        ({"aliases": {"a": "b"}}, "alias a -> b does not lead from a new name to a stored tensor"),
        ({"aliases": {"c": "gone"}}, "alias c -> gone does not lead"),
        ({"aliases": {"c": "d", "d": "a"}}, "alias c -> d does not lead"),
        ({"piece_offsets": ((0, 0), (0, 0), (0,))}, r"pieces \[0:1, 0:3\] and \[0:1, 0:3\] of a overlap"),
        ({"piece_offsets": ((0, 0), (2, 0), (0,))}, r"piece \[2:3, 0:3\] of a lies outside its shape \[2, 3\]"),
        ({"piece_offsets": ((0, 0), (1,), (0,))}, "piece at .* of a lies outside"),
        ({"piece_sizes": ((1, 3), (1, 2), (4,))}, r"no rank owns \[1:2, 2:3\] of a"),
        ({"piece_sizes": ((1, 3), (0, 3), (4,))}, r"no rank owns \[1:2, 0:3\] of a"),
        ({"shapes": ((2, 3), (5,))}, r"no rank owns \[4:5\] of b"),
        ({"shapes": ((2, 3), (2**48, 2**10))}, r"tensor b .* more than 2\*\*50 bytes"),
        ({"shapes": ((2, 3), (1,) * (MAX_AXES + 1))}, "shapes"),
    ],
)
def test_each_rule_is_kept(changed: dict[str, Any], sentence: str, make) -> None:
    Layout(**good(make))
    with pytest.raises(ValueError, match=sentence):
        Layout(**{**good(make), **changed})


def test_a_group_must_fit_into_an_agents_buffer(make) -> None:
    elements = (96 << 20) // 2
    Layout(**make.columns([(0, Box((0,), (elements,)))], {"w": (elements,)}))
    with pytest.raises(ValueError, match="group 0 has 100663298 bytes, more than 100663296"):
        Layout(**make.columns([(0, Box((0,), (elements + 1,)))], {"w": (elements + 1,)}))


def test_a_piece_is_not_scattered_over_more_places_than_it_is_worth(make) -> None:
    n = (1 << 20) + 1
    boxes = [Box((0, i, j), (n, 2 - i, 2 - j)) for i, j in ((0, 0), (0, 2), (2, 0), (2, 2))]
    boxes = [Box((0, i, j), (n, 2 if i == 0 else 1, 2 if j == 0 else 1)) for i in (0, 2) for j in (0, 2)]
    with pytest.raises(ValueError, match="of w is scattered over more than 1048576 places"):
        Layout(**make.columns([(0, box) for box in boxes], {"w": (n, 3, 3)}))


def test_a_run_without_tensors_has_a_layout(make) -> None:
    layout = Layout(**make.columns([], {}))
    assert Layout.parse(layout.to_bytes()) == layout
    assert (layout.groups, layout.elements, layout.nbytes) == ((), 0, 0)


def test_what_is_derived_is_right(make) -> None:
    layout = make.layout(world_size=2, layers=2)
    assert [g.index for g in layout.groups] == [0, 1, 2, 3]
    assert layout.owned(1) == (layout.groups[1], layout.groups[3])
    assert layout.owned(7) == ()
    assert (layout.elements, layout.nbytes) == (32, 64)
    assert [t.nbytes for t in layout.tensors] == [16] * 4


def test_the_name_does_not_depend_on_the_compressor(make) -> None:
    layout = make.layout()
    packed = pack(layout.to_bytes())
    assert sha256_hex(unpack(packed)) == sha256_hex(layout.to_bytes()) != sha256_hex(packed)


def test_a_broken_layout_is_refused_when_read(make) -> None:
    data = Layout(**good(make)).to_bytes().replace(b"[1,3],[1,3]", b"[1,3],[1,2]")
    with pytest.raises(FormatError, match=r"run/layouts/x is not a valid weightcast.layout: .*no rank owns"):
        Layout.parse(data, key="run/layouts/x")


def test_a_hundred_thousand_pieces_fit_well_within_the_bound(make) -> None:
    """The design size is a million: here a tenth of it, for size alone."""
    n = 100_000
    pieces = [(0, Box((i, 0), (1, 8))) for i in range(n)]
    layout = Layout(**make.columns(pieces, {"w": (n, 8)}))
    raw = layout.to_bytes()
    assert 20 * len(raw) < MAX_COLUMNS_BYTES
    assert Layout.parse(unpack(pack(raw))) == layout
