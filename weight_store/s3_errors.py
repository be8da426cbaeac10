"""What an S3 server's answer, or its silence, means to the caller: one table, used by both S3 clients.

Every sentence says what to do. None repeats a secret; the server's own text is only shown where it cannot hold
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from botocore import exceptions as botocore_errors
from botocore.parsers import ResponseParserError

from weight_store.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreThrottled,
    StoreUnavailable,
    UploadLost,
)

CLIENT_ERRORS: tuple[type[Exception], ...] = (
    botocore_errors.BotoCoreError,
    botocore_errors.ClientError,
    ResponseParserError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    OSError,
)
"""Everything that boto3 and aiobotocore raise for a request that was sent or could not be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request went, for sentences: bucket name and endpoint address."""

    bucket: str
    endpoint: str


_NOT_FOUND = {"NoSuchKey", "404", "NotFound"}
# AWS answers 409 while another conditional write of the key is in flight; all it means is "read back".
_PRECONDITION = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_THROTTLED = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
    "429",
    "503",
}
# Answered with a 4xx although the next attempt may well succeed.
_TRANSIENT = {
    "RequestTimeout": "the request body arrived too slowly",
    "IncompleteBody": "the request body was cut short on its way",
    "BadDigest": "the request body was damaged on its way",
    "OperationAborted": "a conflicting operation on it is in progress",
    "RequestTimeTooSkewed": (
        "this machine's clock and the store's differ too much: synchronise the clock (NTP), "
        "and see that requests do not wait 15 minutes"
    ),
}
_LOST = {
    "NoSuchUpload": "its multipart upload is unknown: it was completed before, aborted, or expired",
    "InvalidPart": "the store has lost a part of its multipart upload",
    "InvalidPartOrder": "the store has mixed up the parts of its multipart upload",
}
_REFUSED = {
    "NoSuchBucket": "bucket {bucket!r} does not exist at {endpoint}: create it, or correct the store URL",
    "InvalidBucketName": "{bucket!r} is not a valid bucket name: correct the store URL",
    "InvalidAccessKeyId": (
        "{endpoint} does not know this access key: check AWS_ACCESS_KEY_ID or the profile, and the endpoint"
    ),
    "SignatureDoesNotMatch": (
        "{endpoint} says that the secret key does not belong to the access key: check AWS_SECRET_ACCESS_KEY"
    ),
    "AccessDenied": (
        "access to bucket {bucket!r} at {endpoint} is denied: the credentials need s3:GetObject, s3:PutObject and "
        "s3:ListBucket on it (without the last, S3 hides which objects are missing)"
    ),
    "ExpiredToken": "the session token has expired: renew the credentials (AWS_SESSION_TOKEN)",
    "InvalidToken": "the session token is not valid: renew the credentials (AWS_SESSION_TOKEN)",
    "PermanentRedirect": "bucket {bucket!r} lies in another region: set ?region= in the store URL",
    "AuthorizationHeaderMalformed": "{endpoint} expects another region: set ?region= in the store URL",
    "NotImplemented": (
        "{endpoint} does not implement conditional writes (If-None-Match, If-Match), which weightcast needs: "
        "use another store"
    ),
    "EntityTooLarge": "the object is larger than {endpoint} accepts in one request: use a smaller part size",
    "QuotaExceeded": "the quota of bucket {bucket!r} is used up: raise it, or collect garbage",
}
_SAME_AS = {
    "AllAccessDisabled": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "Forbidden": "AccessDenied",
    "403": "AccessDenied",
    "UnauthorizedAccess": "AccessDenied",
    "InvalidClientTokenId": "InvalidAccessKeyId",
    "TokenRefreshRequired": "ExpiredToken",
    "301": "PermanentRedirect",
    "307": "PermanentRedirect",
    "IllegalLocationConstraintException": "PermanentRedirect",
    "501": "NotImplemented",
    "XMinioStorageFull": "QuotaExceeded",
}


def classify(error: Exception, place: Place, key: str) -> StoreError:
    """Return the port's error for an exception of ``CLIENT_ERRORS`` raised while handling ``key``. Pure."""
    if isinstance(error, botocore_errors.ClientError):
        return _classify_answer(error.response, place, key)
    if isinstance(error, (botocore_errors.NoCredentialsError, botocore_errors.PartialCredentialsError)):
        return StoreRefused(
            f"no complete credentials for {place.endpoint}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "a profile (AWS_PROFILE) or a role",
            key=key,
        )
    if isinstance(error, botocore_errors.NoRegionError):
        return StoreRefused("no region is set: add ?region= to the store URL or set AWS_DEFAULT_REGION", key=key)
    if isinstance(error, botocore_errors.SSLError) and "certificate" in str(error).lower():
        return StoreRefused(
            f"the TLS certificate of {place.endpoint} is not trusted: name its authority in AWS_CA_BUNDLE",
            key=key,
        )
    if isinstance(error, (TimeoutError, botocore_errors.ReadTimeoutError)):
        return StoreUnavailable(f"{place.endpoint} did not answer in time ({_shown(key)})", key=key)
    if isinstance(error, (botocore_errors.EndpointConnectionError, botocore_errors.ConnectTimeoutError)):
        return StoreUnavailable(
            f"{place.endpoint} cannot be reached: check that the store runs, its address, and the network",
            key=key,
        )
    if isinstance(error, _TRANSPORT):
        return StoreUnavailable(
            f"the connection to {place.endpoint} broke ({_shown(key)}: {type(error).__name__})", key=key
        )
    # What is left of botocore's tree is found before anything is sent: settings and parameters.
    return StoreRefused(f"the request for {_shown(key)} could not be made: {str(error)[:200]}", key=key)


