"""What the ends of pipes are told: how a fetcher reads, and what a server serves with how much patience."""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field

from baton.errors import PipeClosedError
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.protocol.handshake import Facts
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
    """

    token: str | None = None
    tcp: TcpOptions = field(default_factory=TcpOptions)
    memory: MemoryNetwork | None = None
    tls: Tls | None = None
    host_memory: bool = True


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
        shards: The arenas.
        facts: What readers compare.
        host: Address of this machine to bind.
        port: To bind where the kind listens on a port; 0: any free one.
        advertise_host: Host that readers are told; empty: the one bound.
        limits: Patience with readers.
    """

    shards: KVShards
    facts: Facts
    host: str
    port: int
    advertise_host: str
    limits: ServeLimits
