"""What headers say of a request: whose it is, and how urgent; they go before the fields of the body."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

from msgspec.structs import replace

from baton.errors import InvalidRequestError, shown
from baton_router.frontend.http.middleware import account_of
from baton_router.processor.text_request import TextRequest
from baton_router.types import Order

SESSION_HEADER = b"x-baton-session"
"""Names the conversation, for the policy ``session``; goes before the field ``session_id``."""
TTFT_HEADER = b"x-baton-ttft-ms"
ITL_HEADER = b"x-baton-itl-ms"
PRIORITY_HEADER = b"x-baton-priority"
ORDER_HEADER = b"x-baton-order"
TRACE_HEADER = b"traceparent"
"""The caller's span, in W3C Trace Context; one that cannot be read is ignored, as the standard says."""
_HEADERS = frozenset((SESSION_HEADER, TTFT_HEADER, ITL_HEADER, PRIORITY_HEADER, ORDER_HEADER, TRACE_HEADER))


def with_headers(scope: MutableMapping[str, Any], items: list[TextRequest]) -> list[TextRequest]:
    """Return the generations of an HTTP request with what its headers say.

    Raises:
        InvalidRequestError: A header is wrong; names it.
    """
    changes: dict[str, Any] = {}
    for name, value in scope["headers"]:
        if name in _HEADERS:
            _read(name, value.decode("latin-1").strip(), changes)
    account = account_of(scope)
    if account is not None:
        return [replace(item, account=account, cache_salt=account.salt(item.cache_salt), **changes) for item in items]
    return [replace(item, **changes) for item in items] if changes else items


def _read(name: bytes, value: str, changes: dict[str, Any]) -> None:
    if not value:
        return
    if name == SESSION_HEADER:
        changes["session"] = value
    elif name == TRACE_HEADER:
        changes["traceparent"] = value
    elif name == TTFT_HEADER:
        changes["ttft_ms"] = _milliseconds(name, value)
    elif name == ITL_HEADER:
        changes["itl_ms"] = _milliseconds(name, value)
    elif name == ORDER_HEADER:
        if value not in list(Order):
            message = f"{name.decode()} must be {' or '.join(Order)}, got {shown(value)}"
            raise InvalidRequestError(message, field=name.decode())
        changes["order"] = Order(value)
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
