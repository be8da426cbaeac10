"""What only plain S3 requests can show: unconditional writes, wrong checksums, the server's clock."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from weight_store.finishing import in_thread
from weight_store.s3_clock import SigningClock
from weight_store.s3_errors import translated
from weight_store.s3_settings import S3Location, S3Options, client_arguments

_BODY = b"weightcast doctor"


@dataclass(frozen=True, slots=True)
class PlainSeen:
    """Whether bodies with wrong checksums were refused, and the store's clock less this machine's (seconds)."""

    checks_md5: bool
    checks_crc32: bool
    skew_s: float | None


async def observe_plain(
    location: S3Location, options: S3Options, place: str, *, clock: Callable[[], float] = time.time
) -> PlainSeen:
    """Write below ``place`` without conditions. Raises ``StoreRefused`` or ``StoreUnavailable`` if not even that works.

    ``clock`` returns Unix seconds.
    """
    return await in_thread(_observe, location, options, place, clock)


def _observe(location: S3Location, options: S3Options, place: str, clock: Callable[[], float]) -> PlainSeen:
    arguments = client_arguments(location, options, Config, read_timeout_s=options.read_timeout_s, connections=1)
    client = boto3.Session(botocore_session=botocore.session.get_session()).client("s3", **arguments)
    signing = SigningClock(location.place)
    signing.watch(client)
    address = {"Bucket": location.bucket, "Key": location.full_key(f"{place}/plain")}
    try:
        with translated(location.place, f"{place}/plain"):
            try:
                client.put_object(**address, Body=_BODY)
            except ClientError:
                if not signing.skew_s:
                    raise
            sent_s = clock()
            answer = client.put_object(**address, Body=_BODY)
            skew_s = _skew(answer, (sent_s + clock()) / 2)
        wrong_md5 = base64.b64encode(hashlib.md5(b"something else", usedforsecurity=False).digest()).decode()
        return PlainSeen(
            checks_md5=_refuses(client, **address, ContentMD5=wrong_md5),
            checks_crc32=_refuses(client, **address, ChecksumCRC32="AAAAAA=="),
            skew_s=skew_s,
        )
    finally:
        client.close()


def _refuses(client: Any, **request: str) -> bool:
    try:
        client.put_object(Body=_BODY, **request)
    except ClientError:
        return True
    return False


def _skew(answer: Any, local_s: float) -> float | None:
    """``Date`` has whole seconds, cut off, so that it is half a second early on average."""
    try:
        found = email.utils.parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, TypeError, ValueError):
        return None
    return found.timestamp() + 0.5 - local_s
