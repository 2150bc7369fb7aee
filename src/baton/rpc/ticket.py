"""Placement tickets: permission to run one request on one decode instance, once, soon, without a router in between.

A router signs, the decode instance verifies; both read the key from a file. A ticket names the instance and its
process, the digest of the request, its expiry and a nonce. So a copied ticket is useless: it is not valid for another
request, another instance, a second time or later, nor for the next process of the instance, which has not seen the
nonces of the one before.

A client sends its ticket in the head of the call, as ``authorization: Ticket BASE64``, so that it is checked before the
request is read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.api.v1 import worker_pb2
from baton.config.secrets import read_secret_file, require_unguessable
from baton.errors import PermissionDeniedError

SCHEME = "Ticket "
_NONCE_BYTES = 16
_TAG_BYTES = 8
_MAX_HEADER_CHARS = 4096
_MAX_NONCES = 1_000_000
_LONGEST_S = 3600.0


def read_ticket_key(path: str) -> bytes | None:
    """Read the key that routers and decode instances share; ``None`` for an empty path.

    Raises:
        ConfigError: The file cannot be read or is open to others, or the key can be guessed.
    """
    if not path:
        return None
    key = read_secret_file(path, "the ticket key", "ticket_key_file").strip()
    require_unguessable(key, f"the ticket key in {path}", "ticket_key_file")
    return key


def request_digest(request: worker_pb2.GenerateRequest) -> bytes:
    """Return the SHA-256 of a request without its ticket and its trace context."""
    return hashlib.sha256(_bare(request)).digest()


@dataclass(frozen=True, slots=True)
class Bearer:
    """The decode instance that a ticket is for."""

    instance_id: str
    epoch: bytes
    address: str = ""


def sign(
    key: bytes,
    request: worker_pb2.GenerateRequest,
    bearer: Bearer,
    *,
    life_s: float,
    tenant: str | None = None,
    now: Callable[[], float] = time.time,
) -> bytes:
    """Put a ticket for ``bearer`` into a request that is otherwise complete; returns the ticket's nonce."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    bare = _bare(request)
    body = worker_pb2.TicketBody(
        instance_id=bearer.instance_id,
        epoch=bearer.epoch,
        address=bearer.address,
        request_digest=hashlib.sha256(bare).digest(),
        request_bytes=len(bare),
        tenant_tag=b"" if tenant is None else _mac(key, b"tenant " + tenant.encode())[:_TAG_BYTES],
        expires_ms=int(1000 * (now() + life_s)),
        nonce=nonce,
    ).SerializeToString()
    request.ticket.body = body
    request.ticket.mac = _mac(key, body)
    return nonce


def ticket_header(ticket: worker_pb2.PlacementTicket) -> str:
    """Return the ``authorization`` of the call that a ticket is for."""
    return SCHEME + base64.b64encode(ticket.SerializeToString()).decode()


class TicketCheck:
    """Verifies the tickets of one decode instance.

    Args:
        key: Key shared with the routers.
        bearer: The decode instance that verifies.
        now: Clock that returns the Unix time in seconds.
    """

    def __init__(self, key: bytes, bearer: Bearer, now: Callable[[], float] = time.time) -> None:
        self._key = key
        self._bearer = bearer
        self._now = now
        self._used: dict[bytes, float] = {}

    def admit(self, header: str | bytes | None) -> None:
        """Check the ticket in the head of a call, and mark it as used: it lets one request be read.

        Args:
            header: The call's ``authorization``; ``None``: it has none.

        Raises:
            PermissionDeniedError: The ticket is missing, forged, expired, used before, or for another instance.
        """
        body = self.read(header)
        now = self._now()
        if body.instance_id != self._bearer.instance_id or body.epoch != self._bearer.epoch:
            raise _denied(f"the ticket is for another instance or process than {self._bearer.instance_id}")
        ends_at = body.expires_ms / 1000
        if ends_at <= now:
            raise _denied(f"the ticket expired {now - ends_at:.1f} s ago")
        if ends_at > now + _LONGEST_S or len(body.nonce) != _NONCE_BYTES:
            raise _denied("the ticket is none that a router makes")
        if body.nonce in self._used:
            raise _denied("the ticket was used before")
        self._mark_used(body.nonce, ends_at, now)

    def require(self, header: str | bytes | None, digest: bytes) -> None:
        """Check that a request is the one that the ticket in its call's head is for.

        Args:
            header: The call's ``authorization``.
            digest: The request's; see :func:`request_digest`.

        Raises:
            PermissionDeniedError: It is another one.
        """
        if not hmac.compare_digest(self.read(header).request_digest, digest):
            raise _denied("the ticket is for another request")

    def read(self, header: str | bytes | None) -> worker_pb2.TicketBody:
        """Return the ticket in a call's head.

        Raises:
            PermissionDeniedError: There is none that a router signed.
        """
        if not isinstance(header, str) or not header.startswith(SCHEME):
            raise _denied("this instance wants a placement ticket: ask a router for one")
        try:
            if len(header) > _MAX_HEADER_CHARS:
                raise ValueError("too long")
            data = base64.b64decode(header[len(SCHEME) :], validate=True)
            ticket = worker_pb2.PlacementTicket.FromString(data)
            if not hmac.compare_digest(_mac(self._key, ticket.body), ticket.mac):
                raise _denied("the ticket is forged, or signed with another key")
            return worker_pb2.TicketBody.FromString(ticket.body)
        except (ValueError, DecodeError) as error:
            raise _denied("the ticket cannot be read") from error

    def _mark_used(self, nonce: bytes, ends_at: float, now: float) -> None:
        if len(self._used) >= _MAX_NONCES:
            self._used = {known: end for known, end in self._used.items() if end > now}
            if len(self._used) >= _MAX_NONCES:
                raise _denied("too many tickets are in use")
        self._used[nonce] = ends_at


def _bare(request: worker_pb2.GenerateRequest) -> bytes:
    bare = worker_pb2.GenerateRequest()
    bare.CopyFrom(request)
    bare.ClearField("ticket")
    bare.ClearField("trace_context")
    return bare.SerializeToString(deterministic=True)


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")


def _denied(reason: str) -> PermissionDeniedError:
    return PermissionDeniedError(reason, field="ticket")
