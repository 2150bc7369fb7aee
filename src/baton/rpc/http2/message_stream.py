"""gRPC calls over :class:`Http2Connection`, as specified by "gRPC over HTTP2".

The server's end is gRPC's own, as are its port, its certificates and its bounds. Before the call both ends prove the
shared token on the same connection, as on any channel (:mod:`baton.rpc.proof`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import ssl
import urllib.parse
import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError
from baton.rpc.addresses import connection_reason
from baton.rpc.auth import HEADER
from baton.rpc.errors import DETAILS_KEY, STATUS_CODES, from_status, status_code, status_details
from baton.rpc.http2.connection import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    INADEQUATE_SECURITY,
    REFUSED_STREAM,
    Http2Connection,
    Http2Stream,
)
from baton.rpc.http2.hpack import Headers
from baton.rpc.proof import (
    HANDSHAKE_S,
    REQUEST_KEY,
    SERVICE,
    CallerProof,
    certificate_digest,
    proof_timeout,
    prove_token,
)
from baton.rpc.server import MAX_MESSAGE_BYTES
from baton.rpc.service_token import Token
from baton.rpc.tls import ALPN, Tls
from baton.version import __version__

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

CLOSED = "the connection was closed"
_CONNECT_S = 5.0
_AGENT = f"baton/{__version__}".encode()
_PREFIX = 5
"""Bytes before a message: whether it is compressed (1), and its length (4)."""
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
"""Statuses for the HTTP status codes of proxies, as gRPC's documents map them."""


class StreamEnded(Exception):
    """How a call ended, including successful ones.

    Attributes:
        code: Status of the call.
        message: Message of the status.
        details: ``google.rpc.Status``, as :func:`baton.rpc.errors.status_details` makes it; empty: none.
    """

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @classmethod
    def of(cls, error: BatonError) -> StreamEnded:
        """Return the end of a call that failed with an error of this side."""
        return cls(status_code(error), error.message, status_details(error))

    @property
    def error(self) -> BatonError:
        """The end as Baton's own error."""
        return from_status(self.code, self.message, self.details)


class MessageSink(Protocol):
    """Receives a call's messages while the event loop reads its connection: must not block or raise."""

    def on_message(self, message: bytes) -> None:
        """Handle a message."""

    def on_end(self, end: StreamEnded) -> None:
        """Handle the end of the call; nothing is called after it."""

    def on_writable(self) -> None:
        """Handle that everything sent has left."""


