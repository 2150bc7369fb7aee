"""Accepts TLS connections, and bounds those whose handshake is not complete.

A server of asyncio shows a connection to its protocol after the handshake alone. Until then the connection would be in
none of the protocol's bounds.
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

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 1024
"""Longest time of a handshake in seconds, and how many may be under way: each takes some 100 KB."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_PAUSE_S = 0.2


class TlsListener:
    """Accepts the connections of a listening socket.

    Beyond the limit the oldest handshake is closed, of the address with the most of them.

    Args:
        listening: The socket.
        context: TLS context of the server.
        make_protocol: Creates the protocol of a connection.
        max_handshakes: Most handshakes that are under way.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        max_handshakes: int,
    ) -> None:
        self._listening = listening
        self._context = context
        self._make_protocol = make_protocol
        self._max_handshakes = max_handshakes
        self._handshakes: dict[socket.socket, str] = {}
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
            host = str(address[0])
            self._handshakes[connection] = host
            if len(self._handshakes) > self._max_handshakes:
                ((busiest, _),) = Counter(self._handshakes.values()).most_common(1)
                self._hang_up(next(each for each, its in self._handshakes.items() if its == busiest))
            create_task(self._shake_hands(connection), "TLS handshake", detail=host)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # as are ssl.SSLError, ConnectionError and TimeoutError
            log.debug("a TLS handshake failed: %s", error)
        finally:
            self._handshakes.pop(connection, None)

    def _hang_up(self, connection: socket.socket) -> None:
        """Make it look as if the client had closed the connection; its handshake fails then."""
        del self._handshakes[connection]
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a connection had gone already: %s", error)
