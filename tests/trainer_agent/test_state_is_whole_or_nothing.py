"""What a sidecar left for the next one is read back as it was, or not at all."""

from __future__ import annotations

import pytest

from trainer_agent.state import Base, State, seal, unseal
from weight_store.position import Position
from weight_store.receipt import FullRef
from weight_store.records import sha256_hex

STATE = State(
    run_id="6f1ff0d2-8a3c-4c55-9f0e-0d6a5b1d7c11",
    layout="a" * 64,
    base=Base(slot=1, position=Position(version=3, sha256="b" * 64), ordinal=2, digests="c" * 32),
    fulls=(FullRef(version=2, sha256="d" * 64, size=600, shard_bytes=1000),),
)


def test_it_comes_back() -> None:
    assert unseal(seal(STATE)) == STATE


def test_no_flipped_bit_changes_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    sealed = seal(STATE)
    for at, byte in enumerate(sealed):
        flipped = bytes([*sealed[:at], byte ^ 1 << at % 8, *sealed[at + 1 :]])
        assert unseal(flipped) is None
    assert "is damaged" in caplog.text


def test_neither_does_what_is_cut_or_of_an_older_release() -> None:
    sealed = seal(STATE)
    assert not any(unseal(sealed[:length]) for length in range(len(sealed)))
    assert unseal(STATE.to_bytes()) is None


@pytest.mark.parametrize(
    ("right", "wrong"), [(b'"slot":1', b'"slot":2'), (b'"slot":1', b'"slot":-1'), (b'"' + b"c" * 32, b'"' + b"c" * 30)]
)
def test_what_no_sidecar_can_mean_is_refused_whatever_its_seal_says(right: bytes, wrong: bytes) -> None:
    body = STATE.to_bytes().replace(right, wrong)
    assert body != STATE.to_bytes()
    assert unseal(sha256_hex(body).encode() + b"\n" + body) is None