class MessageStream:
    """A call; see :meth:`Dialer.open`.

    Args:
        connection: Connection of the call.
        headers: Headers of the request.
        sink: Receives the messages and the end.
        owns_connection: Whether the connection ends with the call.
    """

    def __init__(
        self, connection: Http2Connection, headers: Headers, sink: MessageSink, *, owns_connection: bool = False
    ) -> None:
        self._sink: MessageSink | None = sink
        self._connection = connection
        self._owns_connection = owns_connection
        self._rest = bytearray()
        self._wanted = _PREFIX
        """Bytes that :attr:`_rest` must have before it is parsed again."""
        self._answered = False
        self._end: StreamEnded | None = None
        self._stream: Http2Stream = connection.open(headers, self)

    # --- this end ---

    @property
    def writable(self) -> bool:
        """Whether everything sent has left."""
        return self._stream.writable

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Send a message as soon as flow control allows; ``last``: it ends the request."""
        self._stream.send(b"\0" + len(message).to_bytes(4) + message, last=last)

    def close(self) -> None:
        """Cancel the call; the sink is not called any more."""
        self._sink = None
        self._release()

    # --- what the connection calls ---

    def on_data(self, data: bytes) -> None:
        if not self._rest and len(data) >= _PREFIX and not data[0]:
            length = int.from_bytes(data[1:_PREFIX])
            if length == len(data) - _PREFIX and self._answered:  # nearly always: exactly one message
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
        """Read the response's initial headers, or its trailers."""
        values = dict(headers)
        if not self._answered:
            self._answered = True
            status = values.get(b":status", b"").decode("latin-1")
            kind = values.get(b"content-type", b"")
            if status != "200" or not kind.startswith(b"application/grpc"):
                code = _OF_HTTP.get(status, grpc.StatusCode.UNKNOWN)
                self._fail(code, f"what answers is no gRPC server: HTTP status {status!r:.20}, {kind!r:.60}")
                return
        if b"grpc-status" in values:
            self._end = _status(values)

    def on_close(self) -> None:
        self._finish(self._end or StreamEnded(grpc.StatusCode.INTERNAL, "the call ended without its status"))

    def on_reset(self, code: int) -> None:
        status = _OF_RESETS.get(code, grpc.StatusCode.INTERNAL)
        self._finish(self._end or StreamEnded(status, f"the server gave the stream up with code {code}"))

    def on_lost(self, why: str) -> None:
        self._finish(self._end or StreamEnded(grpc.StatusCode.UNAVAILABLE, why))

    def on_writable(self) -> None:
        if self._sink is not None:
            self._sink.on_writable()

    def _fail(self, code: grpc.StatusCode, message: str) -> None:
        self._finish(StreamEnded(code, message))

    def _finish(self, end: StreamEnded) -> None:
        sink = self._sink
        self._sink = None
        self._release()
        if sink is not None:
            sink.on_end(end)

    def _release(self) -> None:
        self._rest.clear()
        self._stream.cancel()
        if self._owns_connection:
            self._connection.close()


class Connector(Protocol):
    """Opens calls to a server; :class:`Dialer` is one."""

    async def open(self, method: str, sink: MessageSink) -> MessageStream:
        """Open a call; see :meth:`Dialer.open`."""


