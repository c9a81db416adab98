"""The page at / and the reference at /docs: files of this package, nothing from elsewhere."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import Response

from paged_backend.server.wire.errors import ApiError

router = APIRouter(include_in_schema=False)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def index() -> Response:
    """Chat, and the engine at work."""
    return _file("index.html")


@router.get("/docs")
async def docs() -> Response:
    """The routes and their fields."""
    return _file("docs.html")


@router.get("/page/{name}")
async def asset(name: str) -> Response:
    """What the two pages consist of."""
    return _file(name)


def _file(name: str) -> Response:
    folder = resources.files("paged_backend.server") / "page"
    known = {entry.name for entry in folder.iterdir()}
    if name not in known or name.rpartition(".")[2] not in _TYPES:
        raise ApiError(404, f"there is no page file {name[:100]!r}", code="unknown_url")
    text = (folder / name).read_text("utf-8")
    return Response(text, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)