_TRANSPORT = (
    botocore_errors.HTTPClientError,
    botocore_errors.ConnectionError,
    botocore_errors.ResponseStreamingError,
    botocore_errors.IncompleteReadError,
    botocore_errors.ChecksumError,
    botocore_errors.CredentialRetrievalError,
    # Not XML: half an answer, or a proxy's page.
    ResponseParserError,
    aiohttp.ClientError,
    OSError,
)


def _classify_answer(response: Mapping[str, Any], place: Place, key: str) -> StoreError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = _SAME_AS.get(code, code)
    shown = _shown(key)
    if code in _REFUSED:
        return StoreRefused(_REFUSED[code].format(bucket=place.bucket, endpoint=place.endpoint), key=key)
    if code in _TRANSIENT:
        return StoreUnavailable(f"{shown}: {_TRANSIENT[code]} ({code} from {place.endpoint})", key=key)
    if code in _LOST:
        return UploadLost(f"{shown}: {_LOST[code]} ({code} from {place.endpoint})", key=key)
    if code in _NOT_FOUND:
        return ObjectNotFound(f"no {shown} in bucket {place.bucket!r} at {place.endpoint}", key=key)
    if code in _PRECONDITION or status == 412:
        return PreconditionFailed(f"{shown} exists already, changed, or is being written ({code})", key=key)
    if code in _THROTTLED or status in {429, 503}:
        return StoreThrottled(f"{place.endpoint} asks for fewer requests ({code}, {shown})", key=key)
    if status >= 500 or status == 0 or code == "InternalError":
        return StoreUnavailable(f"{place.endpoint} failed with {code or status} ({shown})", key=key)
    if status == 409:
        return PreconditionFailed(f"{shown} is being written by somebody else ({code})", key=key)
    message = str(response.get("Error", {}).get("Message", ""))[:200]
    return StoreRefused(f"{place.endpoint} refuses {shown}: {code or status}: {message}", key=key)


@contextmanager
def translated(place: Place, key: str) -> Iterator[None]:
    """Turn the clients' exceptions into the port's; the original stays as the cause."""
    try:
        yield
    except CLIENT_ERRORS as error:
        raise classify(error, place, key) from error
    except (ValueError, KeyError) as error:
        # The clients read numbers, times and fields of an answer as if they could not be wrong.
        raise StoreUnavailable(
            f"{place.endpoint} gave an answer that is none of S3's ({_shown(key)}: {type(error).__name__})", key=key
        ) from error


def _shown(key: str) -> str:
    return f"object {key}" if key else "the bucket"
