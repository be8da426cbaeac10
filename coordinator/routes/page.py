"""The page for people at ``/``: static files, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

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
