"""S3 refuses signatures that are more than 15 minutes off; a machine whose clock is wrong goes on all the same."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import replace

import botocore.auth
import pytest

from weight_store import s3_clock
from weight_store.doctor import Examination, diagnose
from weight_store.opening import open_store
from weight_store.retry import RetryPolicy
from weight_store.s3_clock import SigningClock
from weight_store.s3_errors import Place
from weight_store.s3_settings import MIB, S3Options
from weight_store.store import Store

QUICK = RetryPolicy(attempts=3, first_delay_s=0.01)
SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """``set_clock(seconds)``: what signs in this process believes that it is so much later than it is."""

    def set_it(seconds: float) -> None:
        def now(remove_tzinfo: bool = True) -> datetime.datetime:
            shifted = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
            return shifted.replace(tzinfo=None) if remove_tzinfo else shifted

        monkeypatch.setattr(botocore.auth, "get_current_datetime", now)
        monkeypatch.setattr(s3_clock, "_now", lambda: now(remove_tzinfo=False))

    return set_it


async def use(store: Store, key: str) -> None:
    await store.create(key, b"small")
    assert (await store.get(key, max_bytes=5)).data == b"small"
    async with store.upload(f"{key}.shard") as upload:
        await upload.write(bytes(11 * MIB))
        await upload.commit()
    assert [entry.size async for entry in store.list(f"{key}.shard")] == [11 * MIB]


@pytest.mark.parametrize("seconds", [3600.0, -72000.0], ids=["an hour ahead", "twenty hours behind"])
async def test_requests_are_signed_with_the_servers_time(
    s3_url: Callable[..., str], set_clock: SetClock, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    caplog.set_level(logging.WARNING, "weight_store")
    store = open_store(s3_url("skewed", secrets.token_hex(4)), policy=QUICK, options=S3Options(part_bytes=5 * MIB))
    try:
        await use(store, "first")
        assert caplog.messages == []

        set_clock(seconds)  # the clock jumps while the store is in use
        await use(store, "second")
        assert len(caplog.messages) == 1
        assert f"{'behind' if seconds > 0 else 'ahead of'} this machine's: requests are signed" in caplog.text
        told = re.search(r" is (\d+) s ", caplog.text)
        assert told is not None
        assert abs(int(told[1]) - abs(seconds)) < 60
        assert "synchronise this machine's clock (NTP)" in caplog.text

        set_clock(0)  # and is repaired
        await use(store, "third")
    finally:
        await store.close()


async def test_many_requests_at_once_learn_of_it_together(
    s3_url: Callable[..., str], set_clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    url = s3_url("skewed", secrets.token_hex(4))
    set_clock(5000)
    store = open_store(url, policy=QUICK)
    try:
        await asyncio.gather(*(store.create(f"at-once-{number}", b"x") for number in range(20)))
    finally:
        await store.close()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "date", [None, "", "yesterday", "Mon, 30 Nov 2026 04:10:56", f"Mon, 30 Nov {10**20} 04:10:56 GMT"]
)
def test_a_refusal_without_a_time_changes_nothing(date: str | None) -> None:
    class Response:
        headers = {} if date is None else {"date": date}

    clock = SigningClock(Place("bucket", "http://store"))
    clock._learn(Response(), {"Error": {"Code": "RequestTimeTooSkewed"}})
    assert clock.skew_s == 0


@pytest.mark.parametrize(
    "date",
    [
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "Mon, 01 Jan 0001 00:00:00 GMT",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=2)),
    ],
    ids=["last year", "first year", "before the first year", "two days ahead"],
)
def test_a_time_that_cannot_be_is_not_believed(date: str, caplog: pytest.LogCaptureFixture) -> None:
    class Response:
        headers = {} | {"date": date}

    clock = SigningClock(Place("bucket", "http://store"))
    for _ in range(3):
        clock._learn(Response(), {"Error": {"Code": "RequestTimeTooSkewed"}})
    assert clock.skew_s == 0
    assert len(caplog.messages) == 1
    assert "http://store says that it is" in caplog.text
    assert "more than a day from this machine's time, and is not believed: set the clock that is wrong" in caplog.text


async def test_the_doctor_says_by_how_much(s3_url: Callable[..., str], set_clock: SetClock) -> None:
    url = s3_url("skewed", secrets.token_hex(4))
    set_clock(7200)
    seen = await Examination(url, secrets.token_hex(8), writers=2, rounds=1, size_bytes=11 * MIB).run()
    assert seen.skew_s is not None
    clock = next(check for check in diagnose(replace(seen, skew_s=-7200.0)).checks if check.name == "clock")
    assert clock.state == "warning"
    assert "7200 s behind this machine's: beyond 900 s S3 refuses what is signed with it" in clock.sentence
