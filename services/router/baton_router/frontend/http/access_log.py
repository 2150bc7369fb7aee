"""The access log: a line per request, when its answer is complete or its client has gone."""

from __future__ import annotations

import logging

_lines = logging.getLogger("baton.access")
_lines.setLevel(logging.INFO)  # whatever --log-level is


def log_access(
    *, peer: str, method: str, path: str, status: int | str, seconds: float, request_id: str, account: str
) -> None:
    """Write the line of a request.

    Args:
        peer: Address of the client.
        method: HTTP method, or ``grpc``.
        path: Endpoint, with placeholders for names that clients choose; or name of the gRPC method.
        status: HTTP status, or outcome of the call.
        seconds: Time from the first byte in to the last byte out, in seconds.
        request_id: Identifier of the request, which is part of the identifier that instances get.
        account: Name of the account; empty without API key.
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
