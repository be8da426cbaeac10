"""Promise: chunks of a large tensor are coded side by side; the frame, the result and the errors are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import xxhash

import codec
from codec import frame as frame_module
from codec import header, threads
from codec.threads import in_order, to_the_end

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


@pytest.mark.parametrize("tensors", ["pair", "noise"])
@pytest.mark.parametrize("full", [False, True])
def test_a_frame_has_the_digest_of_its_chunks_digests(
    request: pytest.FixtureRequest, tensors: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = (array.view(np.uint16) for array in request.getfixturevalue(tensors))
    head, _ = header.read(codec.encode_full(new) if full else codec.encode_delta(base, new))
    assert head.kind == 4 + 2 * (tensors == "noise") + (not full)
    of_chunks = [[codec.digest(side[at : at + 1000]) for at in range(0, N, 1000)] for side in (base, new)]
    of_base, of_new = (codec.digest(b"".join(digests)) for digests in of_chunks)
    assert (head.base_digest, head.digest) == (None if full else of_base, of_new)
    monkeypatch.setattr(header, "CHUNK_N", N)
    one, _ = header.read(codec.encode_full(new) if full else codec.encode_delta(base, new))
    assert (one.base_digest, one.digest) == (None if full else codec.digest(base), codec.digest(new))


@pytest.fixture(params=["delta", "full", "stored delta", "stored full"])
def whole_digests(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, bytes]:
    """A pair, and its frame of several chunks as it was written before digests were taken by chunk."""
    kind = request.param
    base, new = request.getfixturevalue("noise" if "stored" in kind else "pair")
    head, payloads = header.read(codec.encode_full(new) if "full" in kind else codec.encode_delta(base, new))
    of_base = None if "full" in kind else codec.digest(base)
    head = replace(head, digest=codec.digest(new), base_digest=of_base, by_chunk=False)
    frame = header.write(head, [b"".join(payloads)] if head.stored else payloads)
    assert frame[5] == ["full", "delta", "stored full", "stored delta"].index(kind)
    return base, new, frame


def test_frames_with_a_digest_of_the_whole_are_still_read(whole_digests: tuple[np.ndarray, np.ndarray, bytes]) -> None:
    base, new, frame = whole_digests
    buffer = base.copy()
    codec.apply_delta(buffer, frame)
    assert np.array_equal(buffer, new)
    if frame[5] % 2 == 0:
        assert np.array_equal(codec.decode_full(frame, container="numpy"), new)
    for lie in (replace(header.read(frame)[0], digest=bytes(16)), replace(header.read(frame)[0], by_chunk=True)):
        payloads = header.read(frame)[1]
        spoilt = header.write(lie, [b"".join(payloads)] if lie.stored else payloads)
        buffer = base.copy()
        with pytest.raises(codec.BaseMismatch if lie.by_chunk and frame[5] % 2 else codec.CorruptFrame):
            codec.apply_delta(buffer, spoilt)
        assert np.array_equal(buffer, base)
    if frame[5] % 2:
        buffer[N - 1] += 1
        before = buffer.copy()
        with pytest.raises(codec.BaseMismatch):
            codec.apply_delta(buffer, frame)
        assert np.array_equal(buffer, before)


def test_one_chunk_has_no_digest_of_digests(pair: tuple[np.ndarray, np.ndarray]) -> None:
    base, new = (array[:1000] for array in pair)
    head, payloads = header.read(codec.encode_delta(base, new))
    lie = replace(head, by_chunk=True)
    with pytest.raises(codec.InvalidInput, match="one chunk"):
        header.write(lie, payloads)
    frame = bytearray(header.write(head, payloads))
    frame[5] += header.BY_CHUNK
    frame[8:16] = header.CHECK.pack(xxhash.xxh3_64_intdigest(bytes(frame[:8] + frame[16:])))
    with pytest.raises(codec.CorruptFrame, match="one chunk"):
        codec.apply_delta(base.copy(), frame)


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
