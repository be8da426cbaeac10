"""What a client shows and whom it trusts: a bearer token and a pinned certificate authority, from the environment.

``WEIGHTCAST_TOKEN`` or ``WEIGHTCAST_TOKEN_FILE`` (read again when the coordinator refuses the token, so that a rotated
one is picked up), and ``WEIGHTCAST_CA``: a PEM file. With it no other authority is trusted, the system's included.
A token never goes into a URL, a log line, an error or a ``repr``.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from coordinator.errors import BadRequest, TokenFileRefused

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,4096}=*")
"""RFC 6750, 2.1: what may follow ``Bearer``; another issuer's tokens (behind a proxy) are as good as ours."""
_MAX_FILE_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the token comes from and which authority to trust; empty: no token, the system's authorities."""

    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    ca: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Credentials:
        """Take them from the variables named above; an empty one counts as unset."""
        values = os.environ if environment is None else environment
        token_file, ca = values.get("WEIGHTCAST_TOKEN_FILE"), values.get("WEIGHTCAST_CA")
        return cls(
            token=values.get("WEIGHTCAST_TOKEN") or None,
            token_file=Path(token_file) if token_file else None,
            ca=Path(ca) if ca else None,
        )

    def overridden(self, *, token_file: Path | None = None, ca: Path | None = None) -> Credentials:
        """These, except for what is given; a given file also replaces a token from the environment."""
        token = None if token_file is not None else self.token
        return Credentials(token, token_file or self.token_file, ca or self.ca)

    def auth(self) -> httpx.Auth | None:
        """What adds the token to requests, or None. ``BadRequest`` or ``TokenFileRefused`` for an unusable one."""
        if self.token is not None:
            return _Bearer(_checked(self.token, "WEIGHTCAST_TOKEN"))
        return None if self.token_file is None else _Bearer(_from_file(self.token_file), self.token_file)

    def verify(self) -> ssl.SSLContext | bool:
        """What TLS trusts, as httpx's ``verify``. ``TokenFileRefused`` for a file that holds no certificate."""
        if self.ca is None:
            return True
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            what = error.strerror or type(error).__name__
            raise TokenFileRefused(f"{self.ca} is no certificate authority in PEM form: {what}") from None


class _Bearer(httpx.Auth):
    """Adds the token. Refused, it looks into the file once more, and asks again if there is another token now."""

    def __init__(self, token: str, file: Path | None = None) -> None:
        self._token = token
        self._file = file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self._token}"
        response = yield request
        if response.status_code != httpx.codes.UNAUTHORIZED or self._file is None:
            return
        shown, self._token = self._token, _from_file(self._file)
        if self._token != shown:
            request.headers["Authorization"] = f"Bearer {self._token}"
            yield request


def _from_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TokenFileRefused(f"the token cannot be read from {path}: {error.strerror}") from None
    return _checked(data.decode("ascii", "replace").strip(), str(path))


def _checked(token: str, where: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise BadRequest(f"{where} holds no token: one line as 'weightcast token new' prints it, without 'Bearer'")
    return token
