"""A gRPC call with messages in both directions, over :class:`Http2Connection` ("gRPC over HTTP2" of gRPC's documents).

gRPC's asyncio client brings a message from a thread of its own to the event loop by way of a pipe, a queue and a task:
60 to 120 µs of processor time, whatever the message brings. Here the loop reads the socket and calls the message's
owner itself. The server's end is gRPC's own, as are its port, its certificates and its bounds.

Before the call both ends prove the shared token on the same connection, as on any channel (:mod:`baton.rpc.proof`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ssl
import urllib.parse
import weakref
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError, Message

from baton.api.v1 import auth_pb2
from baton.errors import BatonError
from baton.rpc.auth import HEADER
from baton.rpc.errors import DETAILS_KEY, from_status, status_code, status_details
from baton.rpc.http2.connection import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    INADEQUATE_SECURITY,
    REFUSED_STREAM,
    Http2Connection,
    Http2Stream,
)
from baton.rpc.http2.hpack import Headers
from baton.rpc.proof import HANDSHAKE_S, SERVICE, CallerProof, certificate_digest, disproved, not_in_time
from baton.rpc.server import MAX_MESSAGE_BYTES
from baton.rpc.service_token import Token
from baton.rpc.tls import ALPN, Tls
from baton.version import __version__

CLOSED = "the connection was closed"
_CONNECT_S = 5.0
_AGENT = f"baton/{__version__}".encode()
_PREFIX = 5
"""Bytes before a message: whether it is compressed, and its length."""
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_OF_RESETS = {
    REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    CANCEL: grpc.StatusCode.CANCELLED,
    ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
_OF_HTTP = {
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
"""What proxies between say, as gRPC's documents have it."""


class StreamEnded(Exception):
    """How a call ended, also a good one.

    Attributes:
        code: Its status.
        message: Of the status.
        details: ``google.rpc.Status``, as :func:`baton.rpc.errors.status_details` makes it; empty: none.
    """

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @classmethod
    def of(cls, error: BatonError) -> StreamEnded:
        """Return what ends a call with an error of this side."""
        return cls(status_code(error), error.message, status_details(error))

    @property
    def error(self) -> BatonError:
        """What happened, in Baton's own words."""
        return from_status(self.code, self.message, self.details)


class MessageSink(Protocol):
    """Takes what a call brings while the event loop reads its connection: must not block or raise."""

    def on_message(self, message: bytes) -> None: ...

    def on_end(self, end: StreamEnded) -> None:
        """Take the end, the last thing there is."""

    def on_writable(self) -> None:
        """What was sent has left."""


