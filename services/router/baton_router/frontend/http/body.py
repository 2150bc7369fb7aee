"""Reading a request's JSON body: bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request

from baton.errors import CancelledError, InvalidRequestError
from baton_router.frontend.http.options import HttpOptions

DRAIN_FACTOR = 4
DRAIN_S = 5.0
"""How much of a body that is refused is read and dropped, in longest bodies, and for how long."""


class ClientGone(CancelledError):
    """The client closed its connection."""

    code = "client_gone"


def check_media(headers: Iterable[tuple[bytes, bytes]], limit: int) -> HTTPException | None:
    """Return why a body is refused by what its headers say: another type, compressed (415), too long (413)."""
    for name, value in headers:
        if name == b"content-type" and value != b"application/json":
            kind = value.decode("latin-1").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                return HTTPException(415, f"the body must be application/json, not {kind!r:.80}")
        elif name == b"content-encoding":
            encoding = value.decode("latin-1").strip().lower()
            if encoding != "identity":
                return HTTPException(415, f"the body must come as it is, not with content-encoding {encoding!r:.80}")
        elif name == b"content-length" and value.isdigit() and int(value) > limit:
            return too_long(limit)
    return None


def too_long(limit: int) -> HTTPException:
    """Return the error for a body that is too long."""
    return HTTPException(413, f"the body must be at most {limit} bytes", headers={"connection": "close"})


def too_late(limit_s: float) -> HTTPException:
    """Return the error for a body that comes too slowly."""
    return HTTPException(408, f"the body did not arrive within {limit_s:g} s")


async def read_json(request: Request, options: HttpOptions) -> Any:
    """Return the decoded body.

    Raises:
        InvalidRequestError: It is not JSON.
        HTTPException: It is too long (413), comes too slowly (408), or says that it is something else or compressed
            (415).
        ClientGone: The client left while sending.
    """
    limit = options.max_body_bytes
    refusal = check_media(request.scope["headers"], limit)
    if refusal is not None and refusal.status_code != 413:
        raise refusal
    data = bytearray()
    more = True
    try:
        async with asyncio.timeout(options.body_timeout_s):
            while more and refusal is None:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed the connection before its request was complete")
                data += message.get("body", b"")
                more = message.get("more_body", False)
                if len(data) > limit:
                    refusal = too_long(limit)
    except TimeoutError as error:
        raise too_late(options.body_timeout_s) from error
    if refusal is not None:
        if more:
            await _drain(request, limit)
        raise refusal
    return decode(bytes(data))


def decode(data: bytes) -> Any:
    """Return a body's JSON value.

    Raises:
        InvalidRequestError: It is not JSON.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error


async def _drain(request: Request, limit: int) -> None:
    """Take and drop what is still coming, within bounds: a client that can't finish sending never reads the answer."""
    left = DRAIN_FACTOR * limit
    try:
        async with asyncio.timeout(DRAIN_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
