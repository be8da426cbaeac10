"""Bearer tokens: made here, printed once, and kept only as salted hashes in a file that is read again when it changes.

A token is ``wct_<id>_<secret>``: the id finds its line in the file, the secret is 256 random bits. One round of
SHA-256 is enough for those. Slow hashes (scrypt, Argon2) make guessing expensive where people choose passwords; nobody
guesses 256 bits, and a slow hash would let anybody keep the coordinator busy with wrong tokens. The salt keeps equal
secrets in two files from being recognised.

The file has one JSON object a line, so that revoking is deleting a line, and rotating is adding one, handing its token
out, and deleting the old one. It is meant to be readable by the coordinator and writable by its owner alone.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from coordinator.access import Scope
from coordinator.errors import TokenFileRefused

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
_AGAIN_S = 60.0
_SECRET_BYTES = 32
_TOKEN = re.compile(r"wct_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class StoredToken(BaseModel):
    """One line of the file. ``sha256`` is that of salt and secret; the token cannot be made from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]
    salt: Hex32
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    note: Annotated[str, StringConstraints(max_length=200)] = ""


@dataclass(frozen=True, slots=True)
class Issued:
    """A new token and the line that makes it valid. The token is shown to nobody by accident."""

    token: str = field(repr=False)
    stored: StoredToken


def issue(
    scopes: Iterable[Scope], note: str = "", *, random_bytes: Callable[[int], bytes] = secrets.token_bytes
) -> Issued:
    """Make a token with ``scopes``; ``note`` says to people who has it."""
    token_id, salt = random_bytes(6).hex(), random_bytes(16).hex()
    secret = base64.urlsafe_b64encode(random_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    stored = StoredToken(
        id=token_id, scopes=tuple(sorted(set(scopes))), salt=salt, sha256=_digest(salt, secret), note=note
    )
    return Issued(f"wct_{token_id}_{secret}", stored)


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode("ascii")).hexdigest()


def verify(token: str, known: dict[str, StoredToken]) -> StoredToken | None:
    """Return the line that ``token`` belongs to, or None. The secret is compared in constant time; ids are public."""
    match = _TOKEN.fullmatch(token)
    stored = known.get(match[1]) if match else None
    if match is None or stored is None:
        return None
    return stored if hmac.compare_digest(_digest(stored.salt, match[2]), stored.sha256) else None


def parse_lines(data: bytes, where: str) -> dict[str, StoredToken]:
    """Parse the file; blank lines and lines that begin with ``#`` are skipped. ``TokenFileRefused`` for others."""
    found: dict[str, StoredToken] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        try:
            stored = StoredToken.model_validate_json(line)
        except ValidationError:
            # Not what pydantic says: somebody may have put the token itself there.
            raise TokenFileRefused(
                f"line {number} of {where} is not a token's hash: each line is one that 'weightcast token new' wrote"
            ) from None
        if stored.id in found:
            raise TokenFileRefused(f"line {number} of {where} has the id {stored.id} a second time: delete one")
        found[stored.id] = stored
    return found


class TokenFile:
    """The tokens of a file, read again when it changes. A change that cannot be read leaves the earlier ones valid:
    a slip of an editor must not lock a fleet out. While it lasts the file is read again, and the reason logged, once a
    minute in which somebody shows a token.

    ``clock`` counts seconds from anywhere and only upwards.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._again_s: float | None = None
        self._seen = _fingerprint(path)
        self._known = read(path)
        if not self._known:
            raise TokenFileRefused(f"{path} holds no token: 'weightcast token new --file {path}' makes one")

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r}, tokens={len(self._known)})"

    def held(self, token: str) -> frozenset[Scope] | None:
        """The scopes of a token; None if it is not known (any more)."""
        self._refresh()
        stored = verify(token, self._known)
        return None if stored is None else frozenset(stored.scopes)

    def _refresh(self) -> None:
        seen = _fingerprint(self._path)
        if seen == self._seen and (self._again_s is None or self._clock() < self._again_s):
            return
        self._seen = seen
        try:
            self._known = read(self._path)
        except TokenFileRefused as error:
            self._again_s = self._clock() + _AGAIN_S
            logger.error("the tokens read before stay valid, those deleted since too: %s", error)
        else:
            self._again_s = None
            logger.info("%s was read again: %d tokens", self._path, len(self._known))


def _fingerprint(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # The third changes with the permissions, which may be all that was wrong.
    return found.st_mtime_ns, found.st_size, found.st_ctime_ns, found.st_ino


def read(path: Path) -> dict[str, StoredToken]:
    """Return the tokens of a file by id.

    ``TokenFileRefused`` if it is no regular file, cannot be read, or everybody may write to it.
    """
    try:
        # Not to wait for a writer, if it is a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise TokenFileRefused(
                    f"{path} is no regular file: it is read again when it changes, which no pipe or device can be"
                )
            if mode & stat.S_IWOTH:
                raise TokenFileRefused(f"everybody may write to {path}, and so admit anybody: chmod o-w it")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TokenFileRefused(f"the tokens cannot be read from {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TokenFileRefused(f"{path} has more than {MAX_FILE_BYTES} bytes: it is no file of tokens")
    return parse_lines(data, str(path))


def add(path: Path, stored: StoredToken) -> None:
    """Append a line durably; the file is made if it is not there, for its owner alone. ``TokenFileRefused``."""
    line = stored.model_dump_json().encode() + b"\n"
    try:
        if path.exists():
            read(path)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            file.write(line)  # one write to a file opened for appending: two writers never mix
            os.fsync(file.fileno())
    except OSError as error:
        raise TokenFileRefused(f"the token cannot be written to {path}: {error.strerror}") from None


def write_secret(path: Path, token: str) -> None:
    """Write a token to a new file that only its owner can read. ``TokenFileRefused`` if it exists or cannot be made."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(token.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise TokenFileRefused(f"{path} exists: a token is not written over another; choose a new file") from None
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise TokenFileRefused(f"the token cannot be written to {path}: {error.strerror}") from None
