"""The OpenAPI description, completed from what holds for every route: its scope, and the problems any may give."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from coordinator import access
from coordinator.errors import (
    BadRequest,
    BodyTooLarge,
    ForeignPage,
    ScopeMissing,
    TokenRequired,
    TooSlow,
    WrongMediaType,
)
from coordinator.problems import responses

_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token that `weightcast token new` made. A coordinator that serves its own machine takes none.",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description; made once, as it never changes."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _complete(operation, access.needed(method.upper(), path), access.only_reads(method.upper(), path))
        components = made["components"]
        components["securitySchemes"] = {"bearer": _BEARER}
        for unused in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(unused, None)
        app.openapi_schema = made
    return app.openapi_schema


def _complete(operation: dict[str, Any], scope: access.Scope | None, only_reads: bool) -> None:
    found = operation["responses"]
    bodies = (BodyTooLarge, WrongMediaType, TooSlow) if "requestBody" in operation else ()
    usual = responses(BadRequest, *bodies)
    if "422" in found and not _is_problem(found["422"]):
        del found["422"]  # FastAPI's own, which nobody is sent here
    if "parameters" not in operation and "requestBody" not in operation:
        usual = {}
    if scope is not access.OPEN:
        usual |= responses(TokenRequired, ScopeMissing, *(() if only_reads else (ForeignPage,)))
        operation["security"] = [{"bearer": []}]
        operation["description"] += f"\n\nTakes a token with the scope `{scope}`."
    for status, response in usual.items():
        known = found.setdefault(str(status), response)
        if known is not response and f"`{BadRequest.code}`" not in known["description"]:
            known["description"] += f"\n\n{response['description']}"


def _is_problem(response: dict[str, Any]) -> bool:
    return list(response.get("content", {})) == ["application/problem+json"]
