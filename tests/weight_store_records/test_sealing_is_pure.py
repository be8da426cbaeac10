"""The manifest is a function of what the ranks reported: same receipts, same bytes, whoever seals."""

from __future__ import annotations

import json

import pytest

from weight_store.errors import FormatError
from weight_store.manifest import OLDER_LINKS, Manifest, check_belongs, seal
from weight_store.position import GENESIS, Position
from weight_store.receipt import Asset, FullRef, Receipt
from weight_store.records import sha256_hex
from weight_store.version import Open


def test_two_sealers_write_the_same_bytes(make) -> None:
    layout = make.layout()
    opened = make.opened(layout)
    receipts = make.receipts(opened, layout)
    again = [(Receipt.parse(data), data) for _, data in receipts]
    one = seal(opened, layout, receipts, None).to_bytes()
    # Another coordinator reads the open record back and never shares an object with the first one.
    other = seal(Open.parse(opened.to_bytes()), type(layout).parse(layout.to_bytes()), again, None).to_bytes()
    assert one == other


def test_who_opened_it_leaves_no_trace(make) -> None:
    layout = make.layout()
    one, other = make.opened(layout), make.opened(layout, write_id="f" * 16)
    assert seal(one, layout, make.receipts(one, layout), None) == seal(
        other, layout, make.receipts(other, layout), None
    )


def test_the_first_version_is_its_own_full(make) -> None:
    layout = make.layout()
    manifest, position = make.seal(layout)
    assert (manifest.full_version, manifest.chain, manifest.extra_full) == (1, (), ())
    assert manifest.parent == GENESIS
    assert manifest.payload_bytes == manifest.full_bytes == 2 * (8 + 2 * 16)
    assert (manifest.elements, manifest.weight_bytes, manifest.changed) == (32, 64, 4)
    assert position == Position(version=1, sha256=sha256_hex(manifest.to_bytes()))


def test_receipts_are_referred_to_by_what_is_stored(make) -> None:
    layout = make.layout()
    opened = make.opened(layout)
    receipts = [(receipt, data + b" ") for receipt, data in make.receipts(opened, layout)]
    manifest = seal(opened, layout, receipts, None)
    assert [(r.sha256, r.size) for r in manifest.receipts] == [(sha256_hex(d), len(d)) for _, d in receipts]


def test_the_chain_leads_from_the_newest_full_to_the_parent(make) -> None:
    layout = make.layout()
    state = make.seal(layout)
    positions = [state[1]]
    for _ in range(5):
        state = make.seal(layout, state, size=1)
        assert [link.position for link in state[0].chain] == positions
        assert state[0].full_version == 1
        positions.append(state[1])


def test_aborted_numbers_leave_gaps_and_nothing_else(make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    second = make.seal(layout, first, version=5)
    third = make.seal(layout, second, version=9)
    assert [link.version for link in third[0].chain] == [1, 5]
    assert third[0].parent == second[1]


def test_a_version_in_which_every_group_is_full_is_a_full(make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    second = make.seal(layout, first, full=(0, 1))
    assert second[0].full_version == 2
    assert [link.position for link in second[0].chain] == [first[1]]
    partly = make.seal(layout, first, full=(0,))
    assert partly[0].full_version == 1


def test_an_extra_full_counts_once_every_rank_reports_it(make) -> None:
    layout = make.layout()
    states = [make.seal(layout)]
    for _ in range(3):
        states.append(make.seal(layout, states[-1], size=1))
    opened = make.opened(layout, version=5, parent=states[-1][1])
    receipts = make.receipts(opened, layout, size=1, fulls=(make.full_ref(2), make.full_ref(3)))
    sealed = seal(opened, layout, receipts, states[-1])
    assert sealed.full_version == 3
    assert [ref.sha256 for ref in sealed.extra_full] == [f"{3:064x}"] * 2
    assert sealed.full_bytes == 80
    assert [link.version for link in sealed.chain] == [1, 2, 3, 4]
    only_one = make.receipt(opened, layout, 0, make.shard(layout, 0, size=1))
    partial = seal(opened, layout, [(only_one, only_one.to_bytes()), receipts[1]], states[-1])
    assert partial.full_version == 1
    assert partial.extra_full == ()
    later = make.seal(layout, (sealed, sealed.position(sealed.to_bytes())), size=1)[0]
    assert (later.full_version, later.extra_full, later.full_bytes) == (3, sealed.extra_full, 80)


def test_an_extra_full_that_is_no_ancestor_or_no_newer_is_ignored(make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    second = make.seal(layout, first, version=4, size=1)
    for version in (1, 2, 3):
        third = make.seal(layout, second, size=1, fulls=(make.full_ref(version),))[0]
        assert (third.full_version, third.extra_full) == (1, ())


def test_a_few_links_before_the_full_stay(make) -> None:
    layout = make.layout()
    state = make.seal(layout)
    positions = [state[1]]
    for version in range(2, 2 * OLDER_LINKS):
        fulls = (make.full_ref(version - 1),)
        state = make.seal(layout, state, size=1, fulls=fulls)
        assert state[0].full_version == version - 1
        assert [link.position for link in state[0].chain] == positions[-OLDER_LINKS - 1 :]
        positions.append(state[1])
    state = make.seal(layout, state, full=(0, 1))
    assert [link.position for link in state[0].chain] == positions[-OLDER_LINKS:]


def test_a_resume_with_another_world_size_keeps_the_extra_full(make) -> None:
    two, three = make.layout(world_size=2), make.layout(world_size=3)
    first = make.seal(two)
    second = make.seal(two, first, size=1)
    third = make.seal(two, second, size=1, fulls=(make.full_ref(2),))
    fourth = make.seal(three, third, size=1)[0]
    assert len(fourth.receipts) == 3
    assert len(fourth.extra_full) == 2
    assert Manifest.parse(fourth.to_bytes()) == fourth


def test_assets_come_from_rank_0_and_are_inherited(make) -> None:
    layout = make.layout()
    assets = (Asset(name="config.json", sha256="c" * 64, size=10),)
    first = make.seal(layout, assets=assets)
    second = make.seal(layout, first)
    assert first[0].assets == second[0].assets == assets
    other = (Asset(name="config.json", sha256="d" * 64, size=11),)
    assert make.seal(layout, second, assets=other)[0].assets == other


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"run_id": "00000000-0000-4000-8000-000000000002"},
        {"parent": Position(version=1, sha256="a" * 64)},
        {"layout": "b" * 64},
        {"extra_full": True},
        {"rank": 0},
    ],
)
def test_a_receipt_of_something_else_is_refused(changed: dict[str, object], make) -> None:
    layout = make.layout()
    opened = make.opened(layout)
    receipts = make.receipts(opened, layout)
    wrong = receipts[1][0].model_copy(update=changed)
    with pytest.raises(FormatError, match=r"the receipt of rank \d names version .* was opened with rank 1"):
        seal(opened, layout, [receipts[0], (wrong, wrong.to_bytes())], None)
    check_belongs(receipts[1][0], opened, 1)


