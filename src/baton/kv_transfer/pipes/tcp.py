"""Message pipes over TCP."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import ClassVar

from baton.errors import BatonError, PipeClosedError
from baton.kv_transfer.pipes.base import MAX_MESSAGE_BYTES, PipeListener
from baton.kv_transfer.pipes.stream import ByteChannel, StreamPipe
from baton.kv_transfer.protocol.addresses import bind_tcp, join_address
from baton.kv_transfer.protocol.deadline import Flag, Wait
from baton.kv_transfer.protocol.frames import send_error
from baton.kv_transfer.protocol.handshake import PURPOSE_MESSAGES, greet_as_client, greet_as_server
from baton.kv_transfer.protocol.sockets import Buffer, Stream, connect_tcp

log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0


class SocketChannel(ByteChannel):
    """Both directions of a stream socket."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def send(self, buffers: Sequence[Buffer], wait: Wait) -> None:
        """Send all of the buffers."""
        self._stream.send_all(buffers, wait, "sending a message")

    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Fill all of the views."""
        self._stream.recv_into(views, wait, "receiving a message")

    def wait_readable(self, wait: Wait) -> None:
        """Block until a byte is there, or the peer's end."""
        self._stream.wait_readable(wait, "waiting for a message")

    def wait_writable(self, wait: Wait) -> None:
        """Block until the socket takes bytes."""
        self._stream.wait_writable(wait, "waiting to send")

    def close(self) -> None:
        """Close the socket."""
        self._stream.close()


class TcpPipe(StreamPipe):
    """A pipe over one TCP connection."""

    kind: ClassVar[str] = "tcp"

    def __init__(self, stream: Stream, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        channel = SocketChannel(stream)
        super().__init__(channel, channel, max_message_bytes=max_message_bytes)

    @classmethod
    def connect(
        cls, address: str, *, deadline: float, token: str | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> TcpPipe:
        """Connect to a :class:`TcpPipeListener`.

        Raises:
            PipeClosedError: Nobody there.
            UnauthenticatedError: The tokens differ.
            DeadlineError: It took too long.
        """
        wait = Wait(deadline)
        stream = connect_tcp(address, wait)
        try:
            greet_as_client(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
        except BaseException:
            stream.close()
            raise
        return cls(stream, max_message_bytes=max_message_bytes)


class TcpPipeListener(PipeListener):
    """Listens for message pipes.

    Args:
        host: Address to bind.
        port: 0: any free one.
        token: Shared token.
        max_message_bytes: Bound on the messages of its pipes.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """

    kind: ClassVar[str] = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._token, self._max = token, max_message_bytes
        self._socket = bind_tcp(host, port, token)
        self.address = join_address(host, self._socket.getsockname()[1])
        self._socket.listen()

    def accept(self, *, deadline: float, cancelled: Flag | None = None) -> TcpPipe:
        """Return the next pipe; see :meth:`PipeListener.accept`."""
        while True:
            stream = accept_stream(self._socket, Wait(deadline, cancelled), "tcp peer")
            wait = Wait(min(deadline, time.monotonic() + HANDSHAKE_S), cancelled)
            if greet(stream, self._token, wait):
                return TcpPipe(stream, max_message_bytes=self._max)

    def close(self) -> None:
        """Stop listening."""
        close_listener(self._socket)


def greet(stream: Stream, token: str | None, wait: Wait) -> bool:
    """Shake hands with a new peer; ``False``: it was sent away."""
    try:
        greet_as_server(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
    except BatonError as error:
        log.warning("%s was sent away: %s", stream.peer, str(error))
        with contextlib.suppress(BatonError):  # it may not even listen
            send_error(stream, error, Wait(time.monotonic() + 1.0))
        stream.close()
        return False
    return True


def accept_stream(listener: socket.socket, wait: Wait, peer: str) -> Stream:
    """Accept a connection.

    Raises:
        DeadlineError, CancelledError: As their names say.
        PipeClosedError: The listener was closed.
    """
    while True:
        try:
            listener.settimeout(wait.nap())
            return Stream(listener.accept()[0], peer=peer)
        except TimeoutError:
            wait.check("waiting for a pipe")
        except BlockingIOError:  # a time-out of 0
            wait.check("waiting for a pipe")
        except OSError as error:
            raise PipeClosedError(f"the listener was closed ({error.strerror or error})") from error


def close_listener(listener: socket.socket) -> None:
    """Stop listening and wake whoever waits in ``accept``."""
    with contextlib.suppress(OSError):  # not connected, says Linux, having woken them; or closed before
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
