"""How both ends of a gRPC channel prove to each other that they know the shared token, without sending it.

::

    caller -> Challenge                                 needs no token; the service keeps no state
    service -> service nonce                            its time, random bytes, a tag over these and the caller
    caller -> Prove   both nonces, proof of the caller
    service -> proof of the service                     (or UNAUTHENTICATED, and the caller sends nothing more)
    caller -> any call, with `authorization: Baton CREDENTIAL`

A service reads no message of callers that have proved nothing: it would be of any length. So the requests of these two
calls are in their heads (:data:`REQUEST_KEY`), and their messages are empty.

A proof is an HMAC of role, nonces and the caller's certificate under a key derived from the token. So the token cannot
be read, neither proof can be replayed, and no request leaves before the service has shown that it knows the token.

A credential is an HMAC of the method under a key of both nonces. The service keeps no state: its nonce encodes when and
to whom it was issued. A credential is valid for one method of one process, only from the caller's host (and with TLS
its certificate), for five minutes. Callers renew theirs every minute, and whenever a channel has lost its connection or
the token file has changed. With TLS a service in the middle cannot pass a proof on: the certificate that it shows is
not the caller's.

:func:`prove_token` is the caller's side over any transport: :class:`Prover` runs it on a gRPC channel, the HTTP/2
client (:mod:`baton.rpc.http2.message_stream`) on each of its connections.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import secrets
import ssl
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.api.v1 import auth_pb2, auth_pb2_grpc
from baton.background import create_task
from baton.errors import BatonError, UnauthenticatedError, UnavailableError
from baton.rpc.audit import audit, peer_of
from baton.rpc.errors import DETAILS_KEY, readable, status_code, status_details
from baton.rpc.service_token import Token

SERVICE = auth_pb2.DESCRIPTOR.services_by_name["AuthService"].full_name
SCHEME = "Baton "
REQUEST_KEY = "baton-request-bin"
"""Metadata of a call to the service that has its request."""
_NONCE_BYTES = 16
_TAG_BYTES = 16
_TIME_BYTES = 8
_MAC_BYTES = 32
_SERVICE_NONCE_BYTES = _TIME_BYTES + _NONCE_BYTES + _TAG_BYTES
_CREDENTIAL_BYTES = _SERVICE_NONCE_BYTES + _NONCE_BYTES + _MAC_BYTES
HANDSHAKE_S = 10.0
"""Longest time of a proof."""
_RENEW_S = 60.0
_LIFE_S = 300.0
_PURPOSE = b"gRPC"
_EXPIRED = "what proved the shared token counts no more: prove it again"

M = TypeVar("M", bound=Message)


def certificate_digest(pem: bytes) -> bytes:
    """Return the SHA-256 of the first certificate of a PEM chain; empty for an empty chain."""
    if not pem:
        return b""
    end = b"-----END CERTIFICATE-----"
    leaf = pem[pem.index(b"-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(leaf.decode("ascii"))).digest()


class ProofServicer(auth_pb2_grpc.AuthServiceServicer):
    """Challenges callers, and recognizes the credentials of those that have proved the token.

    Args:
        token: Token that callers must prove.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, token: Token, now: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._now = now
        self._secret = secrets.token_bytes(32)

    async def Challenge(self, request: auth_pb2.ChallengeRequest, context: Any) -> auth_pb2.ChallengeResponse:
        issued = int(self._now() * 1e6).to_bytes(_TIME_BYTES) + secrets.token_bytes(_NONCE_BYTES)
        return auth_pb2.ChallengeResponse(nonce=issued + self._tag(issued, context))

    async def Prove(self, request: auth_pb2.ProveRequest, context: Any) -> auth_pb2.ProveResponse:
        """Check a caller's proof and return this service's."""
        if len(request.caller_nonce) != _NONCE_BYTES or not self._issued(request.service_nonce, context, HANDSHAKE_S):
            raise UnavailableError("the proof is for another challenge than this service's")
        nonces = request.service_nonce + request.caller_nonce
        expected = b"caller" + nonces + _shown_certificate(context)
        for key in self._token.keys(_PURPOSE):
            if hmac.compare_digest(_mac(key, expected), request.proof):
                return auth_pb2.ProveResponse(proof=_mac(key, b"service" + nonces))
        audit("authentication_failed", over="grpc", peer=peer_of(context), method=f"/{SERVICE}/Prove")
        raise UnauthenticatedError("the caller does not know this service's token", field="token")

    def check(self, method: str, header: str) -> Callable[[Any], None]:
        """Check the credential of a call before its request is read.

        Args:
            method: ``/package.Service/Method``.
            header: Value of the call's ``authorization``, which begins with :data:`SCHEME`.

        Returns:
            The rest of the check, which needs the call's context; raises as this does.

        Raises:
            UnavailableError: It is no credential, or has expired: a new proof brings another one.
        """
        try:
            data = base64.b64decode(header[len(SCHEME) :], altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            data = b""
        nonces = data[:-_MAC_BYTES]
        mac = data[-_MAC_BYTES:]
        if len(data) == _CREDENTIAL_BYTES:
            for key in self._token.keys(_PURPOSE):
                if hmac.compare_digest(_credential(key, nonces, method), mac):
                    return lambda context: self._require(nonces[:_SERVICE_NONCE_BYTES], context)
        raise UnavailableError(_EXPIRED)

    def _require(self, nonce: bytes, context: Any) -> None:
        if not self._issued(nonce, context, _LIFE_S):
            raise UnavailableError(_EXPIRED)

    def _issued(self, nonce: bytes, context: Any, life_s: float) -> bool:
        """Whether this process issued a nonce to this caller within the last ``life_s`` seconds."""
        issued = nonce[:-_TAG_BYTES]
        tag = nonce[-_TAG_BYTES:]
        if len(nonce) != _SERVICE_NONCE_BYTES or not hmac.compare_digest(self._tag(issued, context), tag):
            return False
        return self._now() - int.from_bytes(issued[:_TIME_BYTES]) / 1e6 < life_s

    def _tag(self, issued: bytes, context: Any) -> bytes:
        host = context.peer().rpartition(":")[0].encode()
        return _mac(self._secret, issued + _shown_certificate(context) + host)[:_TAG_BYTES]


class AuthCall(Protocol):
    """Makes a unary call of ``AuthService`` on the connection whose ends prove the token."""

    async def __call__(self, method: str, request: Message, response: type[M], /) -> M:
        """Return the response to a request of ``method`` (its bare name); raises the transport's own errors."""
        ...


async def prove_token(
    token: Token, address: str, certificate: bytes, call: AuthCall, status_of: Callable[[Exception], object]
) -> CallerProof:
    """Have both ends of a connection prove the token.

    Args:
        token: Token that both ends must know.
        address: ``host:port`` of the service, for messages.
        certificate: Digest of the certificate that this side shows; empty: it shows none.
        call: Makes the calls.
        status_of: Returns the gRPC status of an error that ``call`` raised; ``None``: it has none.

    Returns:
        The proof, which makes the credentials of calls.

    Raises:
        UnauthenticatedError: The service does not know the token, or has none.
        Exception: What ``call`` raised for another reason.
    """
    key = token.keys(_PURPOSE)[0]
    unknown = UnauthenticatedError(f"the service at {address} does not know the shared token", field="token")
    try:
        challenge = await call("Challenge", auth_pb2.ChallengeRequest(), auth_pb2.ChallengeResponse)
        if len(challenge.nonce) != _SERVICE_NONCE_BYTES:
            raise unknown
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = challenge.nonce + own_nonce
        request = auth_pb2.ProveRequest(
            service_nonce=challenge.nonce,
            caller_nonce=own_nonce,
            proof=_mac(key, b"caller" + nonces + certificate),
        )
        answer = await call("Prove", request, auth_pb2.ProveResponse)
    except Exception as error:
        why = _REFUSALS.get(status_of(error))
        if why is None:
            raise
        raise UnauthenticatedError(f"the service at {address} {why}", field="token") from error
    if not hmac.compare_digest(_mac(key, b"service" + nonces), answer.proof):
        raise unknown
    return CallerProof(key, nonces)


_REFUSALS: dict[object, str] = {
    grpc.StatusCode.UNIMPLEMENTED: "has no token, or is none of Baton's",
    grpc.StatusCode.UNAUTHENTICATED: "has another token than this side",
}


class CallerProof:
    """What a caller has proved: the source of its calls' credentials.

    Args:
        key: Key derived from the token.
        nonces: Nonces of service and caller.
    """

    def __init__(self, key: bytes, nonces: bytes) -> None:
        self._key = key
        self._nonces = nonces
        self._headers: dict[str, str] = {}

    def header(self, method: str) -> str:
        """Return the ``authorization`` of calls of a method (``/package.Service/Method``)."""
        header = self._headers.get(method)
        if header is None:
            credential = self._nonces + _credential(self._key, self._nonces, method)
            header = self._headers[method] = SCHEME + base64.urlsafe_b64encode(credential).decode()
        return header


def proof_timeout(address: str) -> UnavailableError:
    """Return the error of a service that has not proved the token within ``HANDSHAKE_S``."""
    return UnavailableError(f"{address} did not prove the shared token within {HANDSHAKE_S:g} s")


class Prover:
    """Proves the token on one channel, and has the service prove it, before the first call and whenever it is due.

    Args:
        token: Token that both ends must know.
        address: ``host:port`` of the service, for messages.
        certificate: Digest of the certificate that this side shows; empty: it shows none.
    """

    def __init__(self, token: Token, address: str, certificate: bytes) -> None:
        self._token = token
        self._address = address
        self._certificate = certificate
        self._channel: Callable[[], grpc.aio.Channel | None] = lambda: None
        self._proved_at = -_RENEW_S
        self._generation = -1
        self._lost: asyncio.Task[None] | None = None
        self._proof: CallerProof | None = None

    def attach(self, channel: grpc.aio.Channel) -> None:
        """Set the channel; must be called before the channel's first call."""
        self._channel = weakref.ref(channel)  # weak: the channel refers to this

    async def header(self, method: str, timeout_s: float | None, wait_for_ready: bool | None) -> str:
        """Return the ``authorization`` of a call of a method.

        Args:
            method: ``/package.Service/Method``.
            timeout_s: Timeout of the call, in seconds; ``None``: none.
            wait_for_ready: Whether the call waits for a connection.

        Raises:
            grpc.aio.AioRpcError: The service cannot be reached, or does not know the token.
        """
        proof = self._proof
        if proof is None or not self._is_proved():
            try:
                proof = await self._prove(timeout_s, wait_for_ready)
            except BatonError as error:
                raise _rpc_error(error) from error
        return proof.header(method)

    def _is_proved(self) -> bool:
        """Whether the last proof is recent, and of the connection that the channel has now."""
        if time.monotonic() - self._proved_at >= _RENEW_S or self._generation != self._token.generation:
            return False
        if self._lost is None or self._lost.done():  # also where a call that was under way has brought another one
            return False
        channel = self._channel()
        return channel is not None and channel.get_state() is grpc.ChannelConnectivity.READY

    async def _prove(self, timeout_s: float | None, wait_for_ready: bool | None) -> CallerProof:
        began = time.monotonic()
        generation = self._token.generation
        channel = self._channel()
        assert channel is not None  # a call on it is about to begin
        stub: Any = auth_pb2_grpc.AuthServiceStub(channel)
        patience_s = timeout_s  # a call that does not wait for a connection does not wait for a proof either
        if not wait_for_ready and (timeout_s is None or timeout_s > HANDSHAKE_S):
            patience_s = HANDSHAKE_S

        async def call(method: str, request: Message, response: type[M]) -> M:
            waits = {"wait_for_ready": wait_for_ready} if method == "Challenge" else {}  # the connection is up then
            try:
                sent = ((REQUEST_KEY, request.SerializeToString()),)
                empty = type(request)()
                answer: M = readable(await getattr(stub, method)(empty, metadata=sent, timeout=patience_s, **waits))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and patience_s == HANDSHAKE_S:
                    raise proof_timeout(self._address) from error
                raise
            return answer

        proof = await prove_token(self._token, self._address, self._certificate, call, _rpc_status)
        self._proof = proof
        self._proved_at = began
        self._generation = generation
        if self._lost is None or self._lost.done():
            self._lost = create_task(_until_lost(channel), "connection", detail=self._address)
        return proof


def _rpc_status(error: Exception) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


async def _until_lost(channel: grpc.aio.Channel) -> None:
    with contextlib.suppress(grpc.aio.UsageError):  # it was closed
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


def _credential(key: bytes, nonces: bytes, method: str) -> bytes:
    return _mac(_mac(key, b"session" + nonces), method.encode())


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _shown_certificate(context: Any) -> bytes:
    """Return the digest of the certificate that a caller shows; empty: it shows none."""
    return certificate_digest(next(iter(context.auth_context().get("x509_pem_cert", ())), b""))


def _rpc_error(error: BatonError) -> grpc.aio.AioRpcError:
    """Return an error of this side as the exception that callers of gRPC expect."""
    details = grpc.aio.Metadata((DETAILS_KEY, status_details(error)))
    return grpc.aio.AioRpcError(status_code(error), grpc.aio.Metadata(), details, error.message, None)
