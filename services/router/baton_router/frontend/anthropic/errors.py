"""Errors in Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.errors import BatonError
from baton_router.frontend.http.errors import answer_to, baton_error_object, json_response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_THREAD_DETAILS: Mapping[str, dict[str, Any]] = {
    "thread.previous_message_id": {"error_code": "thread_not_found"},
    "thread.type": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""What Anthropic's SDKs read of an error with a thread: they send all of the conversation then."""
_KEPT = ("retry-after", "www-authenticate")


def refusal(error: BatonError | HTTPException) -> Response:
    """Return the response for an error."""
    response = answer_to(error)
    fields = orjson.loads(bytes(response.body))["error"]
    headers = {name: response.headers[name] for name in _KEPT if name in response.headers}
    return json_response(_shaped(response.status_code, fields), response.status_code, headers)


def error_event(error: BatonError) -> dict[str, Any]:
    """Return the event that ends a stream."""
    return _shaped(error.http_status, baton_error_object(error)["error"])


def _shaped(status: int, fields: dict[str, Any]) -> dict[str, Any]:
    details = {"details": _THREAD_DETAILS[fields["param"]]} if fields["param"] in _THREAD_DETAILS else {}
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    parts = {name: fields[name] for name in ("message", "param", "code")}
    return {"type": "error", "error": {"type": kind, **parts, **details}}
