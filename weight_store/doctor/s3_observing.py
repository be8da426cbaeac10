"""What only plain S3 requests can show: unconditional writes, wrong checksums, the server's clock."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from weight_store.errors import StoreUnavailable
from weight_store.finishing import in_thread
from weight_store.retry import Retrier, RetryPolicy
from weight_store.s3_clock import SigningClock
from weight_store.s3_errors import Place, classify, translated
from weight_store.s3_settings import S3Location, S3Options, client_arguments

_BODY = b"weightcast doctor"


@dataclass(frozen=True, slots=True)
class PlainSeen:
    """Whether bodies with wrong checksums were refused (None: right ones are, too), and the store's clock less this
    machine's (seconds).
    """

    checks_md5: bool | None
    checks_crc32: bool | None
    skew_s: float | None


async def observe_plain(
    location: S3Location,
    options: S3Options,
    place: str,
    *,
    policy: RetryPolicy,
    clock: Callable[[], float] = time.time,
) -> PlainSeen:
    """Write below ``place`` without conditions. Raises ``StoreRefused`` or ``StoreUnavailable`` if not even that works.

    ``clock`` returns Unix seconds.
    """
    return await Retrier(policy).call(lambda: in_thread(_observe, location, options, place, clock))


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
            return PlainSeen(
                checks_md5=_checks(client, location.place, address, "ContentMD5", _md5),
                checks_crc32=_checks(client, location.place, address, "ChecksumCRC32", _crc32),
                skew_s=skew_s,
            )
    finally:
        client.close()


def _checks(
    client: Any, place: Place, address: dict[str, str], name: str, checksum: Callable[[bytes], str]
) -> bool | None:
    """Whether a body is refused for a wrong checksum; None if it is for a right one too."""

    def takes(value: str) -> bool:
        try:
            client.put_object(**address, Body=_BODY, **{name: value})
        except ClientError as error:
            digest = error.response.get("Error", {}).get("Code") == "BadDigest"
            # One that a loaded store turns away was not looked at.
            if not digest and isinstance(classify(error, place, address["Key"]), StoreUnavailable):
                raise
            return False
        return True

    return not takes(checksum(b"something else")) if takes(checksum(_BODY)) else None


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _skew(answer: Any, local_s: float) -> float | None:
    """``Date`` has whole seconds, cut off, so that it is half a second early on average."""
    try:
        found = email.utils.parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, TypeError, ValueError):
        return None
    return found.timestamp() + 0.5 - local_s
