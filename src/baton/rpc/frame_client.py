"""The client's end of a connection of frames; see ``baton.rpc.frames``."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from baton.rpc.frames import Frames, frame, quicken
from baton.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

_CONNECT_S = 5.0


class FrameClient(asyncio.Protocol, ABC):
    """A connection; used in one event loop, and not used again once it has ended.

    Args:
        name: Of the server, for the log.
        greeting: See :func:`baton.rpc.frames.hello`.
        silence_s: See :func:`baton.rpc.frames.quicken`.

    Attributes:
        broken: Whether it has ended.
    """

    def __init__(self, name: str, greeting: bytes, *, silence_s: float = 0.0) -> None:
        self.name, self.broken = name, False
        self._greeting, self._silence_s = greeting, silence_s
        self._frames = Frames(MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._flushing = self._paused = False

    async def connect(self, host: str, port: int) -> Self:
        """Connect, once.

        Raises:
            OSError: The server does not answer, not in time, or otherwise than with a welcome.
        """
        async with asyncio.timeout(_CONNECT_S):
            transport, _ = await self._loop.create_connection(lambda: self, host.strip("[]"), port)
            try:
                await self._welcome
            except BaseException:
                transport.abort()
                raise
        return self

    @abstractmethod
    def receive(self, payloads: Sequence[bytes]) -> None:
        """Take frames that came together.

        Raises:
            Exception: One is no message; the connection is closed.
        """

    @abstractmethod
    def gather(self) -> bytes:
        """Return the next frame to send; empty: there is none."""

    @abstractmethod
    def lost(self) -> None:
        """The connection has ended; it counts as ``broken`` when this returns."""

    def wake(self) -> None:
        """There is something to :meth:`gather`."""
        if not (self._flushing or self._paused):
            self._flushing = True
            self._loop.call_soon(self.flush)  # together with what else this turn of the loop brings

    def flush(self) -> None:
        """Send what there is to :meth:`gather` now."""
        self._flushing = False
        while not (self._paused or self.broken) and (payload := self.gather()):
            self._transport.write(frame(payload))

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # --- the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who this is."""
        connection: Any = transport  # a Transport, which asyncio's types do not say
        self._transport = connection
        quicken(transport, silence_s=self._silence_s)
        connection.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Take what the server says."""
        try:
            payloads = self._frames.feed(data)
            if payloads and not self._welcome.done():
                answer = payloads.pop(0)
                if answer:
                    self._welcome.set_exception(ConnectionRefusedError(f"refused: {answer[:200]!r}"))
                else:
                    self._welcome.set_result(None)
            if payloads:
                self.receive(payloads)
        except Exception:
            log.exception("what %s sent cannot be read", self.name)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionResetError("the connection was closed"))
        self.lost()
        self.broken = True

    def pause_writing(self) -> None:
        """The server does not keep up."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._paused = False
        self.wake()
