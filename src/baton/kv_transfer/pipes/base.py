"""The interface of pipes: one-sided reads of a peer's KV blocks from memory that the peer serves.

A kind of pipe is three classes in one file: a :class:`ReadPipe` (an open connection to one peer), a
:class:`PipeServer` (the serving end), and the :class:`PipeKind` that creates both and is registered by name
(``baton.config.pipes``).
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
        streams: Number of connections that one read is split over, at least 1.
        streams_on_host: Number of connections if both ends share one host's processors, at least 1.
        share_bytes: Smallest number of bytes that a connection of its own is opened for.
        checksums: Whether checksums are requested and compared.
    """

    streams: int = 1
    share_bytes: int = 1 << 20
    streams_on_host: int = len(os.sched_getaffinity(0))
    checksums: bool = True


class MemoryNetwork:
    """Registry by which servers and readers within one process find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[str, tuple[Facts, KVShards]] = {}

    def publish(self, facts: Facts, shards: KVShards) -> str:
        """Publish an instance's arenas for reading; return their address."""
        address = secrets.token_hex(8)
        with self._lock:
            self._published[address] = (facts, shards)
        return address

    def withdraw(self, address: str) -> None:
        """Unpublish an address. May be repeated."""
        with self._lock:
            self._published.pop(address, None)

    def find(self, address: str) -> tuple[Facts, KVShards]:
        """Return the facts and arenas published at an address.

        Raises:
            PipeClosedError: Nothing is published there.
        """
        with self._lock:
            if address not in self._published:
                raise PipeClosedError(f"nothing is published at memory address {address}")
            return self._published[address]


@dataclass(frozen=True, slots=True)
class PipeOptions:
    """Options of both ends of a pipe.

    Attributes:
        token: Shared token that both ends prove to know; ``None``: no proof is asked for.
        tcp: How a reader uses TCP connections; gloo uses ``checksums`` alone.
        memory: Network of the ``memory`` kind; ``None`` for the others.
        tls: Certificates, if KV is encrypted in transit; ``None``: it is not.
        host_memory: Whether the served arenas are in memory that the CPU can address.
        arena: First arena of this side; ``None``: not known yet. One in device memory also opens a peer's memory.
    """

    token: Token | None = None
    tcp: TcpOptions = field(default_factory=TcpOptions)
    memory: MemoryNetwork | None = None
    tls: Tls | None = None
    host_memory: bool = True
    arena: Arena | None = None


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Time limits of a server for its peer.

    Attributes:
        frame_s: Seconds from the first byte of a frame to its last, and seconds that a peer may read nothing of the
            blocks it asked for.
        idle_s: Seconds until the next request.
    """

    frame_s: float = 30.0
    idle_s: float = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The arenas that a server serves, and its address.

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
        kind: Name of the kind of pipe.
        group_bytes: Smallest read in bytes while the source still computes; large enough that the fixed cost of a read
            is small beside it.
    """

    kind: ClassVar[str]
    group_bytes: ClassVar[int] = 8 << 20

    @abstractmethod
    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks. When it returns or raises, nothing writes into ``local`` any more.

        Args:
            reads: Blocks to copy; the caller has checked that they are in range on both sides.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            wait: Deadline and cancel flag.

        Returns:
            bool [n]: the blocks that had the offered generation before and after their copy, and arrived undamaged.

        Raises:
            PipeClosedError: The peer is gone; the blocks that arrived must not be used.
            DeadlineError: The deadline passed.
            CancelledError: The cancel flag was set.
        """

    @abstractmethod
    def wait_ready(self, value: int, wait: Wait) -> int:
        """Wait until the source has computed up to a point; return its progress.

        Args:
            value: Progress to wait for, in the unit of the source's offer.
            wait: Deadline and cancel flag.

        Raises:
            PipeClosedError: The peer is gone.
            DeadlineError: The deadline passed.
            CancelledError: The cancel flag was set.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Return whether the peer is still connected, as far as this side knows; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Close the pipe; running reads fail. May be repeated."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRead:
    """A read of blocks that the source is still computing.

    Attributes:
        reads: Blocks to copy, with the progress of the source that each needs.
        local: uint8 [blocks, block_bytes], the blocks of the target's rank.
    """

    reads: BlockReads
    local: Bytes


