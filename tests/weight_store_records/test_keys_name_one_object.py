"""Every key says exactly what it names, and no text becomes a key unchecked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store.errors import FormatError
from weight_store.keys import (
    ParsedKey,
    asset_key,
    check_run,
    control_key,
    head_key,
    layout_key,
    manifest_key,
    offer_key,
    open_key,
    parse_key,
    receipt_key,
    run_marker_key,
    shard_key,
    sign_key,
)

SLUG = st.from_regex(r"\A[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\Z").filter(lambda run: ".." not in run)
SHA256 = st.from_regex(r"\A[0-9a-f]{64}\Z")
NONCE = st.from_regex(r"\A[0-9a-f]{16}\Z")
TERM = st.integers(0, 10**8 - 1)
VERSION = st.integers(0, 10**12 - 1)
RANK = st.integers(0, 10**5 - 1)


def parsed_keys() -> st.SearchStrategy[ParsedKey]:
    def kind(name: str, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[ParsedKey]:
        return st.builds(ParsedKey, st.just(name), SLUG, **fields)

    return st.one_of(
        kind("run"),
        kind("head"),
        kind("control"),
        kind("layout", sha256=SHA256),
        kind("asset", sha256=SHA256),
        kind("offer", term=TERM, rank=RANK),
        kind("open", version=VERSION),
        kind("manifest", version=VERSION),
        kind("sign", version=VERSION, sign=st.integers(0, 10**8 - 1)),
        kind("shard", version=VERSION, rank=RANK, nonce=NONCE, extra_full=st.booleans()),
        kind("receipt", version=VERSION, rank=RANK, extra_full=st.booleans()),
    )


def build(key: ParsedKey) -> str:
    number = {"term": key.term or 0, "version": key.version or 0, "rank": key.rank or 0}
    term, version, rank = number["term"], number["version"], number["rank"]
    builders = {
        "run": lambda: run_marker_key(key.run),
        "head": lambda: head_key(key.run),
        "control": lambda: control_key(key.run),
        "layout": lambda: layout_key(key.run, key.sha256),
        "asset": lambda: asset_key(key.run, key.sha256),
        "sign": lambda: sign_key(key.run, version, key.sign or 0),
        "offer": lambda: offer_key(key.run, term, rank),
        "open": lambda: open_key(key.run, version),
        "manifest": lambda: manifest_key(key.run, version),
        "shard": lambda: shard_key(key.run, version, rank, key.nonce, extra_full=key.extra_full),
        "receipt": lambda: receipt_key(key.run, version, rank, extra_full=key.extra_full),
    }
    return builders[key.kind]()


@given(parsed_keys())
def test_parsing_undoes_building(key: ParsedKey) -> None:
    assert parse_key(build(key)) == key


@given(parsed_keys(), st.data())
def test_an_edited_key_is_another_object_or_none(key: ParsedKey, data: st.DataObject) -> None:
    text = build(key)
    at = data.draw(st.integers(0, len(text) - 1))
    edited = text[:at] + data.draw(st.text(max_size=2)) + text[at + 1 :]
    try:
        found = parse_key(edited)
    except FormatError:
        return
    assert build(found) == edited


@given(st.integers(0, 10**12 - 2))
def test_keys_sort_in_version_order(version: int) -> None:
    assert manifest_key("r", version) < manifest_key("r", version + 1)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "run",
        "run/",
        "/run/head.json",
        "run/head.json/",
        "run//head.json",
        "run/head.json\n",
        "run/HEAD.json",
        "../head.json",
        "a..b/head.json",
        "-run/head.json",
        "run/../other/head.json",
        "run/v/1/open.json",
        "run/v/0000000000001/open.json",
        "run/v/-00000000001/open.json",
        "run/v/" + "\u0661" * 12 + "/open.json",
        "run/v/000000000001/00000.shard",
        "run/v/000000000001/00000-0123456789ABCDEF.shard",
        "run/v/000000000001/full/manifest.json",
        "run/layouts/" + "A" * 64,
        "run/layouts/" + "a" * 63,
        "run/terms/00000001/00000",
        "_runs/",
        "_runs/a/b",
        "_runs/_runs",
        "_runs/head.json/..",
        "run\x00/head.json",
        "r" * 64 + "/head.json",
        "x" * 10_000_000,
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_key(key)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "run", ["", "A", "a/b", "a\\b", "..", "a..b", ".a", "a.", "_runs", "a b", "a\n", "ä", "a" * 64]
)
def test_run_names_are_slugs(run: str) -> None:
    with pytest.raises(FormatError, match="run name"):
        check_run(run)


@pytest.mark.parametrize(
    "build_it",
    [
        lambda: open_key("run", -1),
        lambda: open_key("run", 10**12),
        lambda: offer_key("run", 10**8, 0),
        lambda: offer_key("run", 1, 10**5),
        lambda: receipt_key("run", 1, -1),
        lambda: shard_key("run", 1, 0, "../../../etc"),
        lambda: shard_key("run", 1, 0, ""),
        lambda: layout_key("run", "../head.json"),
        lambda: asset_key("run", "A" * 64),
        lambda: head_key("../run"),
        lambda: run_marker_key("a/b"),
    ],
)
def test_no_key_is_built_that_would_not_parse(build_it: object) -> None:
    assert callable(build_it)
    with pytest.raises(FormatError):
        build_it()
