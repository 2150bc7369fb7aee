"""Message pipes over NIXL: big messages lie in the sender's registered ring until the receiver has read them.

Nobody writes into another's memory: the sender copies a piece into its ring and rings a doorbell on the line, the
receiver reads the piece one-sided into a mirror of that ring, copies it out, and gives credit. So a read that comes
too late, or is cut off, can harm no message but its own. While its ring is being read the sender drives its agent;
a big ``send`` therefore returns when the receiver has everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from baton.kv_transfer.pipes.base import MAX_MESSAGE_BYTES
from baton.kv_transfer.pipes.lines import LineReceiver, Lines, LineSender, LinesListener, call_lines
from baton.kv_transfer.pipes.nixl_about import describe_agent, parse_agent
from baton.kv_transfer.pipes.nixl_agent import NixlAgent, Region, Rows, attend
from baton.kv_transfer.pipes.ring import MAX_RING_BYTES, MIN_RING_BYTES, Ring, RingReceiver, RingSender
from baton.kv_transfer.pipes.stream import StreamPipe
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.sockets import Buffer, Stream

RING_BYTES = 4 << 20


class RegisteredRing(Ring):
    """A ring in memory lent by an agent."""

    def __init__(self, agent: NixlAgent, size: int) -> None:
        self._agent = agent
        self.region: Region = agent.lend(size)
        super().__init__(self.region.memory)
        self._lent = True

    def release(self) -> None:
        """Give the memory back."""
        super().release()
        if self._lent:
            self._lent = False
            self._agent.give_back(self.region)


@dataclass(frozen=True, slots=True)
class PeerRing:
    """The ring that a peer sends from, as the peer described it."""

    agent: str
    metadata: bytes
    address: int
    size: int

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> PeerRing:
        """Read a description.

        Raises:
            BadFrameError: A field is missing, malformed or out of bounds.
        """
        address, size = fields.get("address"), fields.get("bytes")
        if type(size) is not int or not MIN_RING_BYTES <= size <= MAX_RING_BYTES:
            raise BadFrameError(f"the peer's ring of {size!r:.40} bytes is out of bounds", field="bytes")
        if type(address) is not int or not 0 < address < (1 << 64) - size:
            raise BadFrameError("the peer's ring has no address", field="address")
        name, metadata = parse_agent(fields)
        return cls(name, metadata, address, size)


class _Source(RingSender):
    """The ring that this end sends from."""

    def __init__(self, agent: NixlAgent, ring: Ring, line: Stream) -> None:
        super().__init__(ring, line)
        self._agent = agent

    def drain(self, wait: Wait) -> None:
        """Serve reads until the receiver has everything."""
        while self._free < self._ring.size:
            self._take_credit(wait)

    def _take_credit(self, wait: Wait) -> None:
        attend(self._agent, self._doorbell, wait, "waiting for the receiver")
        super()._take_credit(wait)


class _Mirror(RingReceiver):
    """A copy of the peer's ring, filled piece by piece."""

    def __init__(self, agent: NixlAgent, ring: RegisteredRing, line: Stream, peer: PeerRing) -> None:
        super().__init__(ring, line)
        self._agent, self._region, self._peer = agent, ring.region, peer

    def settle(self, wait: Wait) -> None:
        """Give the rest of the credit: the sender waits for it."""
        if self._owed:
            self._credit(wait)

    def _arrive(self, count: int, wait: Wait) -> None:
        first = min(count, self._ring.size - self._at)
        offsets = np.array([[self._at, first, 0], [0, count - first, 0]][: 1 + (count > first)], dtype=np.uint64)
        rows = _at(self._region.address, offsets), _at(self._peer.address, offsets)
        self._agent.read(self._peer.agent, rows, self._region, self._doorbell, wait)


def _at(base: int, offsets: Rows) -> Rows:
    return offsets + np.array([base, 0, 0], dtype=np.uint64)