class FollowingReadPipe(ReadPipe):
    """A pipe that requests all layers of a running computation at once, and reads each when it is computed."""

    @abstractmethod
    def follow(self, reads: Sequence[LayerRead], wait: Wait) -> tuple[list[Valid], float]:
        """Make reads, each as soon as its blocks are computed. On return nothing writes into the local blocks any more.

        Args:
            reads: The reads, in ascending order of the progress they need.
            wait: Deadline and cancel flag.

        Returns:
            The result of :meth:`ReadPipe.read` for each entry of ``reads``, and the seconds spent in waiting.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class CastingReadPipe(ReadPipe):
    """A pipe that maps the source's memory, so that a read can convert the blocks to another KV format."""

    @abstractmethod
    def read_cast(self, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        """Copy and convert blocks. When it returns or raises, nothing writes into ``local`` any more.

        Args:
            reads: Blocks to convert, in range on both sides, with ``casts``.
            local: uint8 [blocks, block_bytes], the blocks of the target's rank.
            wait: Deadline and cancel flag.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class DeviceReadPipe(ReadPipe):
    """A pipe that reads into device memory without a copy in this host's memory."""

    def reaches(self, arena: Arena) -> bool:
        """Return whether it can read into this arena; otherwise blocks are copied through host memory."""
        return True

    @abstractmethod
    def read_device(self, reads: BlockReads, arena: Arena, wait: Wait) -> Valid:
        """Copy blocks. When it returns or raises, nothing writes into the arena any more.

        Args:
            reads: Blocks to copy, in range on both sides; they are not converted.
            arena: Arena of the target's rank, in device memory.
            wait: Deadline and cancel flag.

        Returns:
            See :meth:`ReadPipe.read`.

        Raises:
            BatonError: As :meth:`ReadPipe.read`.
        """


class PipeServer(ABC):
    """The serving end of one kind of pipe. Readers may connect from its creation until ``close``.

    Attributes:
        address: Address that readers connect to, in the format of the kind.
    """

    address: str

    @abstractmethod
    def close(self) -> None:
        """Stop serving, end all connections and release all resources. May be repeated."""


class SocketPipeServer(PipeServer):
    """A server that readers connect to through a socket.

    The block server accepts connections, bounds their number, shakes hands and calls :meth:`serve` in a thread per
    connection.

    Attributes:
        listener: Bound socket that does not listen yet.
    """

    listener: socket.socket

    def admit(self, stream: Stream, wait: Wait) -> Stream:
        """Check a new connection before its handshake; return the stream to continue with.

        Raises:
            BatonError: The peer is refused; the reason is sent to it.
        """
        return stream

    @abstractmethod
    def serve(self, stream: Stream, wait: Wait) -> None:
        """Serve one reader until it hangs up.

        Args:
            stream: Stream after the handshake.
            wait: Deadline and cancel flag of the kind's own handshake.

        Raises:
            PipeClosedError: The reader has disconnected.
            BatonError: Why the connection ends; the reason is sent to the peer.
        """

    def close(self) -> None:
        """Close the socket."""
        self.listener.close()


class PipeKind(ABC):
    """One kind of pipe, used by one fetcher or one block server; it owns the resources that its pipes share.

    Args:
        options: Options of both ends.

    Attributes:
        name: Name of the kind in ``--pipes`` and in endpoints.
        serves_host_memory_only: Whether it cannot serve an arena in device memory.

    Raises:
        ConfigError: An option that the kind needs is missing.
    """

    name: ClassVar[str]
    serves_host_memory_only: ClassVar[bool] = False

    def __init__(self, options: PipeOptions) -> None:
        self.options = options

    @classmethod
    def obstacle(cls, options: PipeOptions) -> str:
        """Return why the kind cannot work in this process and what to do about it; empty: it can work."""
        return ""

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        """Return whether ``--pipes auto`` uses this kind on this machine, if it has no obstacle."""
        return True

    @abstractmethod
    def connect(self, address: str, facts: Facts, wait: Wait) -> ReadPipe:
        """Open a pipe to a peer, handshake included.

        Args:
            address: Address from the peer's endpoint, in the format of the kind.
            facts: Facts that the peer has to confirm in the handshake.
            wait: Deadline and cancel flag for connecting and handshake.

        Raises:
            PipeClosedError: The peer cannot be reached by this kind.
            ConfigError: The kind cannot work here; says why.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """

    @abstractmethod
    def listen(self, served: Served) -> PipeServer:
        """Start serving arenas to readers.

        Args:
            served: Arenas to serve, and the address to bind.

        Raises:
            ConfigError: The kind cannot serve here, or the address cannot be bound.
        """

    def close(self) -> None:
        """Release the resources that the pipes share. All of its pipes must be closed before."""
        return