class Dialer:
    """Opens calls to one server, each on a connection of its own, which ends with it.

    Args:
        address: ``host:port`` of the server.
        token: Shared token, if the services use one. It is not sent, and a server that does not know it gets no call.
        tls: Certificates, if the services use TLS.
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
            sink: Receives the messages and the end.

        Raises:
            StreamEnded: The server cannot be reached, or does not know the token.
            asyncio.CancelledError: The dialer was closed meanwhile.
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
        """End all calls, including those that are being opened, and begin no others."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    async def _begin(self, method: str, sink: MessageSink) -> MessageStream:
        shown, context = (b"", None) if self._tls is None else self._tls.http2_context()
        connection = await self._connect(context)
        try:
            headers = self._headers(method)
            if self._token is not None:
                proof = await self._prove(connection, self._token, certificate_digest(shown))
                headers.append((HEADER.encode(), proof.header(method).encode()))
            return MessageStream(connection, headers, sink, owns_connection=True)
        except BaseException:
            connection.close()
            raise

    async def _connect(self, context: ssl.SSLContext | None) -> Http2Connection:
        connection = Http2Connection(self._address)
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        named = None if self._tls is None else self._tls.name or host
        why = f"it took more than {_CONNECT_S:g} s"
        try:
            async with asyncio.timeout(_CONNECT_S):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: connection, host, int(port), ssl=context, server_hostname=named
                )
        except TimeoutError:
            pass
        except (OSError, ValueError) as error:  # the latter: no host, or no port
            log.debug("no connection to %s: %s", self._address, error)
            why = connection_reason(error)
        else:
            self._connections.add(connection)
            secured = transport.get_extra_info("ssl_object")
            if secured is None or secured.selected_alpn_protocol() == ALPN:
                return connection
            why = "it does not speak HTTP/2"
        connection.close()
        raise StreamEnded(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self._address}: {why}")

    async def _prove(self, connection: Http2Connection, token: Token, certificate: bytes) -> CallerProof:
        """Have both ends of a connection prove the token."""

        async def call(method: str, request: Message, response: type[M]) -> M:
            sink = _Answer()
            headers = self._headers(f"/{SERVICE}/{method}")
            headers.append((REQUEST_KEY.encode(), base64.b64encode(request.SerializeToString())))
            stream = MessageStream(connection, headers, sink)
            stream.send(b"", last=True)
            try:
                return response.FromString(await sink.message)
            except DecodeError as error:
                raise StreamEnded(grpc.StatusCode.INTERNAL, "the peer's answer cannot be read") from error

        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await prove_token(token, self._address, certificate, call, _status_of)
        except TimeoutError as error:
            raise proof_timeout(self._address) from error

    def _headers(self, method: str) -> Headers:
        name = self._tls.name if self._tls is not None else ""
        return [
            (b":method", b"POST"),
            (b":scheme", b"http" if self._tls is None else b"https"),
            (b":path", method.encode()),
            (b":authority", (name or self._address).encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", _AGENT),
        ]


class _Answer:
    """Waits for the one message of a unary call."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._message: bytes | None = None

    def on_message(self, message: bytes) -> None:
        self._message = message

    def on_end(self, end: StreamEnded) -> None:
        if self.message.done():
            return  # the caller was cancelled
        if end.code is grpc.StatusCode.OK and self._message is not None:
            self.message.set_result(self._message)
        else:
            self.message.set_exception(end)

    def on_writable(self) -> None:
        pass  # there is nothing more to send


def _status_of(error: Exception) -> grpc.StatusCode | None:
    return error.code if isinstance(error, StreamEnded) else None


def _status(headers: dict[bytes, bytes]) -> StreamEnded:
    """Read how a call ended from its trailers."""
    number = headers[b"grpc-status"]
    code = STATUS_CODES.get(int(number), grpc.StatusCode.UNKNOWN) if number.isdigit() else grpc.StatusCode.UNKNOWN
    message = urllib.parse.unquote(headers.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
    packed = headers.get(DETAILS_KEY.encode(), b"").split(b",")[0]
    try:
        details = base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (ValueError, binascii.Error):
        details = b""
    return StreamEnded(code, message, details)


class ServerStream(Generic[M]):
    """A call with one request and many responses, read by one task: ``async for response in stream``.

    The call begins when its first response is awaited. The iteration ends with the call, or raises
    :class:`StreamEnded` if it failed. Messages that have arrived are returned without going back to the event loop,
    which reads no more until they are consumed.

    Args:
        dialer: Opens the call.
        method: ``/package.Service/Method``.
        request: Message to send.
        response: Class of the responses.
    """

    def __init__(self, dialer: Connector, method: str, request: Message, response: type[M]) -> None:
        self._dialer = dialer
        self._method = method
        self._request = request
        self._response = response
        self._stream: MessageStream | None = None
        self._messages: deque[bytes] = deque()
        self._end: StreamEnded | None = None
        self._news: asyncio.Future[None] | None = None

    def __aiter__(self) -> ServerStream[M]:
        return self

    async def __anext__(self) -> M:
        if self._stream is None and self._end is None:
            self._stream = await self._dialer.open(self._method, self)
            self._stream.send(self._request.SerializeToString(), last=True)
        while not self._messages:
            if self._end is not None:
                if self._end.code is grpc.StatusCode.OK:
                    raise StopAsyncIteration
                raise self._end
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        try:
            return self._response.FromString(self._messages.popleft())
        except DecodeError as error:
            raise StreamEnded(grpc.StatusCode.INTERNAL, f"an answer of {self._method} cannot be read") from error

    def cancel(self) -> None:
        """Cancel the call; harmless if repeated."""
        if self._stream is not None:
            self._stream.close()
        if self._end is None:
            self.on_end(StreamEnded(grpc.StatusCode.CANCELLED, "the call was given up"))

    # --- what the connection calls ---

    def on_message(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()

    def on_end(self, end: StreamEnded) -> None:
        self._end = end
        self._wake()

    def on_writable(self) -> None:
        pass  # there is nothing more to send

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
