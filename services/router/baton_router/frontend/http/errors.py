"""Responses in JSON, and errors in OpenAI's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, shown

_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    414: "uri_too_long",
    415: "unsupported_media_type",
    417: "expectation_failed",
    426: "upgrade_required",
    431: "headers_too_large",
    501: "not_implemented",
    505: "version_not_supported",
}
_RETRY_LATER = frozenset({429, 503})


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json", headers=dict(headers or {}))


def error_object(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def http_error_code(status: int) -> str:
    """Return the ``code`` of an HTTP error."""
    return _CODES.get(status, "http_error")


def baton_error_object(error: BatonError) -> dict[str, Any]:
    """Return the body for one of Baton's errors."""
    code = "model_not_found" if error.http_status == 404 and error.field == "model" else error.code
    return error_object(error.http_status, error.message, code=code, param=error.field)


def answer_to(error: BatonError | HTTPException) -> Response:
    """Return the response for a Baton error, with Retry-After where a retry makes sense, or for an HTTP error."""
    if isinstance(error, HTTPException):  # no such path, wrong method, too large
        body = error_object(error.status_code, str(error.detail), code=http_error_code(error.status_code))
        return json_response(body, error.status_code, error.headers)
    headers = {}
    if error.http_status in _RETRY_LATER:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(baton_error_object(error), error.http_status, headers)


def install(app: FastAPI, endpoints: Sequence[str]) -> None:
    """Make an app answer HTTP and Baton errors in this format; ``HttpMiddleware`` answers all others.

    Args:
        app: The app.
        endpoints: Methods and paths, which the error for an unknown path lists.
    """

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        message = f"there is no endpoint {shown(scope['path'])}; there are {', '.join(endpoints)}"
        await answer_to(HTTPException(404, message))(scope, receive, send)

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError | HTTPException)
        return answer_to(error)

    app.router.default = nothing
    app.add_exception_handler(BatonError, answer)
    app.add_exception_handler(HTTPException, answer)
