"""Accepts TLS connections, and bounds those that are not shown to their protocol.

A server of asyncio shows a connection to its protocol after the handshake alone, and waits for the client's answer when
the protocol has closed it. Before and after, the connection would be in none of the protocol's bounds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from baton.background import create_task, keep_running
from baton_router.frontend.http.protocol import HttpProtocol

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 1024
"""Longest time of a handshake in seconds, and how many may be under way: each takes some 100 KB."""
SHUTDOWN_S = 5.0
"""Seconds that a client has to read the last of an answer, and to close."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_PAUSE_S = 0.2


class TlsListener:
    """Accepts the connections of a listening socket.

    Beyond the limit of handshakes the oldest is closed, of the address with the most of them. Beyond the limit of
    connections the oldest of those that are about to close is, or else the new one.

    Args:
        listening: The socket.
        context: TLS context of the server.
        make_protocol: Creates the protocol of a connection.
        max_connections: Most connections that are open; an eighth of it may be in their handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], HttpProtocol],
        max_connections: int,
    ) -> None:
        self._listening = listening
        self._context = context
        self._make_protocol = make_protocol
        self._max_handshakes = min(MAX_HANDSHAKES, max(1, max_connections // 8))
        self._max_connections = max_connections
        self._handshakes: dict[socket.socket, str] = {}
        self._open: dict[socket.socket, None] = {}
        self._shown: dict[socket.socket, HttpProtocol] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def num_handshakes(self) -> int:
        """Number of handshakes that are under way."""
        return len(self._handshakes)

    def start(self) -> None:
        """Start to accept, in the running event loop."""
        self._listening.setblocking(False)
        self._task = keep_running(self._accept, "TLS listener")

    async def close(self) -> None:
        """Accept nothing more, and close the connections whose handshake is not complete."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for connection in list(self._handshakes):
            self._hang_up(connection)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    log.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(_PAUSE_S)
                continue  # else the client has gone again
            if not self._has_room():
                connection.close()
                continue
            self._open[connection] = None
            host = str(address[0])
            self._handshakes[connection] = host
            if len(self._handshakes) > self._max_handshakes:
                ((busiest, _),) = Counter(self._handshakes.values()).most_common(1)
                self._hang_up(next(each for each, its in self._handshakes.items() if its == busiest))
            create_task(self._shake_hands(connection), "TLS handshake", detail=host)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def connect() -> HttpProtocol:
            protocol = self._make_protocol()
            self._shown[connection] = protocol
            return protocol

        try:
            await loop.connect_accepted_socket(
                connect,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError as error:  # as are ssl.SSLError, ConnectionError and TimeoutError
            log.debug("a TLS handshake failed: %s", error)
        finally:
            self._handshakes.pop(connection, None)

    def _has_room(self) -> bool:
        """Whether another connection may be accepted; makes room if it can."""
        if len(self._open) < self._max_connections:
            return True
        for connection in [each for each in self._open if each.fileno() < 0]:
            self._forget(connection)
        if len(self._open) < self._max_connections:
            return True
        for connection, protocol in self._shown.items():
            transport = protocol.transport  # None until the handshake is complete
            if transport is not None and transport.is_closing():
                self._hang_up(connection)
                self._forget(connection)
                return True
        return False

    def _forget(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._shown.pop(connection, None)

    def _hang_up(self, connection: socket.socket) -> None:
        """Make it look as if the client had closed the connection: it ends then."""
        self._handshakes.pop(connection, None)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a connection had gone already: %s", error)
