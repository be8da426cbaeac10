"""Signs requests by the server's clock where this machine's is wrong.

S3 refuses a signature whose time differs by more than 15 minutes, and tells its own time with the refusal. AWS's SDKs
for other languages correct the difference from then on; botocore does not.
"""

from __future__ import annotations

import datetime
import email.utils
import logging
from collections.abc import Mapping
from typing import Any

from botocore.auth import AUTH_TYPE_MAPS, SIGV4_TIMESTAMP, S3SigV4Auth

from weight_store.s3_errors import Place
from weight_store.skew import TOLERATED_S, correction_s

_log = logging.getLogger(__name__)

_SIGNER = "weightcast-s3v4"
_SKEW = "weightcast-skew"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class _SkewedAuth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """S3's signature, with the request's time put right."""

    def _modify_request_before_signing(self, request: Any) -> None:
        skew_s = request.context.get(_SKEW, 0.0)
        if skew_s:
            now = _now() + datetime.timedelta(seconds=skew_s)
            request.context["timestamp"] = now.strftime(SIGV4_TIMESTAMP)
        super()._modify_request_before_signing(request)


# Under a name of its own: what others in this process sign is none of our business.
AUTH_TYPE_MAPS[_SIGNER] = _SkewedAuth


class SigningClock:
    """How far the server's clock is from this machine's (seconds), learnt when it refuses a signature for its time.

    Never more than a day. The refused request fails and is repeated like any other.
    """

    def __init__(self, place: Place) -> None:
        self.skew_s = 0.0
        self._doubted = False
        self._place = place

    def watch(self, client: Any) -> None:
        """Have ``client``, of boto3 or aiobotocore, sign by this clock and tell it of refusals."""
        events = client.meta.events
        events.register("choose-signer.s3", self._choose)
        events.register("before-sign.s3", self._prepare)
        events.register("after-call.s3", self._learn)

    def _choose(self, signature_version: Any, **_: Any) -> str | None:
        return _SIGNER if self.skew_s and signature_version == "s3v4" else None

    def _prepare(self, request: Any, **_: Any) -> None:
        request.context[_SKEW] = self.skew_s

    def _learn(self, http_response: Any, parsed: Mapping[str, Any], **_: Any) -> None:
        if parsed.get("Error", {}).get("Code") != "RequestTimeTooSkewed":
            return
        try:
            told = email.utils.parsedate_to_datetime(str(http_response.headers.get("date")))
            skew_s = correction_s((told - _now()).total_seconds())
        except (TypeError, ValueError, OverflowError):
            return  # no date, or none with a time zone: the error's own sentence has to do
        if skew_s is None:
            self._doubt(told)
            return
        if abs(skew_s - self.skew_s) > TOLERATED_S:
            _log.warning(
                "the clock of %s is %.0f s %s this machine's: requests are signed with its time from now on; "
                "synchronise this machine's clock (NTP)",
                self._place.endpoint,
                abs(skew_s),
                "ahead of" if skew_s > 0 else "behind",
            )
        self.skew_s = skew_s

    def _doubt(self, told: datetime.datetime) -> None:
        if not self._doubted:  # once, not for each of the requests that go on being refused
            _log.error(
                "%s says that it is %s, more than a day from this machine's time, and is not believed: "
                "set the clock that is wrong",
                self._place.endpoint,
                told.isoformat(),
            )
        self._doubted = True
