"""From a store URL to a store: ``s3://bucket/prefix?endpoint=http://host:port&region=name`` or ``file:///path``.

``&md5=always`` or ``never`` says whether parts of uploads carry a Content-MD5; by default they do where the endpoint is
not https. A bucket with a default retention (Object Lock) needs ``always``.

Credentials are never part of a URL, which ends up in logs and process lists; they come from the AWS chain.
What speaks S3 is imported where an ``s3://`` URL is met: importing boto3, aiobotocore and aiohttp takes a second, which
whoever uses a directory should not spend.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from weight_store.errors import ObjectNotFound, PreconditionFailed, StoreRefused
from weight_store.local import LocalStore
from weight_store.object_keys import check_object_key
from weight_store.retry import Retrier, RetryingStore, RetryPolicy, with_retry
from weight_store.store import Moved, Store

if TYPE_CHECKING:
    from weight_store.s3_settings import S3Location, S3Options

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-zA-Z0-9-]{1,64}")
_PROBE = ".weightcast-probe"


def open_store(
    url: str,
    *,
    policy: RetryPolicy | None = None,
    options: S3Options | None = None,
    tell: Callable[[str], None] | None = None,
    moved: Moved | None = None,
) -> RetryingStore:
    """Return the store that ``url`` names, with retries; nothing is contacted yet. ``StoreRefused`` for a bad URL.

    ``policy`` holds for each operation and each part of an upload; ``options`` only matter to S3; ``tell`` hears what
    is retried, as :class:`~weight_store.retry.Retrier` has it; ``moved`` hears how far S3 has taken or given the bodies
    of uploads and of ranged reads.
    """
    policy = policy or RetryPolicy()
    retrier = Retrier(policy) if tell is None else Retrier(policy, tell=tell)
    parts = _split(url)
    if parts.scheme == "s3":
        from weight_store.s3 import S3Store

        return with_retry(S3Store(_s3_location(parts), options, retrier=retrier, moved=moved), retrier)
    return with_retry(LocalStore(_local_path(parts)), retrier)


def parse_s3_url(url: str) -> S3Location:
    """Return the location that an ``s3://`` URL names. ``StoreRefused`` if it is not one."""
    parts = _split(url)
    if parts.scheme != "s3":
        raise StoreRefused(f"{url!r} is not an s3:// URL")
    return _s3_location(parts)


async def check_reachable(store: Store) -> None:
    """Make sure that the bucket exists and may be read; ``StoreRefused`` or ``StoreUnavailable`` says what is wrong."""
    try:
        # A key that is never there: "not found" proves bucket, credentials and permission at once.
        await store.get(f"{_PROBE}/absent", max_bytes=1)
    except ObjectNotFound:
        return
    raise StoreRefused(f"there is an object {_PROBE}/absent in the store: delete it, nothing of ours makes it")


async def check_writable(store: Store, probe_id: str) -> None:
    """Make sure that objects can be created, created only once, and deleted, by doing it under a fresh ``probe_id``.

    ``StoreRefused`` also for a store that ignores ``If-None-Match``. Pass a store without retries to see every fault.
    """
    key = check_object_key(f"{_PROBE}/{probe_id}")
    await store.create(key, b"1")
    try:
        await store.create(key, b"2")
    except PreconditionFailed:
        return
    finally:
        await store.delete(key)
    raise StoreRefused(
        "the store ignores If-None-Match: it let one object be created twice, so two writers could both believe "
        "that they decided; use a store with conditional writes"
    )


def _split(url: str) -> SplitResult:
    try:
        url.encode()
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Not what urlsplit says: it repeats the address, which may hold a secret.
        raise StoreRefused(
            "the store URL cannot be read: it is no UTF-8, or has a port that is no number, an open bracket, or a "
            "character that stands for another one in its address"
        ) from None
    if "@" in parts.netloc:
        # Not repeated in the message: it holds a secret.
        raise StoreRefused(
            "the store URL holds credentials: remove them and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if parts.scheme not in {"s3", "file"}:
        raise StoreRefused(
            f"the store URL {url[:200]!r} begins with neither s3:// nor file://: "
            "use s3://bucket/prefix?endpoint=http://host:port or file:///directory"
        )
    if parts.fragment:
        raise StoreRefused(f"the store URL has a fragment (#{parts.fragment[:50]}): write '#' as %23 or leave it out")
    return parts


def _s3_location(parts: SplitResult) -> S3Location:
    from weight_store.s3_settings import S3Location, check_endpoint

    bucket = parts.netloc
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise StoreRefused(
            f"{bucket[:80]!r} is not a bucket name: the store URL is s3://bucket/prefix, "
            "with 3 to 63 of a-z 0-9 . - in the name"
        )
    settings = _settings(parts.query)
    prefix = unquote(parts.path).strip("/")
    if prefix:
        check_object_key(prefix)
    endpoint = settings.get("endpoint")
    region = settings.get("region")
    if region is not None and not _REGION.fullmatch(region):
        raise StoreRefused(f"{region[:80]!r} is not a region name: correct ?region= in the store URL")
    if settings.get("md5", "always") not in {"always", "never"}:
        raise StoreRefused("md5 in the store URL is always or never; leave it out for the usual")
    content_md5 = settings["md5"] == "always" if "md5" in settings else None
    return S3Location(bucket, prefix, None if endpoint is None else check_endpoint(endpoint), region, content_md5)


def _settings(query: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in {"endpoint", "region", "md5"}:
            # Only the name is shown: the value may be a key that somebody put there.
            raise StoreRefused(
                f"the store URL has a setting {name[:50]!r}; only endpoint, region and md5 are known, "
                "and credentials come from the environment"
            )
        if name in settings:
            raise StoreRefused(f"the store URL sets {name} twice")
        settings[name] = value
    return settings


def _local_path(parts: SplitResult) -> str:
    if parts.netloc not in {"", "localhost"} or parts.query or not parts.path.startswith("/"):
        raise StoreRefused(f"a local store URL is file:///absolute/path, not {parts.geturl()[:200]!r}")
    path = unquote(parts.path)
    if "\0" in path:
        raise StoreRefused("a local store URL cannot hold a NUL")
    if os.path.isfile(path):
        raise StoreRefused(f"the store {path[:200]} is a file: name a directory")
    return path