class NixlSender(LineSender):
    """Sends big data by letting it be read."""

    def __init__(self, agent: NixlAgent, ring: RegisteredRing, line: Stream) -> None:
        super().__init__(line)
        self._source = _Source(agent, ring, line)

    def move(self, data: Sequence[Buffer], wait: Wait) -> None:
        """Lay the data into the ring, piece by piece, until the receiver has read it all."""
        self._source.send(data, wait)
        self._source.drain(wait)

    def release(self) -> None:
        """Give the ring back."""
        self._source.release()


class NixlReceiver(LineReceiver):
    """Receives big data by reading it."""

    def __init__(self, agent: NixlAgent, ring: RegisteredRing, line: Stream, peer: PeerRing) -> None:
        super().__init__(line)
        self._mirror = _Mirror(agent, ring, line, peer)
        self._agent, self._peer, self._connected = agent, peer.agent, True

    def move(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Read the data as it is announced."""
        self._mirror.recv(views, wait)
        self._mirror.settle(wait)

    def release(self) -> None:
        """Give the mirror back and let go of the peer."""
        self._mirror.release()
        if self._connected:
            self._connected = False
            self._agent.disconnect(self._peer)


class NixlPipe(StreamPipe):
    """A pipe between two agents."""

    kind: ClassVar[str] = "nixl"

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        agent: NixlAgent,
        deadline: float,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        ring_bytes: int = RING_BYTES,
    ) -> NixlPipe:
        """Connect to a :class:`NixlPipeListener`.

        Args:
            address: As the listener says it.
            agent: This end's; lives as long as the pipe.
            deadline: ``time.monotonic()`` seconds.
            token: Shared token.
            max_message_bytes: Bound on messages.
            ring_bytes: Size of the ring that this end sends from.

        Raises:
            PipeClosedError: Nobody there, or the agent was closed.
            UnauthenticatedError: The tokens differ.
            DeadlineError: It took too long.
        """
        wait = Wait(deadline)
        lines = call_lines(cls.kind, address, token, wait)
        try:
            return cls.over(lines, agent, wait, max_message_bytes=max_message_bytes, ring_bytes=ring_bytes)
        except BaseException:
            lines.close()
            raise

    @classmethod
    def over(
        cls, lines: Lines, agent: NixlAgent, wait: Wait, *, max_message_bytes: int, ring_bytes: int = RING_BYTES
    ) -> NixlPipe:
        """Make an end of a pipe over a call's lines; the caller closes them if this fails.

        Raises:
            BadFrameError: The peer's description cannot be used. If ``agent.refused`` says that NIXL had begun to take
                it, that peer needs another agent.
        """
        ring = RegisteredRing(agent, ring_bytes)
        rings = [ring]
        try:
            about = describe_agent(agent.name, ring.region.metadata)
            about |= {"address": ring.region.address, "bytes": ring.size}
            peer = PeerRing.parse(lines.exchange(about, wait))
            rings.append(RegisteredRing(agent, peer.size))
            agent.connect(peer.agent, peer.metadata)
        except BaseException:
            for item in rings:
                item.release()
            raise
        sender = NixlSender(agent, ring, lines.outgoing)
        receiver = NixlReceiver(agent, rings[1], lines.incoming, peer)
        return cls(sender, receiver, max_message_bytes=max_message_bytes)


class NixlPipeListener(LinesListener):
    """Listens for message pipes.

    Args:
        agent: This end's of all its pipes; lives as long as they do.
        host: Address to bind.
        port: 0: any free one.
        token: Shared token.
        max_message_bytes: Bound on the messages of its pipes.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """

    kind: ClassVar[str] = "nixl"

    def __init__(
        self,
        agent: NixlAgent,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(host, port, token=token, max_message_bytes=max_message_bytes)
        self._agent = agent

    def make_pipe(self, lines: Lines, wait: Wait) -> NixlPipe:
        """Make this end; see :meth:`LinesListener.make_pipe`."""
        return NixlPipe.over(lines, self._agent, wait, max_message_bytes=self._max)
