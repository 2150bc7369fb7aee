"""A port where clients connect and exchange frames; see ``baton.rpc.frames``."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Any, Protocol

from baton.rpc.frames import EPOCH_BYTES, MAGIC, FrameError, Frames, frame, quicken
from baton.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

_MAX_HELLO = 8192
_HELLO_S = 10.0
"""How long a client may take to say who it is."""
UNREAD_S = 60.0
"""How long a client may read nothing while something waits for it. Meanwhile nothing is read of it either, so that it
cannot make more of what waits."""


class Handler(Protocol):
    """Serves one connection, in the event loop's thread."""

    def receive(self, payload: bytes) -> None:
        """Take a frame.

        Raises:
            Exception: It is no message; the connection is closed.
        """

    def gather(self) -> bytes:
        """Return the next frame to send; empty: there is none."""

    def close(self) -> None:
        """Cancel what still runs: the connection is gone."""


class Outlet(Protocol):
    """A connection's way out."""

    def filled(self) -> None:
        """There is something to ``gather``: send it at the end of this turn of the event loop, with what else comes."""

    def flush(self) -> None:
        """Send what there is to ``gather`` at once."""

    def abort(self) -> None:
        """Close the connection at once: its client leaves more unread than may be."""


Serve = Callable[[Outlet], Handler]
"""Makes what serves a new connection."""


class FrameServer:
    """The port.

    Args:
        serve: Makes what serves a connection.
        epoch: Returns the instance's epoch; a client that looks for another one has come to the wrong place.
        token: Shared token that clients must show; ``None``: none.
    """

    def __init__(self, serve: Serve, epoch: Callable[[], bytes], token: str | None) -> None:
        self.serve, self._epoch = serve, epoch
        self._token = (token or "").encode()
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def start(self, host: str) -> int:
        """Listen on a free port and return it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host.strip("[]"), 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close_port(self) -> None:
        """Let nobody in any more; connections stay."""
        if self._server is not None:
            self._server.close()

    async def stop(self) -> None:
        """Close the port and every connection; calls that run are aborted."""
        self.close_port()
        for connection in list(self.connections):
            connection.finish()

    def refuses(self, greeting: bytes) -> str | None:
        """Return why a client is not served; ``None``: it is."""
        epoch, token = greeting[:EPOCH_BYTES], greeting[EPOCH_BYTES:]
        if not hmac.compare_digest(token, self._token):
            return "token"
        return None if epoch == self._epoch() else "epoch"


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self._frames = Frames(_MAX_HELLO)
        self._start = b""
        self._handler: Handler | None = None
        self._flushing = self._paused = False
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._server.connections.add(self)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_HELLO_S, self.abort)
        quicken(transport)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handler is None:
                data = self._greet(data)
            for payload in self._frames.feed(data) if data else ():
                if self._handler is None:
                    self._enter(payload)
                else:
                    self._handler.receive(payload)
        except Exception as error:  # whatever it is, it is no message of a client
            log.warning("a connection of calls is closed: %s: %s", type(error).__name__, error)
            self.abort()

    def _greet(self, data: bytes) -> bytes:
        """Take the first bytes; returns those behind them."""
        missing = len(MAGIC) - len(self._start)
        if missing <= 0:
            return data
        self._start += data[:missing]
        if not MAGIC.startswith(self._start):
            raise FrameError("it does not begin as one does")
        return data[missing:]

    def _enter(self, greeting: bytes) -> None:
        reason = self._server.refuses(greeting)
        if reason is not None:
            self._transport.write(frame(reason.encode()))
            self._transport.close()
            raise FrameError(f"refused: {reason}")
        self._timer.cancel()
        self._frames.limit = MAX_MESSAGE_BYTES
        self._handler = self._server.serve(self)
        self._transport.write(frame(b""))

    def filled(self) -> None:
        if not (self._flushing or self._paused):
            self._flushing = True
            self._loop.call_soon(self.flush)  # behind all others that the same step has woken

    def flush(self) -> None:
        self._flushing = False
        if self._handler is None or self._paused or self._transport.is_closing():
            return
        payload = self._handler.gather()
        if payload:
            self._transport.write(frame(payload))

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()
        self._unread = self._loop.call_later(UNREAD_S, self._give_up)

    def resume_writing(self) -> None:
        self._paused = False
        self._end_unread()
        if not self._transport.is_closing():
            self._transport.resume_reading()
        self.filled()

    def _give_up(self) -> None:
        log.warning("a connection of calls is closed: its client has read nothing for %g s", UNREAD_S)
        self.abort()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._end_unread()
        self._server.connections.discard(self)
        if self._handler is not None:
            self._handler.close()

    def finish(self) -> None:
        """Send what there is to send, and close the connection."""
        self.flush()
        if self._paused:  # who does not read is not waited for
            self.abort()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
