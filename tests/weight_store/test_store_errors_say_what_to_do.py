"""Whatever an S3 server answers, or does not, becomes the right class of error and a sentence that helps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from botocore import exceptions as botocore_errors

from weight_store.errors import (
    FormatError,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreThrottled,
    StoreUnavailable,
)
from weight_store.opening import check_reachable, check_writable, parse_s3_url
from weight_store.s3 import S3Store
from weight_store.s3_errors import Place, classify
from weight_store.s3_settings import S3Options

SECRETS = ("test-secret-key", "wrong-secret", "reader-secret-key")


@asynccontextmanager
async def opened(url: str, options: S3Options | None = None) -> AsyncIterator[S3Store]:
    store = S3Store(parse_s3_url(url), options)
    try:
        yield store
    finally:
        await store.close()


async def every_failure(store: S3Store) -> list[BaseException]:
    """The error of each operation, through both clients."""

    async def upload() -> None:
        async with store.upload("v/x.shard") as upload:
            await upload.write(b"x")
            await upload.commit()

    async def listing() -> None:
        _ = [entry async for entry in store.list("")]

    operations = [
        store.get("head", max_bytes=100),
        store.read_into("head", 0, memoryview(bytearray(1))),
        store.create("head", b"x"),
        store.replace("head", b"x", etag='"e"'),
        store.delete("head"),
        listing(),
        upload(),
    ]
    outcomes = await asyncio.gather(*operations, return_exceptions=True)
    assert all(isinstance(outcome, StoreError) for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert not any(secret in str(outcome) for secret in SECRETS)
    return [outcome for outcome in outcomes if outcome is not None]


async def test_a_bucket_that_does_not_exist(s3_url: Callable[..., str]) -> None:
    async with opened(s3_url("conformance").replace("s3://conformance", "s3://no-such-bucket")) as store:
        with pytest.raises(StoreRefused, match=r"bucket 'no-such-bucket' does not exist .*: create it"):
            await check_reachable(store)
        failures = await every_failure(store)
    # SeaweedFS compares the ETag before it looks for the bucket.
    assert {type(failure) for failure in failures} == {StoreRefused, PreconditionFailed}
    assert sum(isinstance(failure, PreconditionFailed) for failure in failures) == 1


async def test_a_bucket_that_does_not_exist_on_a_second_server(ministack: Any) -> None:
    url = ministack.url("conformance").replace("s3://conformance", "s3://no-such-bucket")
    async with opened(url) as store:
        with pytest.raises(StoreRefused, match=r"'no-such-bucket' does not exist"):
            await check_reachable(store)


async def test_an_unknown_access_key(s3_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url("conformance")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    async with opened(url) as store:
        for failure in await every_failure(store):
            assert isinstance(failure, StoreRefused)
            assert "AWS_ACCESS_KEY_ID" in str(failure)


async def test_a_wrong_secret_key(s3_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url("conformance")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    async with opened(url) as store:
        for failure in await every_failure(store):
            assert isinstance(failure, StoreRefused)
            assert "AWS_SECRET_ACCESS_KEY" in str(failure)


async def test_keys_that_may_only_read(
    s3_url: Callable[..., str],
    fresh_prefix: Callable[[], str],
    read_only_keys: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = s3_url("conformance", fresh_prefix())
    async with opened(url) as writer:
        await writer.create("head", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", read_only_keys[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", read_only_keys[1])
    async with opened(url) as store:
        await check_reachable(store)
        assert (await store.get("head", max_bytes=1)).data == b"x"
        with pytest.raises(StoreRefused, match="s3:PutObject"):
            await store.create("other", b"x")
        with pytest.raises(StoreRefused, match="s3:PutObject"):
            await check_writable(store, "probe")


async def test_no_credentials(s3_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url("conformance")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with opened(url) as store:
        for failure in await every_failure(store):
            assert isinstance(failure, StoreRefused)
            assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(failure)


async def test_nobody_listens(aws_environment: None) -> None:
    async with opened("s3://bucket/p?endpoint=http://127.0.0.1:9") as store:
        for failure in await every_failure(store):
            assert isinstance(failure, StoreUnavailable)
            assert "http://127.0.0.1:9 cannot be reached" in str(failure)


async def test_a_server_that_never_answers(canned: Any) -> None:
    options = S3Options(read_timeout_s=0.3, upload_timeout_s=0.3)
    async with opened(canned.url, options) as store:
        for failure in await every_failure(store):
            assert isinstance(failure, StoreUnavailable)
            assert "did not answer in time" in str(failure)


ANSWERS: list[tuple[int, str, type[StoreError], str]] = [
    (409, "ConditionalRequestConflict", PreconditionFailed, "being written"),
    (412, "PreconditionFailed", PreconditionFailed, "exists already"),
    (409, "OperationAborted", StoreUnavailable, "conflicting operation"),
    (503, "SlowDown", StoreThrottled, "fewer requests"),
    (503, "ServiceUnavailable", StoreThrottled, "fewer requests"),
    (429, "TooManyRequests", StoreThrottled, "fewer requests"),
    (429, "RateLimitExceeded", StoreThrottled, "fewer requests"),
    (503, "Whatever", StoreThrottled, "fewer requests"),
    (412, "Whatever", PreconditionFailed, "exists already"),
    (409, "Whatever", PreconditionFailed, "by somebody else"),
    (500, "InternalError", StoreUnavailable, "InternalError"),
    (502, "Whatever", StoreUnavailable, "Whatever"),
    (403, "RequestTimeTooSkewed", StoreUnavailable, "synchronise the clock"),
    (400, "RequestTimeout", StoreUnavailable, "too slowly"),
    (400, "BadDigest", StoreUnavailable, "damaged"),
    (404, "NoSuchBucket", StoreRefused, "does not exist"),
    (403, "InvalidAccessKeyId", StoreRefused, "AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", StoreRefused, "AWS_SECRET_ACCESS_KEY"),
    (403, "AccessDenied", StoreRefused, "s3:ListBucket"),
    (400, "ExpiredToken", StoreRefused, "AWS_SESSION_TOKEN"),
    (400, "AuthorizationHeaderMalformed", StoreRefused, "region="),
    (501, "NotImplemented", StoreRefused, "conditional writes"),
    (400, "SomethingNew", StoreRefused, "SomethingNew: no"),
]


async def test_each_answer_has_its_class(canned: Any) -> None:
    async with opened(canned.url) as store:
        for status, code, kind, words in ANSWERS:
            canned.refuse(status, code)
            for failure in await every_failure(store):
                assert type(failure) is kind, code
                assert words in str(failure)


async def test_no_client_asks_again_by_itself(canned: Any) -> None:
    async with opened(canned.url) as store:
        for status, code in ((503, "SlowDown"), (500, "InternalError")):
            canned.refuse(status, code)
            canned.asked = 0
            failures = await every_failure(store)
            assert canned.asked == len(failures) + 1  # an upload looks whether it happened all the same


async def test_a_missing_object_has_its_class(canned: Any) -> None:
    canned.refuse(404, "NoSuchKey")
    async with opened(canned.url) as store:
        with pytest.raises(ObjectNotFound):
            await store.get("head", max_bytes=9)
        # Amazon's answer to If-Match on a key that is gone.
        with pytest.raises(PreconditionFailed):
            await store.replace("head", b"x", etag='"e"')


async def test_an_answer_that_is_no_s3_is_unavailable(canned: Any) -> None:
    async with opened(canned.url) as store:
        for page in (b"<html>who are you?</html>", b"<Error><Code>Slow", b""):
            head = b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(page)
            canned.answer = head + page
            for failure in await every_failure(store):
                assert isinstance(failure, StoreUnavailable)


async def test_an_answer_without_a_length_is_still_bounded(canned: Any) -> None:
    canned.answer = b'HTTP/1.1 200 OK\r\nConnection: close\r\nETag: "e"\r\n\r\n' + bytes(100_000)
    async with opened(canned.url) as store:
        with pytest.raises(FormatError, match="at most 1000"):
            await store.get("head", max_bytes=1000)


async def test_a_server_that_ignores_ranges_is_refused(canned: Any) -> None:
    canned.answer = b'HTTP/1.1 200 OK\r\nConnection: close\r\nETag: "e"\r\nContent-Length: 10\r\n\r\n0123456789'
    async with opened(canned.url) as store:
        with pytest.raises(StoreRefused, match="ignores ranges"):
            await store.read_into("shard", 5, memoryview(bytearray(5)))
        start = bytearray(5)
        await store.read_into("shard", 0, memoryview(start))
        assert start == b"01234"


async def test_a_server_without_etags_is_refused(canned: Any) -> None:
    canned.answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    async with opened(canned.url) as store:
        for call in (store.get("head", max_bytes=1), store.create("head", b"x")):
            with pytest.raises(StoreRefused, match="gives no ETag"):
                await call


async def test_a_server_that_ignores_conditions_is_refused(canned: Any) -> None:
    canned.answer = b'HTTP/1.1 200 OK\r\nConnection: close\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n'
    async with opened(canned.url) as store:
        with pytest.raises(StoreRefused, match="ignores If-None-Match"):
            await check_writable(store, "probe")


def test_the_clients_own_complaints_have_their_class() -> None:
    place = Place("bucket", "https://s3.example")
    expected: list[tuple[Exception, type[StoreError], str]] = [
        (botocore_errors.NoRegionError(), StoreRefused, "region="),
        (botocore_errors.SSLError(endpoint_url="u", error="certificate verify failed"), StoreRefused, "AWS_CA_BUNDLE"),
        (botocore_errors.SSLError(endpoint_url="u", error="unexpected EOF"), StoreUnavailable, "broke"),
        (botocore_errors.ConnectTimeoutError(endpoint_url="u"), StoreUnavailable, "cannot be reached"),
        (botocore_errors.ProfileNotFound(profile="prod"), StoreRefused, "prod"),
        (botocore_errors.ParamValidationError(report="r"), StoreRefused, "could not be made"),
        (ConnectionResetError(), StoreUnavailable, "broke"),
    ]
    for error, kind, words in expected:
        failure = classify(error, place, "run/head.json")
        assert type(failure) is kind
        assert words in str(failure)
        assert failure.key == "run/head.json"
