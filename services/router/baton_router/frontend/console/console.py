"""``/console``: a page that watches the deployment. Files alone, the same for everybody; the data are in ``/debug``.

The page is open like ``/health``: a browser cannot send an API key when it opens a page. It holds nothing worth a
key, and asks for one if its data want one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE = "console.html"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


class ConsoleFiles:
    """Serves the page and what belongs to it, from memory."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for item in resources.files("baton_router.frontend.console").joinpath("static").iterdir():
            media_type = _TYPES.get(item.name[item.name.rfind(".") :])
            if media_type is not None:
                content = item.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                self._files[item.name] = _File(content, media_type, etag)

    async def page(self, request: Request) -> Response:
        """Serve ``GET /console``."""
        return self._serve(request, _PAGE)

    async def file(self, request: Request) -> Response:
        """Serve ``GET /console/{name}``."""
        return self._serve(request, request.path_params["name"])

    def _serve(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404, "the console has no such file")
        headers = {**_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)
