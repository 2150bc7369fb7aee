"""What every kind of pipe offers: one-sided reads of a peer's blocks, out of memory that its owner serves.

A kind is three classes in one file: a :class:`ReadPipe` (an open way to one peer), a :class:`PipeServer` (the owner's
end), and the :class:`PipeKind` that makes both and is registered by name (``baton.config.pipes``).
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from baton.errors import PipeClosedError
from baton.kv_cache.arena import Arena
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.native_copy import Cast
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid
from baton.kv_transfer.wire import Facts
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """How a reader uses its TCP connections.

    Attributes:
        streams: Connections that one read is split over.
        streams_on_host: How many of them where both ends are on one host, and share its processors.
        share_bytes: Least bytes that are worth a connection of their own.
        checksums: Ask for checksums and compare them.
    """

    streams: int = 1
    share_bytes: int = 1 << 20
    streams_on_host: int = len(os.sched_getaffinity(0))
    checksums: bool = True


class MemoryNetwork:
    """Where servers and readers of one process find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[str, tuple[Facts, KVShards]] = {}

    def publish(self, facts: Facts, shards: KVShards) -> str:
        """Let an instance's arenas be read; returns their address."""
        address = secrets.token_hex(8)
        with self._lock:
            self._published[address] = (facts, shards)
        return address

    def withdraw(self, address: str) -> None:
        """End the reading of what was published there; harmless if repeated."""
        with self._lock:
            self._published.pop(address, None)

    def find(self, address: str) -> tuple[Facts, KVShards]:
        """Return what is published there.

        Raises:
            PipeClosedError: Nothing is.
        """
        with self._lock:
            if address not in self._published:
                raise PipeClosedError(f"nothing is published at memory address {address}")
            return self._published[address]


