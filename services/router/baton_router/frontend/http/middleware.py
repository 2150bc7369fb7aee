"""What surrounds every request: its id, the API key, metrics, CORS, and the answer to unexpected errors."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError, InternalError, UnauthenticatedError
from baton_router.accounts.accounts import Accounts
from baton_router.frontend.http.errors import baton_error_response
from baton_router.frontend.http.metrics import HttpMetrics
from baton_router.types import Account

log = logging.getLogger(__name__)

_ids = random.Random()
"""Of ids, which are to differ and are no secrets."""
_ID = "baton_request_id"
_ACCOUNT = "baton_account"
_MAX_ID_CHARS = 128
_OPEN_ENDPOINTS = frozenset({"/health", "/readyz", "/metrics", "/version", "/console", "/console/{file}"})
"""What probes, scrapers and browsers on their way to the console call, without a key."""
ENDPOINTS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", *_OPEN_ENDPOINTS}
    | {"/debug/decisions", "/debug/index", "/debug/console"}
)
_WITH_NAME = (
    ("/v1/models/", "/v1/models/{id}"),
    ("/debug/decisions/", "/debug/decisions/{id}"),
    ("/console/", "/console/{file}"),
)


def request_id(scope: MutableMapping[str, Any]) -> str:
    """Return the id of a request."""
    value: str = scope["state"][_ID]
    return value


def name_request(scope: MutableMapping[str, Any]) -> str:
    """Give a request its id, the client's if it can be used, and return it."""
    ident = _request_id(_header(scope, b"x-request-id"))
    scope.setdefault("state", {})[_ID] = ident
    return ident


def set_account(scope: MutableMapping[str, Any], account: Account) -> None:
    """Note whose API key a request showed."""
    scope["state"][_ACCOUNT] = account


def account_of(scope: MutableMapping[str, Any]) -> Account | None:
    """Return whose API key a request showed; ``None``: there are no API keys."""
    account: Account | None = scope["state"].get(_ACCOUNT)
    return account


class AccessCheck:
    """Checks API keys.

    Args:
        accounts: Whose keys requests must show; ``None``: no check.
    """

    def __init__(self, accounts: Accounts | None) -> None:
        self._accounts = accounts

    def refusal(self, scope: MutableMapping[str, Any], endpoint: str) -> BatonError | None:
        """Check whose request it is, and note that in its scope; return why it is not served, if so."""
        if self._accounts is None or endpoint in _OPEN_ENDPOINTS:
            return None
        account = self._accounts.identify(_header(scope, b"authorization"))
        if account is None:
            return UnauthenticatedError("no valid API key: send it as 'Authorization: Bearer KEY'")
        set_account(scope, account)
        return None


def cors_lines(scope: MutableMapping[str, Any], origins: Collection[str]) -> bytes:
    """Return the header lines that let a page of a request's origin read the answer; empty: it may not.

    What Starlette's ``CORSMiddleware`` adds to answers of the other endpoints; it answers preflight requests to all.
    """
    origin = _header(scope, b"origin") if origins else ""
    if not origin or not ("*" in origins or origin in origins):
        return b""
    allowed = "*" if "*" in origins else f"{origin}\r\nvary: Origin"
    return f"access-control-allow-origin: {allowed}\r\naccess-control-expose-headers: *\r\n".encode("latin-1")


class HttpMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, access: AccessCheck, metrics: HttpMetrics) -> None:
        """Wrap an app.

        Args:
            app: The app.
            access: Checks API keys.
            metrics: Where to count.
        """
        self._app = app
        self._metrics = metrics
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        endpoint = _endpoint(scope["path"])
        ident = name_request(scope)
        status = 499  # a client that left before there was an answer
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"].append((b"x-request-id", ident.encode()))
            await send(message)

        self._metrics.begin(endpoint)
        try:
            error = self._access.refusal(scope, endpoint)
            if error is not None:
                await baton_error_response(error)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception:
            # It ends here: the server would close the connection on it, under the next request of a client that has
            # a whole answer and was promised that the connection stays. (One cut short it closes anyway.)
            log.exception("request %s to %s failed", ident, endpoint)
            if not started:
                failure = InternalError("something went wrong inside Baton")
                await baton_error_response(failure)(scope, receive, send_with_id)
            status = 500
        finally:
            self._metrics.end(endpoint, status, time.perf_counter() - begun)


def _header(scope: MutableMapping[str, Any], name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def _request_id(given: str) -> str:
    """Return the client's id if it is one that logs and headers can bear, else a new one."""
    usable = 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable() and " " not in given
    return given if usable else _ids.getrandbits(128).to_bytes(16).hex()


def _endpoint(path: str) -> str:
    """Return a path's name in the metrics; clients choose paths, so unknown ones share one."""
    if path in ENDPOINTS:
        return path
    return next((name for prefix, name in _WITH_NAME if path.startswith(prefix)), "other")
