"""The pages for people: ``/`` shows runs and needs nothing from elsewhere, ``/docs`` describes the API."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from coordinator.description import describe

router = APIRouter(include_in_schema=False)

_FILES = Path(__file__).parent.parent / "web"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def index() -> FileResponse:
    """Return the page."""
    return FileResponse(_FILES / "index.html", media_type="text/html", headers=_HEADERS)


@router.get("/page.js")
async def script() -> FileResponse:
    """Return the page's script."""
    return FileResponse(_FILES / "page.js", media_type="text/javascript", headers=_HEADERS)


@router.get("/page.css")
async def style() -> FileResponse:
    """Return the page's style."""
    return FileResponse(_FILES / "page.css", media_type="text/css", headers=_HEADERS)


_DOCS_HEADERS = {
    # Swagger UI comes from a content delivery network. In a sandbox without an origin it can neither read the token
    # that the page at / keeps nor ask the API for anything.
    "Content-Security-Policy": "sandbox allow-scripts allow-popups",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Return the description of the API for people."""
    page = get_swagger_ui_html(openapi_url="openapi.json", title=request.app.title, oauth2_redirect_url=None)
    return HTMLResponse(page.body, headers=_DOCS_HEADERS)


@router.get("/openapi.json")
async def openapi(request: Request) -> JSONResponse:
    """Return the description of the API for programs. It is the same everywhere, so every page may read it."""
    return JSONResponse(describe(request.app), headers={"Access-Control-Allow-Origin": "*"})
