"""What a request's head must be like (RFC 9110, RFC 9112), and the answers to those that are not."""

from __future__ import annotations

import re

import httptools
import orjson
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from baton_router.frontend.http.errors import error_object, http_error_code
from baton_router.frontend.http.middleware import Headers, request_id

MAX_TARGET_BYTES = 16 * 1024
"""Of the path and query in a request line."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
_OTHER_VERSION = frozenset({"Invalid HTTP version", "Pause on PRI/Upgrade", "Expected dot"})
"""What the parser says of a request line with a version that it does not know; the second is HTTP/2's preface."""


def check_head(method: bytes, target: bytes, version: str, headers: Headers) -> HTTPException | None:
    """Return why a whole head is refused; ``None``: it is not.

    What cannot be read at all, and bodies with two lengths, the parser has refused before.

    Args:
        method: Of the request line.
        target: Path and query.
        version: ``1.1``.
        headers: Names in lower case.
    """
    if version not in ("1.0", "1.1"):
        return HTTPException(505, f"HTTP/{version} is not spoken here, but HTTP/1.1 and HTTP/1.0")
    if method == b"CONNECT":
        return HTTPException(400, "this is no proxy")
    if len(target) > MAX_TARGET_BYTES:
        return too_long_target()
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return HTTPException(400, f"a request has one Host header, this one has {len(hosts)}")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return HTTPException(400, "the Host header is no host with a port or without")
    for name, value in headers:
        if name == b"transfer-encoding":
            if version == "1.0":
                return HTTPException(400, "HTTP/1.0 has no Transfer-Encoding")
            if value.strip().lower() != b"chunked":
                return HTTPException(501, "the only Transfer-Encoding that is understood here is chunked")
        elif name == b"expect" and version == "1.1" and value.strip().lower() != b"100-continue":
            return HTTPException(417, "the only Expect that can be met is 100-continue")
    return None


def unreadable(error: httptools.HttpParserError) -> HTTPException:
    """Return the answer to what the parser cannot read."""
    reason = str(error)
    if reason in _OTHER_VERSION:
        return HTTPException(505, "the HTTP version is not spoken here, but HTTP/1.1 and HTTP/1.0")
    return HTTPException(400, f"this is no HTTP request: {reason[:1].lower()}{reason[1:]}")


def too_long_target() -> HTTPException:
    """Return the answer to a request line that is too long."""
    return HTTPException(414, f"path and query must be at most {MAX_TARGET_BYTES} bytes")


def refusal(error: HTTPException, default_headers: Headers) -> bytes:
    """Return the whole answer to a request whose head is refused; its connection ends with it."""
    status = error.status_code
    body = orjson.dumps(error_object(status, error.detail, code=http_error_code(status)))
    headers = (
        *default_headers,
        (b"content-type", b"application/json"),
        (b"x-request-id", request_id([]).encode()),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    )
    return b"%b%b\r\n%b" % (STATUS_LINE[status], b"".join([b"%b: %b\r\n" % header for header in headers]), body)
