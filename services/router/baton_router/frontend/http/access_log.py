"""The access log: a line per request that a client made, when its answer is complete or the client has gone."""

from __future__ import annotations

import logging

_lines = logging.getLogger("baton.access")
_lines.setLevel(logging.INFO)  # whatever --log-level is


def log_access(
    *, peer: str, method: str, path: str, status: int | str, seconds: float, request_id: str, account: str
) -> None:
    """Write a line.

    Args:
        peer: The client's address.
        method: HTTP's, or ``grpc``.
        path: The endpoint, with names that clients choose as placeholders; or the call.
        status: HTTP's, or the outcome of the call.
        seconds: First byte in to last byte out.
        request_id: Its id, which is part of what instances call the request.
        account: Whose API key it showed; empty: none.
    """
    fields = {
        "peer": peer,
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "request_id": request_id,
        "account": account,
    }
    text = '%(peer)s "%(method)s %(path)s" %(status)s %(seconds).3f s request %(request_id)s account %(account)s'
    _lines.info(text, fields | {"account": account or "-"}, extra={"fields": fields})
