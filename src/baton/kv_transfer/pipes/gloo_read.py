"""Reads of a peer's blocks through gloo: the requests and answers of TCP, but the blocks go through a group of two.

gloo has no one-sided operations: the owner's serving thread sends what was asked for, scatter to gather, with the same
generations before and after, and the same checksums.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from baton.kv_cache.shards import KVShards
from baton.kv_transfer.pipes.gloo import GlooReceiver, GlooSender, require_gloo
from baton.kv_transfer.pipes.lines import Lines, total_bytes
from baton.kv_transfer.pipes.pool import PooledReadPipe
from baton.kv_transfer.pipes.read_server import ServeLimits, send_blocks, serve_reads
from baton.kv_transfer.pipes.tcp_read import TcpOptions, dial_reader, request_blocks
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.handshake import Facts
from baton.kv_transfer.protocol.sockets import Buffer, Stream
from baton.kv_transfer.types import BlockReads, Bytes, Valid

if TYPE_CHECKING:
    from baton.kv_transfer.pipes.gloo_group import Group

_SLOWEST_BYTES_PER_S = 10e6
"""A reader that takes less for long is given up."""


@dataclass(frozen=True, slots=True, eq=False)
class GlooConnection:
    """A connection to a block server, with a group."""

    stream: Stream
    receiver: GlooReceiver

    def close(self) -> None:
        """Hang up and leave the group."""
        self.stream.close()
        self.receiver.release()


class GlooReadPipe(PooledReadPipe[GlooConnection]):
    """Reads a peer's blocks through groups of two.

    Args:
        address: Where the block server listens.
        facts: What this side expects of the server.
        token: Shared token.
        checksums: Ask for checksums and compare them.
        max_connections: Connections, and so groups, at once; further reads wait for one.

    Raises:
        ConfigError: gloo cannot work here; says why.
    """

    kind: ClassVar[str] = "gloo"

    def __init__(
        self, address: str, facts: Facts, token: str | None, *, checksums: bool = True, max_connections: int = 4
    ) -> None:
        require_gloo()

        def dial(wait: Wait) -> GlooConnection:
            stream = dial_reader(address, facts, token, wait)
            try:
                return GlooConnection(stream, GlooReceiver(_group(stream, wait, is_client=True), stream))
            except BaseException:
                stream.close()
                raise

        super().__init__(dial, max_connections=max_connections)
        self._options = TcpOptions(checksums=checksums)

    @classmethod
    def connect(
        cls, address: str, facts: Facts, token: str | None, wait: Wait, *, checksums: bool = True
    ) -> GlooReadPipe:
        """Connect to a block server's gloo endpoint; the first connection is made at once.

        Raises:
            ConfigError: gloo cannot work here.
            PipeClosedError: Nobody there.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """
        pipe = cls(address, facts, token, checksums=checksums)
        pipe.open_first(wait)
        return pipe

    def request(self, connection: GlooConnection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Read through one group; see :meth:`PooledReadPipe.request`."""
        recv = connection.receiver.recv_data
        return request_blocks(connection.stream, reads, local, wait, options=self._options, recv=recv)


def serve_gloo(stream: Stream, shards: KVShards, limits: ServeLimits, wait: Wait) -> None:
    """Serve one reader after its handshake; arguments and errors are those of :func:`serve_reads`.

    Args:
        stream: After the handshake.
        shards: What is served.
        limits: Patience.
        wait: For the group to be made.
    """
    sender = GlooSender(_group(stream, wait, is_client=False), stream)

    def send(head: Sequence[Buffer], data: Sequence[Buffer], wait: Wait) -> None:
        patience = limits.frame_s + total_bytes(data) / _SLOWEST_BYTES_PER_S
        sender.send_message(head, data, Wait(time.monotonic() + patience))

    def answer(reads: BlockReads, checksums: bool) -> None:
        send_blocks(stream, shards, reads, limits, checksums=checksums, send=send)

    try:
        serve_reads(stream, shards, limits, answer)
    finally:
        stream.close()  # first, so that nobody waits for what does not come
        sender.release()


def _group(stream: Stream, wait: Wait, *, is_client: bool) -> Group:
    from baton.kv_transfer.pipes.gloo_group import Group

    return Group(Lines(stream, stream, is_client), wait, users=1)
