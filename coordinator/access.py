"""Who may do what: scopes, one table of routes, and the decision. Pure; the tokens themselves are in tokens.py.

A token holds scopes. ``admin`` may do everything; ``trainer`` and ``rollout`` may do what only they need, and read;
``viewer`` may read. A route that is not in the table is closed to everybody: forgetting one is noticed, not exploited.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from enum import StrEnum

from coordinator.errors import (
    ForeignPage,
    MethodNotAllowed,
    ScopeMissing,
    TokenRequired,
    UnknownRoute,
    WrongHost,
    WrongMediaType,
)


class Scope(StrEnum):
    """What a token is for."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"
    VIEWER = "viewer"
    ADMIN = "admin"


GRANTS: dict[Scope, frozenset[Scope]] = {
    Scope.VIEWER: frozenset({Scope.VIEWER}),
    Scope.ROLLOUT: frozenset({Scope.ROLLOUT, Scope.VIEWER}),
    Scope.TRAINER: frozenset({Scope.TRAINER, Scope.VIEWER}),
    Scope.ADMIN: frozenset(Scope),
}
"""Scope of a token -> what it may be used for."""

OPEN = None
"""Needs no token: says nothing about any run, and supervisors and browsers must get at it without one."""

_RUN = "/v1/runs/{run}"
ROUTES: dict[tuple[str, str], Scope | None] = {
    ("POST", f"{_RUN}/terms"): Scope.TRAINER,
    ("PUT", f"{_RUN}/terms/{{term}}/offers/{{rank}}"): Scope.TRAINER,
    ("GET", f"{_RUN}/terms/{{term}}/layout"): Scope.TRAINER,  # writes the layout if it is the last to ask
    ("POST", f"{_RUN}/versions"): Scope.TRAINER,
    ("PUT", f"{_RUN}/versions/{{version}}/receipts/{{rank}}"): Scope.TRAINER,
    ("PUT", f"{_RUN}/versions/{{version}}/progress/{{rank}}"): Scope.TRAINER,
    ("PUT", f"{_RUN}/versions/{{version}}/withdrawals/{{rank}}"): Scope.TRAINER,
    ("GET", "/v1/runs"): Scope.VIEWER,
    ("GET", _RUN): Scope.VIEWER,
    ("GET", f"{_RUN}/versions"): Scope.VIEWER,
    ("GET", f"{_RUN}/versions/{{version}}"): Scope.VIEWER,
    ("GET", f"{_RUN}/versions/{{version}}/manifest"): Scope.VIEWER,
    ("GET", f"{_RUN}/head"): Scope.VIEWER,
    ("GET", f"{_RUN}/events"): Scope.VIEWER,
    ("PUT", f"{_RUN}/regions/{{region}}/agents/{{agent}}"): Scope.ROLLOUT,
    ("GET", f"{_RUN}/regions"): Scope.VIEWER,
    ("GET", f"{_RUN}/wait"): Scope.VIEWER,
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/"): OPEN,
    ("GET", "/page.js"): OPEN,
    ("GET", "/page.css"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/openapi.json"): OPEN,
}
"""(method, path template) -> the scope it takes."""


def _pattern(template: str) -> re.Pattern[str]:
    literals = [re.escape(part) for part in re.split(r"\{\w+\}", template)]
    return re.compile("[^/]+".join(literals))


_JSON = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE | re.ASCII)
_PATTERNS = {template: _pattern(template) for _, template in ROUTES}


def needed(method: str, path: str) -> Scope | None:
    """The scope that a request takes; ``OPEN`` for none. ``UnknownRoute`` or ``MethodNotAllowed`` beside the table."""
    method = "GET" if method == "HEAD" else method
    templates = [template for template, pattern in _PATTERNS.items() if pattern.fullmatch(path)]
    for template in templates:
        if (method, template) in ROUTES:
            return ROUTES[method, template]
    if templates:
        raise MethodNotAllowed(f"{path[:200]} does not take {method[:20]}: the API is described at /docs")
    raise UnknownRoute(f"there is nothing at {path[:200]}: the API is described at /docs")


def only_reads(method: str, path: str) -> bool:
    """True if a request that :func:`needed` knows changes nothing, here or in the bucket, whoever sends it."""
    return method in {"GET", "HEAD"} and needed(method, path) in {OPEN, Scope.VIEWER}


def allowed(path: str) -> str:
    """The methods that an address takes, as in an ``Allow`` header."""
    templates = {template for template, pattern in _PATTERNS.items() if pattern.fullmatch(path)}
    return ", ".join(sorted(method for method, template in ROUTES if template in templates))


def check(scope: Scope, held: Iterable[Scope] | None) -> None:
    """Return if a token that holds ``held`` (None: no token, or none that we gave out) may be used for ``scope``.

    Raises ``TokenRequired`` or ``ScopeMissing``; the sentence names the scope, never the token.
    """
    if held is None:
        raise TokenRequired(
            f"this takes a token with the scope {scope}, and the request has none that is known here: set "
            "WEIGHTCAST_TOKEN or WEIGHTCAST_TOKEN_FILE (HTTP: 'Authorization: Bearer ...'); "
            f"'weightcast token new --scope {scope}' makes one"
        )
    scopes = sorted(held)
    if not any(scope in GRANTS[one] for one in scopes):
        raise ScopeMissing(f"this takes a token with the scope {scope}; this one has {', '.join(scopes) or 'none'}")


def is_loopback(host: str) -> bool:
    """True if ``host``, a name or address without port, can only be this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_local(host_header: str) -> None:
    """``WrongHost`` unless a request without token names this machine.

    A page from elsewhere can make a browser on this machine ask us (DNS rebinding); it cannot choose the Host header.
    """
    host = host_header.strip()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name):
        raise WrongHost(
            f"this coordinator has no tokens, so it answers only requests to localhost, not to {name[:100]!r}: "
            "start it with --token-file to serve others"
        )


def check_sender(method: str, path: str, *, host: str, origin: str, site: str) -> None:
    """``ForeignPage`` if a browser sends a request that may change something for a page that is not our own.

    ``host``, ``origin``, ``site``: the headers Host, Origin and Sec-Fetch-Site, empty where there is none. A page
    cannot choose them, and what is no browser sends neither of the last two. What only reads may come from anywhere,
    as a link does: a browser shows no page the answers of another origin.
    """
    if only_reads(method, path):
        return
    foreign = bool(origin) and origin.partition("://")[2].lower() != host.strip().lower()
    if foreign or site not in {"", "same-origin", "none"}:
        raise ForeignPage(
            "a page of another origin had a browser send this, and may not: only the coordinator's own page and "
            "programs that send no Origin and no Sec-Fetch-Site change anything here"
        )


def check_media_type(content_type: str) -> None:
    """``WrongMediaType`` unless a body is said to be JSON.

    A page of another origin may make a browser send any other body without asking first whether it may (CORS).
    """
    if not _JSON.fullmatch(content_type.partition(";")[0].strip()):
        raise WrongMediaType(
            f"the body is said to be {content_type[:100]!r}, and this takes JSON: send 'Content-Type: application/json'"
        )
