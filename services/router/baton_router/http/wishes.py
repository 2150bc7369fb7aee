"""What headers say of a request's urgency and belonging; they go before the fields of the body."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from baton.errors import InvalidRequestError, shown
from baton_router.text_request import TextRequest

SESSION_HEADER = b"x-baton-session"
"""Names the conversation, for the policy ``session``; goes before the field ``session_id``."""
TTFT_HEADER = b"x-baton-ttft-ms"
ITL_HEADER = b"x-baton-itl-ms"
PRIORITY_HEADER = b"x-baton-priority"
_CLIENT = "baton_client"


def set_client(scope: MutableMapping[str, Any], name: str) -> None:
    """Note whose API key a request showed."""
    scope["state"][_CLIENT] = name


def with_headers(request: Request, items: list[TextRequest]) -> list[TextRequest]:
    """Return the generations of an HTTP request with what its headers say.

    Raises:
        InvalidRequestError: A header is wrong; names it.
    """
    changes: dict[str, Any] = {}
    for name, value in request.scope["headers"]:
        if name.startswith(b"x-baton-"):
            _read(name, value.decode("latin-1").strip(), changes)
    client = request.scope["state"].get(_CLIENT)
    if client:
        changes["client"] = client
    return [replace(item, **changes) for item in items] if changes else items


def _read(name: bytes, value: str, changes: dict[str, Any]) -> None:
    if not value:
        return
    if name == SESSION_HEADER:
        changes["session"] = value
    elif name == TTFT_HEADER:
        changes["ttft_ms"] = _milliseconds(name, value)
    elif name == ITL_HEADER:
        changes["itl_ms"] = _milliseconds(name, value)
    elif name == PRIORITY_HEADER:
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 11):
            raise InvalidRequestError(f"{name.decode()} must be an integer, got {shown(value)}", field=name.decode())
        changes["priority"] = int(value)


def _milliseconds(name: bytes, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequestError(f"{name.decode()} must be a number above 0, got {shown(value)}", field=name.decode())
    return number
