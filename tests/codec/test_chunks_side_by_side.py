"""Promise: chunks of a large tensor are coded side by side; the frame, the result and the errors are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import codec
from codec import header, threads
from codec.threads import in_order

N = 10_500


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Eleven chunks of a tensor of floats; one chunk unchanged, one all new."""
    monkeypatch.setattr(header, "CHUNK_N", 1000)
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, N).astype(np.float16)
    new = base.copy()
    new.view(np.uint16)[rng.choice(N, 300, replace=False)] += 1
    new[2000:3000] = base[2000:3000]
    new[5000:6000] = rng.normal(0, 0.02, 1000)
    return base, new


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codec.frame.in_order", lambda jobs, threads: in_order(jobs, threads=False))


def test_frames_do_not_depend_on_threads(pair: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    base, new = pair
    frames = codec.encode_delta(base, new), codec.encode_full(new)
    buffer = base.copy()
    codec.apply_delta(buffer, frames[0])
    assert np.array_equal(buffer, new)
    assert np.array_equal(codec.decode_full(frames[1], container="numpy"), new)
    alone(monkeypatch)
    assert (codec.encode_delta(base, new), codec.encode_full(new)) == frames
    codec.apply_delta(buffer, codec.encode_delta(new, base))
    assert np.array_equal(buffer, base)


def test_the_base_is_compared_before_anything_else_is_said(pair: tuple[np.ndarray, np.ndarray]) -> None:
    base, new = pair
    frame = codec.encode_delta(base, new)
    for at in (0, 4321, N - 1):
        other = base.copy()
        other.view(np.uint16)[at] ^= 1 << 13
        before = other.copy()
        with pytest.raises(codec.BaseMismatch):
            codec.apply_delta(other, frame)
        assert np.array_equal(other, before, equal_nan=True)


@pytest.mark.parametrize("chunk", [0, 5, 10])
def test_one_bad_chunk_leaves_the_buffer_alone(pair: tuple[np.ndarray, np.ndarray], chunk: int) -> None:
    base, new = pair
    head, payloads = header.read(codec.encode_delta(base, new))
    spoilt = [bytes(p) for p in payloads]
    for bad in (spoilt[chunk][:-1], spoilt[2]):  # cut short; "nothing changed"
        buffer = base.copy()
        with pytest.raises(codec.CorruptFrame):
            codec.apply_delta(buffer, header.write(head, [*spoilt[:chunk], bad, *spoilt[chunk + 1 :]]))
        assert np.array_equal(buffer, base)


def test_jobs_run_side_by_side_and_answer_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    meeting = threading.Barrier(2, timeout=60)

    def job(i: int) -> int:
        meeting.wait()  # passes only with another job beside
        return i

    assert list(in_order([partial(job, i) for i in range(6)], threads=True)) == list(range(6))


def test_what_a_job_raises_is_raised_and_later_jobs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 1)
    done: list[int] = []
    never = threading.Event()

    def job(i: int) -> int:
        if i == 3:
            raise codec.CorruptFrame("three")
        if i > 3:
            never.wait(0.05)
        done.append(i)
        return i

    jobs: list[Callable[[], int]] = [partial(job, i) for i in range(200)]
    with pytest.raises(codec.CorruptFrame, match="three"):
        list(in_order(jobs, threads=True))
    assert done[:3] == [0, 1, 2]
    assert len(done) < 100
    assert list(in_order(jobs[:3], threads=False)) == [0, 1, 2]