class MessageStream:
    """A call; see :meth:`Dialer.open`.

    Args:
        connection: Over which it goes.
        headers: Of the request.
        sink: Takes what comes.
        alone: Whether the connection ends with the call.
    """

    def __init__(
        self, connection: Http2Connection, headers: Headers, sink: MessageSink, *, alone: bool = False
    ) -> None:
        self._sink: MessageSink | None = sink
        self._connection = connection
        self._alone = alone
        self._rest = bytearray()
        self._wanted = _PREFIX
        """Bytes that :attr:`_rest` must have before it is looked at again."""
        self._answered = False
        self._end: StreamEnded | None = None
        self._stream: Http2Stream = connection.open(headers, self)

    # --- this end ---

    @property
    def writable(self) -> bool:
        """Whether all that was sent has left."""
        return self._stream.writable

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Send a message as soon as the server takes it; ``last``: none comes behind it."""
        self._stream.send(b"\0" + len(message).to_bytes(4) + message, last=last)

    def close(self) -> None:
        """Give the call up; the sink hears nothing more."""
        self._sink = None
        self._leave()

    # --- what the connection calls ---

    def on_data(self, data: bytes) -> None:
        """Take a piece of the messages."""
        if not self._rest and len(data) >= _PREFIX and not data[0]:
            length = int.from_bytes(data[1:_PREFIX])
            if length == len(data) - _PREFIX and self._answered:  # nearly always: one message, and the whole of it
                if self._sink is not None:
                    self._sink.on_message(data[_PREFIX:])
                return
        rest = self._rest
        rest += data
        while len(rest) >= self._wanted and self._sink is not None:
            length = int.from_bytes(rest[1:_PREFIX])
            if not self._answered or rest[0]:
                self._fail(grpc.StatusCode.INTERNAL, "a message is compressed, or comes before its headers")
            elif length > MAX_MESSAGE_BYTES:
                self._fail(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"a message has {length} bytes, {MAX_MESSAGE_BYTES} are the most",
                )
            elif len(rest) < _PREFIX + length:
                self._wanted = _PREFIX + length
            else:
                message = bytes(rest[_PREFIX : _PREFIX + length])
                del rest[: _PREFIX + length]
                self._wanted = _PREFIX
                self._sink.on_message(message)

    def on_headers(self, headers: Headers) -> None:
        """Take the answer's beginning, or how it ended."""
        found = dict(headers)
        if not self._answered:
            self._answered = True
            status = found.get(b":status", b"").decode("latin-1")
            kind = found.get(b"content-type", b"")
            if status != "200" or not kind.startswith(b"application/grpc"):
                code = _OF_HTTP.get(status, grpc.StatusCode.UNKNOWN)
                self._fail(code, f"what answers is no gRPC server: HTTP status {status!r:.20}, {kind!r:.60}")
                return
        if b"grpc-status" in found:
            self._end = _status(found)

    def on_close(self) -> None:
        """The server has ended the call."""
        self._tell(self._end or StreamEnded(grpc.StatusCode.INTERNAL, "the call ended without its status"))

    def on_reset(self, code: int) -> None:
        """The server has given the call up."""
        found = _OF_RESETS.get(code, grpc.StatusCode.INTERNAL)
        self._tell(self._end or StreamEnded(found, f"the server gave the stream up with code {code}"))

    def on_lost(self, why: str) -> None:
        self._tell(self._end or StreamEnded(grpc.StatusCode.UNAVAILABLE, why))

    def on_writable(self) -> None:
        """What was sent has left."""
        if self._sink is not None:
            self._sink.on_writable()

    def _fail(self, code: grpc.StatusCode, message: str) -> None:
        self._tell(StreamEnded(code, message))

    def _tell(self, end: StreamEnded) -> None:
        sink = self._sink
        self._sink = None
        self._leave()
        if sink is not None:
            sink.on_end(end)

    def _leave(self) -> None:
        self._rest.clear()
        self._stream.cancel()
        if self._alone:
            self._connection.close()


