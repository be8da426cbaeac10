"""Where a bucket is and how both S3 clients are set up to talk to it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from botocore.loaders import create_loader

from weight_store.errors import StoreRefused
from weight_store.s3_errors import Place

MIB = 2**20

shared_loader = functools.cache(create_loader)
"""One parsed copy of botocore's API descriptions a process: parsing takes 0.2 s, more than the rest of a client."""


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket, the key prefix of the store in it, and the server; credentials come from the AWS chain alone.

    ``prefix`` is empty or a key without a trailing ``/``. Without ``endpoint_url`` the AWS settings decide
    (``AWS_ENDPOINT_URL_S3`` included), and at last Amazon's own address. ``content_md5``: whether parts of uploads
    carry one, so that the server refuses what was damaged on its way, at about 1.7 s of CPU a GB outside the GIL; None:
    where the connection is not TLS, which finds that by itself (docs/decisions/0015).
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    content_md5: bool | None = None

    @property
    def sends_md5(self) -> bool:
        """Whether parts of uploads carry a Content-MD5."""
        encrypted = self.server is None or self.server.startswith("https://")
        return not encrypted if self.content_md5 is None else self.content_md5

    @property
    def place(self) -> Place:
        """What error sentences say about it."""
        return Place(self.bucket, self.server or "Amazon S3")

    @property
    def server(self) -> str | None:
        """The endpoint, here or from the environment; ``None`` is Amazon's."""
        return self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None

    def full_key(self, key: str) -> str:
        """Return ``key`` as it is in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def relative_key(self, full_key: str) -> str:
        """Exact inverse of :meth:`full_key`."""
        return full_key[len(self.prefix) + 1 :] if self.prefix else full_key


@dataclass(frozen=True, slots=True)
class S3Options:
    """Sizes and time limits.

    An upload holds ``part_bytes`` while it fills and the store ``upload_workers`` more in flight; S3 allows 10,000
    parts, so 16 MiB reach 156 GiB.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    upload_timeout_s: float = 120.0
    max_connections: int = 32
    part_bytes: int = 16 * MIB
    upload_workers: int = 4


def check_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` if it is an ``http(s)://host[:port]`` address without credentials; ``StoreRefused``."""
    try:
        endpoint.encode()
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        # Not what urlsplit says: it repeats the address, which may hold a secret.
        raise StoreRefused("the store's endpoint cannot be read: it must look like http://host:9000") from None
    if "@" in parts.netloc:
        # Not repeated in the message: it holds a secret.
        raise StoreRefused("the store's endpoint holds credentials: remove them")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise StoreRefused(f"the store's endpoint {endpoint[:200]!r} is not an address such as http://host:9000")
    return endpoint.rstrip("/")


def client_arguments(
    location: S3Location, options: S3Options, config_class: Any, *, read_timeout_s: float, connections: int
) -> dict[str, Any]:
    """Return the keyword arguments of ``create_client``, for boto3's ``Config`` or aiobotocore's ``AioConfig``."""
    custom = location.server is not None
    check_endpoint(location.server or "https://s3.amazonaws.com")
    config = config_class(
        connect_timeout=options.connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=connections,
        # A retry inside the client would meet its own write and call it a conflict: retry.py is the only one.
        retries={"total_max_attempts": 1},
        # Other servers choke on the checksum trailers that AWS clients add by default since 2025.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # AWS's configuration may ask for another one, whose time s3_clock.py would not put right.
        signature_version="s3v4",
        s3={
            "addressing_style": "path" if custom else "auto",
            # Not every server compares it with the body; TLS or Content-MD5, and our own digests, cover it.
            "payload_signing_enabled": False,
        },
    )
    region = location.region
    if region is None and custom:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {"endpoint_url": location.endpoint_url, "region_name": region, "config": config}