def test_all_ranks_must_have_reported_all_their_groups(make) -> None:
    layout = make.layout(layers=3)
    opened = make.opened(layout)
    receipts = make.receipts(opened, layout)
    with pytest.raises(FormatError, match="version 1 has 1 receipts of 2"):
        seal(opened, layout, receipts[:1], None)
    short = make.receipt(opened, layout, 1, [b"x"])
    with pytest.raises(FormatError, match=r"rank 1 reports 1 groups of 3 that it owns: layers.1.w1 .* is missing"):
        seal(opened, layout, [receipts[0], (short, short.to_bytes())], None)
    with pytest.raises(FormatError, match="version 1 has 2 receipts of 2"):
        seal(opened, make.layout(world_size=3), receipts, None)


def test_a_delta_needs_the_parent_it_names(make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    opened = make.opened(layout)
    delta = [make.receipt(opened, layout, rank, make.shard(layout, rank), full=(0,)) for rank in range(2)]
    with pytest.raises(FormatError, match="rank 0 reports a delta, but version 1 has no parent"):
        seal(opened, layout, [(r, r.to_bytes()) for r in delta], None)
    with pytest.raises(FormatError, match="version 1 starts from 0@000000000000, not from the manifest given"):
        seal(opened, layout, make.receipts(opened, layout), first)
    second = make.opened(layout, version=2, parent=first[1])
    with pytest.raises(FormatError, match="version 2 starts from 1@"):
        seal(second, layout, make.receipts(second, layout), None)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"world_size": 3}, "number of receipts differs from the world size"),
        ({"version": 2}, "the parent is not older than the version"),
        ({"parent": {"version": 0, "sha256": "1" * 64}}, "the parent is not older"),
        ({"chain": []}, "the full is not in the chain"),
        ({"full_version": 7}, "the full is not in the chain"),
        ({"full_version": 3, "extra_full": [{"sha256": "0" * 64, "size": 1, "shard_bytes": 8}]}, "its own full has no"),
        ({"parent": {"version": 2, "sha256": "1" * 64}}, "the chain does not end at the parent"),
        ({"version": 0}, "version"),
    ],
)
def test_each_rule_of_a_manifest_is_kept(changed: dict[str, object], sentence: str, make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    second = make.seal(layout, first)
    body = json.loads(make.seal(layout, second)[0].to_bytes())
    with pytest.raises(FormatError, match=sentence):
        Manifest.parse(json.dumps(body | changed).encode())
    with pytest.raises(FormatError, match="the chain is out of order"):
        Manifest.parse(json.dumps(body | {"chain": body["chain"][::-1]}).encode())


def test_what_makes_no_manifest_is_a_format_error(make) -> None:
    """A version number below its parent's cannot come from a coordinator, but may come from a hand-made open record."""
    layout = make.layout()
    first = make.seal(layout, version=3)
    opened = make.opened(layout, version=2, parent=first[1])
    with pytest.raises(FormatError, match=r"version 2 makes no valid manifest: .* not older"):
        seal(opened, layout, make.receipts(opened, layout), first)
    assert FullRef(version=1, sha256="0" * 64, size=1, shard_bytes=8).version == 1
