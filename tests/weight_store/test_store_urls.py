"""A store URL names one store, or is refused with a sentence that repeats no secret."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weight_store.errors import StoreRefused
from weight_store.opening import check_reachable, open_store, parse_s3_url
from weight_store.s3_settings import S3Location


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://my-bucket", S3Location("my-bucket")),
        ("s3://my-bucket/", S3Location("my-bucket")),
        ("s3://my-bucket/a/b/", S3Location("my-bucket", "a/b")),
        ("s3://my-bucket/a%20b", S3Location("my-bucket", "a b")),
        (
            "s3://my-bucket/p?endpoint=http://127.0.0.1:9000/&region=eu-west-1",
            S3Location("my-bucket", "p", "http://127.0.0.1:9000", "eu-west-1"),
        ),
        ("s3://my-bucket?endpoint=https%3A%2F%2Fs3.example", S3Location("my-bucket", "", "https://s3.example")),
        ("s3://my-bucket?md5=always", S3Location("my-bucket", content_md5=True)),
        ("s3://my-bucket?md5=never", S3Location("my-bucket", content_md5=False)),
    ],
)
def test_an_s3_url_is_read(url: str, location: S3Location) -> None:
    assert parse_s3_url(url) == location


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "neither s3:// nor file://"),
        ("bucket/prefix", "neither s3:// nor file://"),
        ("gs://bucket/p", "neither s3:// nor file://"),
        ("s3://", "not a bucket name"),
        ("s3:///prefix", "not a bucket name"),
        ("s3://UPPER", "not a bucket name"),
        ("s3://a..b", "not a bucket name"),
        ("s3://bucket:80", "not a bucket name"),
        ("s3://bucket:x", "cannot be read"),
        ("s3://[::1", "cannot be read"),
        ("s3://bucket/\udc8b", "cannot be read"),
        ("s3://bucket/../x", "'..' part"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/a%00b", "control character"),
        ("s3://bucket#frag", "fragment"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "is not an address"),
        ("s3://bucket?endpoint=ftp://host", "is not an address"),
        ("s3://bucket?endpoint=http://", "is not an address"),
        ("s3://bucket?region=a/b", "not a region name"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?md5=1", "always or never"),
        ("file://host/path", "file:///absolute/path"),
        ("file:relative", "file:///absolute/path"),
        ("file:///a%00b", "NUL"),
    ],
)
def test_a_bad_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(StoreRefused, match=words):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hunter2@bucket/p",
        "s3://bucket?secret_access_key=hunter2",
        "s3://bucket?endpoint=http://KEY:hunter2@host",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreRefused) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)
    assert "credentials" in str(caught.value)


@pytest.mark.parametrize("url", ["s3://KEY:hunter2@buck\u2100et", "s3://bucket?endpoint=http://KEY:hunter2@ho\u2100st"])
def test_a_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with pytest.raises(StoreRefused, match="cannot be read") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


async def test_a_file_url_is_a_local_store(tmp_path: Path) -> None:
    store = open_store((tmp_path / "a b").as_uri())
    await store.create("x", b"1")
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    await store.close()


async def test_stores_with_different_prefixes_do_not_meet(s3_url: Callable[..., str]) -> None:
    one, two = open_store(s3_url("conformance", "urls/one")), open_store(s3_url("conformance", "urls/one-more"))
    await one.create("x", b"1")
    await two.create("x", b"2")
    assert (await one.get("x", max_bytes=1)).data == b"1"
    assert [entry.key async for entry in one.list("")] == ["x"]
    await one.close()
    await two.close()


async def test_the_endpoint_may_come_from_the_environment(
    s3_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = parse_s3_url(s3_url("conformance", "urls/env"))
    assert full.endpoint_url is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", full.endpoint_url)
    store = open_store("s3://conformance/urls/env")
    await check_reachable(store)
    await store.create("x", b"1")
    async with store.upload("y") as upload:
        await upload.write(b"2")
        await upload.commit()
    await store.close()


async def test_an_endpoint_in_the_environment_is_checked_too(
    aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "localhost:9000")
    store = open_store("s3://bucket")
    with pytest.raises(StoreRefused, match="'localhost:9000' is not an address"):
        await check_reachable(store)
    await store.close()


def test_a_directory_costs_no_import_of_what_speaks_s3(tmp_path: Path) -> None:
    code = (
        "import sys; from weight_store.opening import open_store; "
        f"open_store('file://{tmp_path}'); print({{'aiobotocore', 'boto3', 'botocore'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