@dataclass(frozen=True, slots=True)
class PipeOptions:
    """What both ends of pipes may need.

    Attributes:
        token: Shared token.
        tcp: How a reader uses TCP connections; gloo heeds ``checksums``.
        memory: Network of the ``memory`` kind.
        tls: Certificates, if KV is to be encrypted on its way.
        host_memory: Whether the host addresses what is served.
        arena: This side's first; ``None``: not known. In device memory, it opens a peer's.
    """

    token: Token | None = None
    tcp: TcpOptions = field(default_factory=TcpOptions)
    memory: MemoryNetwork | None = None
    tls: Tls | None = None
    host_memory: bool = True
    arena: Arena | None = None


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """How long a server waits for its peer, in seconds.

    Attributes:
        frame_s: For the rest of a frame once its first byte is there, and for a peer that takes none of what it
            asked for.
        idle_s: For the next request.
    """

    frame_s: float = 30.0
    idle_s: float = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What a server serves, and where.

    Attributes:
        shards: Arenas that readers may copy from.
        facts: Facts that readers compare in the handshake.
        host: Address of this machine to bind.
        port: Port to bind, if the kind listens on one; 0: any free one.
        advertise_host: Host that readers connect to; empty: the bound one.
        limits: Time limits for readers.
    """

    shards: KVShards
    facts: Facts
    host: str
    port: int
    advertise_host: str
    limits: ServeLimits


class ReadPipe(ABC):
    """One-sided reads of one peer's blocks. Thread safe; several reads may go on at once.

    Attributes:
        group_bytes: Least bytes that are worth a read of their own while the source computes: what a read costs beside
            its bytes should be small against them.
    """

    kind: ClassVar[str]
    group_bytes: ClassVar[int] = 8 << 20

    @abstractmethod
    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; on return nothing writes into ``local`` any more, whatever happened.

        Args:
            reads: In range on both sides; the caller has checked.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            wait: Deadline and cancel flag.

        Returns:
            bool [n]: which blocks had the offered generation before and after their copy, and came undamaged.

        Raises:
            PipeClosedError: The peer is gone; what arrived must not be used.
            DeadlineError, CancelledError: As their names say.
        """

    @abstractmethod
    def wait_ready(self, value: int, wait: Wait) -> int:
        """Wait until the source's computation has come so far; returns how far it is.

        Args:
            value: Progress of the source to wait for, as an offer names it.
            wait: Deadline and cancel flag.

        Raises:
            PipeClosedError: The peer is gone.
            DeadlineError, CancelledError: As their names say.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Whether the peer is there as far as this side knows; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Close; reads under way fail. Harmless if repeated."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRead:
    """A read of what the source is still computing.

    Attributes:
        reads: Blocks to copy, with steps.
        local: uint8 [blocks, block_bytes], the blocks of the target's rank.
    """

    reads: BlockReads
    local: Bytes


class FollowingReadPipe(ReadPipe):
    """A pipe that takes one request for all layers of what is being computed, and reads each as soon as it is there."""

    @abstractmethod
    def follow(self, reads: Sequence[LayerRead], wait: Wait) -> tuple[list[Valid], float]:
        """Make reads, each as soon as it can be; on return nothing writes into the local blocks any more.

        Args:
            reads: In the order of their progress.
            wait: Deadline and cancel flag.

        Returns:
            Parallel to ``reads`` what :meth:`ReadPipe.read` returns, and the seconds that passed in waiting.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class CastingReadPipe(ReadPipe):
    """A pipe whose source's memory is mapped here, so that a read can convert what it copies."""

    @abstractmethod
    def read_cast(self, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        """Convert blocks; on return nothing writes into ``local`` any more, whatever happened.

        Args:
            reads: In range on both sides, with ``casts``.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            wait: Deadline and cancel flag.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class DeviceReadPipe(ReadPipe):
    """A pipe that reads into device memory without a way through this host's memory."""

    def reaches(self, arena: Arena) -> bool:
        """Whether it can read into this arena; else its blocks go by way of host memory."""
        return True

    @abstractmethod
    def read_device(self, reads: BlockReads, arena: Arena, wait: Wait) -> Valid:
        """Copy blocks; on return nothing writes into the arena any more, whatever happened.

        Args:
            reads: In range on both sides; nothing is converted.
            arena: Arena of the target's rank, in device memory.
            wait: Deadline and cancel flag.

        Returns:
            See :meth:`ReadPipe.read`.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class PipeServer(ABC):
    """The serving end of one kind of pipe: from its creation until ``close`` readers may connect.

    Attributes:
        address: Where readers connect, as the kind writes it.
    """

    address: str

    @abstractmethod
    def close(self) -> None:
        """Stop serving and give back what was taken; every connection has ended. Harmless if repeated."""


class SocketPipeServer(PipeServer):
    """A serving end that readers connect to through a socket.

    The block server accepts connections, bounds their number, shakes hands and calls :meth:`serve` in a thread per
    connection.

    Attributes:
        listener: Bound; not listening yet.
    """

    listener: socket.socket

    def admit(self, stream: Stream, wait: Wait) -> Stream:
        """Look at a new connection before its handshake; returns the stream to go on with.

        Raises:
            BatonError: The peer is refused; it is told why.
        """
        return stream

    @abstractmethod
    def serve(self, stream: Stream, wait: Wait) -> None:
        """Serve one reader until it hangs up.

        Args:
            stream: After the handshake.
            wait: For what the kind itself still has to exchange.

        Raises:
            PipeClosedError: The reader left.
            BatonError: Why the connection ends; the peer is told.
        """

    def close(self) -> None:
        """Close the socket."""
        self.listener.close()


class PipeKind(ABC):
    """One kind of pipe, as one fetcher or one block server uses it; it owns what its pipes share.

    Args:
        options: Options of both ends.

    Attributes:
        name: As ``--pipes`` and endpoints say it.
        serves_host_memory_only: Whether it can serve no arena in device memory.

    Raises:
        ConfigError: An option that the kind needs is missing.
    """

    name: ClassVar[str]
    serves_host_memory_only: ClassVar[bool] = False

    def __init__(self, options: PipeOptions) -> None:
        self.options = options

    @classmethod
    def obstacle(cls, options: PipeOptions) -> str:
        """Say why the kind cannot work in this process, and what to do about it; empty: it can."""
        return ""

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        """Whether ``auto`` takes this kind on this machine, given that nothing is in its way."""
        return True

    @abstractmethod
    def connect(self, address: str, facts: Facts, wait: Wait) -> ReadPipe:
        """Open a pipe to a peer, handshake included.

        Args:
            address: As the peer's server wrote it.
            facts: Facts that the peer has to confirm in the handshake.
            wait: Deadline and cancel flag for connecting and handshake.

        Raises:
            PipeClosedError: This kind does not reach the peer.
            ConfigError: The kind cannot work here; says why.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """

    @abstractmethod
    def listen(self, served: Served) -> PipeServer:
        """Begin to serve.

        Raises:
            ConfigError: The kind cannot serve here, or the address cannot be bound.
        """

    def close(self) -> None:
        """Give back what the pipes share; they are closed before."""
        return
