"""Errors in the shape that Anthropic's clients know."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.errors import BatonError
from baton_router.frontend.http.errors import answer_to, baton_error_object

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KEPT = ("retry-after", "www-authenticate")


def refusal(error: BatonError | HTTPException) -> Response:
    """Return the response for an error."""
    response = answer_to(error)
    told = orjson.loads(bytes(response.body))["error"]
    headers = {name: response.headers[name] for name in _KEPT if name in response.headers}
    body = orjson.dumps(_shaped(response.status_code, told))
    return Response(body, response.status_code, media_type="application/json", headers=headers)


def error_event(error: BatonError) -> dict[str, Any]:
    """Return the event that ends a stream."""
    return _shaped(error.http_status, baton_error_object(error)["error"])


def _shaped(status: int, told: dict[str, Any]) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    parts = {name: told[name] for name in ("message", "param", "code")}
    return {"type": "error", "error": {"type": kind, **parts}}
