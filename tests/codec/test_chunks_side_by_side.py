"""Promise: chunks of a large tensor are coded side by side; the frame, the result and the errors are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import codec
from codec import frame as frame_module
from codec import header, threads
from codec.threads import helped, in_order, to_the_end

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


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Eleven chunks that nothing makes smaller: their frames are stored."""
    monkeypatch.setattr(header, "CHUNK_N", 1000)
    base, new = np.random.default_rng(0).integers(0, 1 << 16, (2, N), dtype=np.uint16)
    assert header.read(codec.encode_delta(base, new))[0].stored
    return base, new


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 1)


@pytest.mark.parametrize("tensors", ["pair", "noise"])
def test_frames_do_not_depend_on_threads(
    request: pytest.FixtureRequest, tensors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = request.getfixturevalue(tensors)
    frames = codec.encode_delta(base, new), codec.encode_full(new)
    buffer = base.copy()
    codec.apply_delta(buffer, frames[0])
    assert np.array_equal(buffer, new)
    assert np.array_equal(codec.decode_full(frames[1], container="numpy"), new)
    alone(monkeypatch)
    assert (codec.encode_delta(base, new), codec.encode_full(new)) == frames
    codec.apply_delta(buffer, codec.encode_delta(new, base))
    assert np.array_equal(buffer, base)


@pytest.mark.parametrize("tensors", ["pair", "noise"])
def test_the_base_is_compared_before_anything_else_is_said(request: pytest.FixtureRequest, tensors: str) -> None:
    base, new = request.getfixturevalue(tensors)
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


def test_other_cores_run_ahead_and_the_rest_is_done_here_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 3)
    meeting = threading.Barrier(3, timeout=60)
    here, done = threading.get_ident(), []

    def whole(i: int) -> int:
        assert threading.get_ident() == here
        if i == 0:
            meeting.wait()  # passes only with two others beside
        done.append(i)
        return 10 * i

    def ahead(i: int) -> int:
        assert threading.get_ident() != here
        if i < 3:
            meeting.wait()
        return 10 * i

    def rest(i: int, result: int) -> None:
        assert (threading.get_ident(), result) == (here, 10 * i)
        done.append(i)

    assert helped(range(20), whole, ahead, rest) == [10 * i for i in range(20)]
    assert done == list(range(20))


def test_alone_everything_is_done_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 1)

    def never(*_: int) -> int:
        raise AssertionError("nobody helps")

    assert helped(range(5), lambda i: i + 1, never, never) == [1, 2, 3, 4, 5]
    assert helped([], never, never, never) == []


def test_what_a_helper_raises_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    begun = threading.Event()

    def whole(i: int) -> int:
        assert i == 0
        assert begun.wait(60)
        return i

    def ahead(i: int) -> int:
        begun.set()
        raise codec.CorruptFrame(f"chunk {i}")

    with pytest.raises(codec.CorruptFrame, match="chunk 1"):
        helped(range(2), whole, ahead, lambda i, result: None)


@pytest.mark.parametrize("tensors", ["pair", "noise"])
def test_an_interrupt_among_the_stores_leaves_no_mixture(
    request: pytest.FixtureRequest, tensors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = request.getfixturevalue(tensors)
    frame, buffer, store = codec.encode_delta(base, new), base.copy(), frame_module.apply_change
    stored: list[codec.Change] = []

    def interrupted(bits: np.ndarray, change: codec.Change) -> None:
        if not stored:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        store(bits, change)
        stored.append(change)

    monkeypatch.setattr(frame_module, "apply_change", interrupted)
    with pytest.raises(KeyboardInterrupt):
        codec.apply_delta(buffer, frame)
    assert np.array_equal(buffer, new)


@pytest.mark.parametrize("allowed", [0, 1])
def test_stores_need_no_thread(
    pair: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    base, new = pair
    frame, buffer, start, started = codec.encode_delta(base, new), base.copy(), threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("weightcast-codec-store"):
            if len(started) == allowed:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    codec.apply_delta(buffer, frame)
    assert np.array_equal(buffer, new)


def test_what_one_raises_is_raised_when_the_others_are_done() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        to_the_end([fail, *(partial(done.append, i) for i in range(5))])
    assert sorted(done) == [0, 1, 2, 3, 4]


def test_an_interrupt_before_the_first_begins_does_none(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        to_the_end([partial(done.append, i) for i in range(5)])
    assert not done