class Dialer:
    """Opens calls to one server, each on a connection of its own, which ends with it.

    Args:
        address: ``host:port``.
        token: Shared token, if the services use one. It is not sent, and a server that does not know it gets no call.
        tls: Certificates, if they use some.
    """

    def __init__(self, address: str, *, token: Token | None = None, tls: Tls | None = None) -> None:
        self._address = address
        self._token = token
        self._tls = tls
        self._closed = False
        self._opening: set[asyncio.Task[object]] = set()
        self._connections: weakref.WeakSet[Http2Connection] = weakref.WeakSet()

    async def open(self, method: str, sink: MessageSink) -> MessageStream:
        """Begin a call.

        Args:
            method: ``/package.Service/Method``.
            sink: Takes what it brings.

        Raises:
            StreamEnded: The server cannot be reached, or does not know the token.
            asyncio.CancelledError: Meanwhile the dialer was closed.
        """
        if self._closed:
            raise StreamEnded(grpc.StatusCode.CANCELLED, CLOSED)
        task = asyncio.current_task()
        assert task is not None
        self._opening.add(task)
        try:
            return await self._begin(method, sink)
        except BatonError as error:
            raise StreamEnded.of(error) from error
        finally:
            self._opening.discard(task)

    def close(self) -> None:
        """End all calls, those too that are not begun yet, and begin no others."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    async def _begin(self, method: str, sink: MessageSink) -> MessageStream:
        shown, context = (b"", None) if self._tls is None else self._tls.http2_context()
        connection = await self._connect(context)
        try:
            proof = None
            if self._token is not None:
                proof = CallerProof(self._token, self._address, certificate_digest(shown))
                await self._prove(connection, proof)
            header = () if proof is None else ((HEADER.encode(), proof.header(method).encode()),)
            return MessageStream(connection, [*self._headers(method), *header], sink, alone=True)
        except BaseException:
            connection.close()
            raise

    async def _connect(self, context: ssl.SSLContext | None) -> Http2Connection:
        connection = Http2Connection(self._address)
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        named = None if self._tls is None else self._tls.name or host
        why: object = f"it took more than {_CONNECT_S:g} s"
        try:
            async with asyncio.timeout(_CONNECT_S):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: connection, host, int(port), ssl=context, server_hostname=named
                )
        except TimeoutError:
            pass
        except (OSError, ValueError) as error:  # the latter: no host, or no port
            why = error
        else:
            self._connections.add(connection)
            secured = transport.get_extra_info("ssl_object")
            if secured is None or secured.selected_alpn_protocol() == ALPN:
                return connection
            why = "it does not speak HTTP/2"
        connection.close()
        raise StreamEnded(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self._address}: {why}")

    async def _prove(self, connection: Http2Connection, proof: CallerProof) -> None:
        """Have both ends prove the token."""
        challenge = auth_pb2.ChallengeResponse()
        answer = auth_pb2.ProveResponse()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._ask(connection, "Challenge", auth_pb2.ChallengeRequest(), challenge)
                await self._ask(connection, "Prove", proof.prove(challenge), answer)
        except TimeoutError as error:
            raise not_in_time(self._address) from error
        except StreamEnded as end:
            raise disproved(self._address, end.code) or end from end
        proof.check(answer)

    async def _ask(self, connection: Http2Connection, method: str, request: Message, answer: Message) -> None:
        """Make a call with one message either way."""
        sink = _Answer()
        call = MessageStream(connection, self._headers(f"/{SERVICE}/{method}"), sink)
        call.send(request.SerializeToString(), last=True)
        try:
            answer.ParseFromString(await sink.whole)
        except DecodeError as error:
            raise StreamEnded(grpc.StatusCode.INTERNAL, "the peer's answer cannot be read") from error

    def _headers(self, method: str) -> Headers:
        secure = self._tls is not None
        named = self._tls.name if self._tls is not None else ""
        return [
            (b":method", b"POST"),
            (b":scheme", b"https" if secure else b"http"),
            (b":path", method.encode()),
            (b":authority", (named or self._address).encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", _AGENT),
        ]


class _Answer:
    """Waits for the one message of a call."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._message: bytes | None = None

    def on_message(self, message: bytes) -> None:
        self._message = message

    def on_end(self, end: StreamEnded) -> None:
        if self.whole.done():
            return  # nobody waits any more
        if end.code is grpc.StatusCode.OK and self._message is not None:
            self.whole.set_result(self._message)
        else:
            self.whole.set_exception(end)

    def on_writable(self) -> None:
        """There is nothing more to send."""


def _status(headers: dict[bytes, bytes]) -> StreamEnded:
    """Read how a call ended from its last headers."""
    number = headers[b"grpc-status"]
    code = _CODES.get(int(number), grpc.StatusCode.UNKNOWN) if number.isdigit() else grpc.StatusCode.UNKNOWN
    message = urllib.parse.unquote(headers.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
    packed = headers.get(DETAILS_KEY.encode(), b"").split(b",")[0]
    try:
        details = base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (ValueError, binascii.Error):
        details = b""
    return StreamEnded(code, message, details)
