"""The way past the web framework for the two endpoints that generate.

Routing, middleware and dependency injection of a framework cost a request several times what it needs of them. These
endpoints need nothing but their path, so they are called straight from the server, with the same front around them and
the same errors; documentation and all other routes stay with FastAPI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError
from baton_router.frontend.http.errors import baton_error_response, http_error_response
from baton_router.frontend.http.http_exchange import Direct

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectApp:
    """An ASGI app that has POST endpoints alone, by their exact path."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = dict(endpoints)

    def serves(self, scope: Scope) -> bool:
        """Whether a request is for one of the endpoints."""
        return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; errors of clients and Baton's own become answers, others are raised."""
        try:
            response = await self._endpoints[scope["path"]](Request(scope, receive, send))
            await response(scope, receive, send)
        except BatonError as error:
            await baton_error_response(error)(scope, receive, send)
        except HTTPException as error:
            await http_error_response(error)(scope, receive, send)


class RouterHttp(FastAPI):
    """The whole HTTP interface: what is direct goes straight to its endpoint, the rest through the framework.

    Attributes:
        send_timeout_s: Seconds that a client may take nothing of what was written for it, before it is cut off.
    """

    def __init__(self, *, send_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.send_timeout_s = send_timeout_s
        self._direct: DirectApp | None = None
        self._front: ASGIApp | None = None
        self.direct: Direct | None = None
        """Serves what comes whole without ASGI, for servers that know of it (see
        ``baton_router.frontend.http.protocol``)."""

    def serve_directly(self, app: DirectApp, front: ASGIApp, direct: Direct) -> None:
        """Take endpoints past the framework.

        Args:
            app: The endpoints.
            front: What surrounds them; calls them in the end.
            direct: The same without ASGI.
        """
        self._direct, self._front, self.direct = app, front, direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if self._direct is not None and self._front is not None and self._direct.serves(scope):
            await self._front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
