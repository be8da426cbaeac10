"""A sign of life means that a publication got further than ever before; what is decided is worked on no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.errors import CoordinatorUnreachable
from tests.trainer_agent.walk_world import DENSE
from tests.trainer_agent.walking import Walk, walk
from tests.weight_store.conftest import Canned
from trainer_agent.signs import Decided, Movement, giving_signs
from weight_store.errors import StoreUnavailable
from weight_store.opening import open_store
from weight_store.retry import RetryPolicy
from weight_store.s3_settings import MIB, S3Options

NONCES = ("0123456789abcdef", "fedcba9876543210")
QUICK = RetryPolicy(attempts=3, first_delay_s=0.001)
SMALL_PARTS = S3Options(part_bytes=5 * MIB)


def shard(nonce: str) -> str:
    return f"r/v/000000000001/00000-{nonce}.shard"


@pytest.fixture
async def refusing_store(aws_environment: None) -> object:
    """Takes every body and then refuses it."""
    made = Canned()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    made.refuse(400, "BadDigest")
    yield made
    server.close()
    await server.wait_closed()


async def test_bytes_that_a_store_takes_and_refuses_count_once(refusing_store: Canned) -> None:
    movement = Movement()
    store = open_store(refusing_store.url, policy=QUICK, options=SMALL_PARTS, moved=movement.carried)
    counts = []
    for nonce in NONCES:
        async with store.upload(shard(nonce)) as upload:
            await upload.write(bytes(2 * MIB))
            with pytest.raises(StoreUnavailable):
                await upload.commit()
        counts.append(movement.count)
    await store.close()
    # Three attempts each, in blocks of 256 KiB.
    assert counts == [8, 8]


async def test_every_part_counts_for_itself(s3_url: Callable[..., str]) -> None:
    movement = Movement()
    store = open_store(s3_url("signs"), options=SMALL_PARTS, moved=movement.carried)
    for nonce in NONCES:
        async with store.upload(shard(nonce)) as upload:
            await upload.write(bytes(11 * MIB))
            await upload.commit()
        assert movement.count == 4 * 11
    sent = movement.count
    await store.read_into(shard(NONCES[0]), 2 * MIB, memoryview(bytearray(9 * MIB)))
    read = movement.count
    assert read > sent
    movement.carried(shard(NONCES[0]), 2 * MIB, 11 * MIB)  # the same read once more, in whatever blocks
    assert movement.count == read
    await store.close()


def test_groups_count_when_they_are_the_first() -> None:
    movement = Movement()
    assert list(movement.taken("abc")) == list("abc")
    for version in (7, 8):
        movement.applied(version, 1)
    assert movement.count == 5
    list(movement.taken("ab"))
    movement.applied(7, 1)
    assert movement.count == 5
    list(movement.taken("abcd"))
    movement.applied(7, 2)
    assert movement.count == 7
    movement.begin()
    list(movement.taken("a"))
    assert movement.count == 8


def test_each_publication_gives_signs_of_its_own() -> None:
    moved: list[int] = []

    async def play(walk: Walk) -> None:
        launch = walk.start_launch(world_size=1)
        for _ in range(3):
            launch.publish(DENSE)
            await walk.rest()
            (rank,) = launch.walkers
            assert rank.worker is not None
            moved.append(rank.worker.movement.count)

    walk(1, play=play)
    assert moved == [moved[0], 2 * moved[0], 3 * moved[0]]


class Pace:
    """A sleep that ends when told, and what was signed."""

    def __init__(self, undecided: int) -> None:
        self.undecided = undecided
        self.signed = 0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    async def sign(self) -> bool:
        self.signed += 1
        return self.signed <= self.undecided


async def test_work_for_what_is_decided_ends() -> None:
    movement, pace, ended = Movement(), Pace(undecided=2), []

    async def work() -> None:
        try:
            for number in range(1000):
                movement.applied(1, number)
                await asyncio.sleep(0)
        finally:
            ended.append(movement.count)

    with pytest.raises(Decided):
        await giving_signs(work(), movement, pace.sign, pace.sleep)
    assert pace.signed == 3
    assert ended[0] < 100


async def test_nothing_is_signed_when_nothing_gets_further() -> None:
    movement, pace = Movement(), Pace(undecided=1000)
    movement.applied(1, 5)

    async def work() -> str:
        for _ in range(3):
            for number in range(5):
                movement.applied(1, number)
                await asyncio.sleep(0)
        return "done"

    assert await giving_signs(work(), movement, pace.sign, pace.sleep) == "done"
    assert pace.signed == 0


async def test_a_sign_that_does_not_arrive_is_given_again_and_ends_nothing() -> None:
    movement, pace = Movement(), Pace(undecided=1000)
    given: list[int] = []

    async def sign() -> bool:
        given.append(movement.count)
        if len(given) == 1:
            raise CoordinatorUnreachable("no answer")
        return await pace.sign()

    async def work() -> str:
        await asyncio.sleep(0)
        movement.applied(1, 1)
        for _ in range(20):
            await asyncio.sleep(0)
        return "done"

    assert await giving_signs(work(), movement, sign, pace.sleep) == "done"
    assert given == [1, 1]


async def test_what_the_work_raises_is_raised() -> None:
    pace = Pace(undecided=1000)

    async def work() -> None:
        raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        await giving_signs(work(), Movement(), pace.sign, pace.sleep)


async def test_a_defect_of_the_signs_is_no_decision() -> None:
    movement, pace = Movement(), Pace(undecided=0)

    async def sign() -> bool:
        raise ZeroDivisionError

    async def work() -> None:
        await asyncio.sleep(0)
        movement.applied(1, 1)
        await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await giving_signs(work(), movement, sign, pace.sleep)


async def test_a_cancellation_ends_both() -> None:
    movement, pace = Movement(), Pace(undecided=10**9)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)  # it may be reading a slot that the trainer writes next
            ended.set()

    task = asyncio.create_task(giving_signs(work(), movement, pace.sign, pace.sleep))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert {t.get_name() for t in asyncio.all_tasks()}.isdisjoint({"signed-for", "signs-of-life"})
