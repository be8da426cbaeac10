"""No key can leave a directory or be read in two ways, whatever store it is given to."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from weight_store.errors import StoreRefused
from weight_store.object_keys import MAX_KEY_BYTES, check_key_prefix, check_object_key

KEYS = st.text(st.sampled_from("/.a\\\x00\x1f\x7f\n é"), max_size=12)


def accepts(check, key: str) -> bool:
    try:
        return check(key) == key
    except StoreRefused:
        return False


@given(KEYS)
@example("a\n")
@example("a/..\n")
@example("a/...")
@example("a" * (MAX_KEY_BYTES + 1))
def test_a_key_is_taken_by_the_rule_and_only_then(key: str) -> None:
    plain = not any(ord(character) < 0x20 or character in "\x7f\\" for character in key)
    parts = all(part not in {"", ".", ".."} for part in key.split("/"))
    assert accepts(check_object_key, key) == (plain and parts and len(key.encode()) <= MAX_KEY_BYTES)


@given(KEYS)
def test_every_beginning_of_a_key_is_a_prefix(key: str) -> None:
    if accepts(check_object_key, key):
        assert all(accepts(check_key_prefix, key[:end]) for end in range(len(key) + 1) if not key[:end].endswith("/."))
