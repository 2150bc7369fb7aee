"""Reading a request's JSON body: bounded in size and time."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request

from baton.errors import InvalidRequestError
from baton.token_ids import find_ids
from baton_router.frontend.http.disconnect import ClientGone
from baton_router.frontend.http.options import HttpOptions

_PROMPT = b'"prompt"'
_IDS = re.compile(rb"\s*:\s*\[\s*[0-9]")
_DRAIN_FACTOR = 4
_DRAIN_S = 5.0


async def read_json(request: Request, options: HttpOptions) -> Any:
    """Return the decoded body.

    Raises:
        InvalidRequestError: It is not JSON.
        HTTPException: It is too long (413), comes too slowly (408), or says that it is something else or compressed
            (415).
        ClientGone: The client left while sending.
    """
    headers = {name: value.decode("latin-1") for name, value in request.scope["headers"]}
    kind = headers.get(b"content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(415, f"the body must be application/json, not {kind!r:.80}")
    encoding = headers.get(b"content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPException(415, f"the body must come as it is, not with content-encoding {encoding!r:.80}")
    limit = options.max_body_bytes
    length = headers.get(b"content-length", "")
    too_long = length.isdigit() and int(length) > limit
    data = bytearray()
    more = True
    try:
        async with asyncio.timeout(options.body_timeout_s):
            while more and not too_long:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed the connection before its request was complete")
                data += message.get("body", b"")
                too_long = len(data) > limit
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {options.body_timeout_s:g} s") from error
    if too_long:
        if more:
            await _drain(request, limit)
        raise HTTPException(413, f"the body must be at most {limit} bytes", headers={"connection": "close"})
    return decode(bytes(data))


def decode(data: bytes) -> Any:
    """Return a body's JSON value. A prompt of token ids comes as an array (see ``baton.token_ids``).

    Raises:
        InvalidRequestError: It is not JSON.
    """
    at = data.find(_PROMPT)
    found = find_ids(data, b"prompt") if at >= 0 and _IDS.match(data, at + len(_PROMPT)) is not None else None
    try:
        value = orjson.loads(data if found is None else found[1])
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if found is not None:
        value["prompt"] = found[0]
    return value


async def _drain(request: Request, limit: int) -> None:
    """Take and drop what is still coming, within bounds: a client that can't finish sending never reads the answer."""
    left = _DRAIN_FACTOR * limit
    try:
        async with asyncio.timeout(_DRAIN_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
