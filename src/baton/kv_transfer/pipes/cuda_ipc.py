"""One-sided reads from device memory to device memory on one host: the peer's pool is opened by its CUDA IPC handles.

A connection over an abstract Unix socket passes, for each rank, a read-only descriptor of the arena's state
(generations and progress, in host memory) and the handle of its blocks. A read is a copy on the reader's device, and no
byte passes through host memory. What the peer's device has not done yet the reader cannot see: generations and progress
say what is queued there. So before each copy it asks the peer, whose answer to WAIT comes once what was queued by then
is done (:meth:`~baton.kv_cache.arena.SharedDeviceArena.settle`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from baton.errors import ConfigError, FingerprintMismatchError, InternalError, PipeClosedError
from baton.kv_cache.arena import Arena, SharedDeviceArena
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.native_copy import fence
from baton.kv_transfer.pipes.base import DeviceReadPipe, PipeKind, PipeOptions, Served
from baton.kv_transfer.pipes.pool import WORD, Connection, PooledReadPipe, recv_progress, request_progress
from baton.kv_transfer.pipes.read_server import send_progress, wait_for_request
from baton.kv_transfer.pipes.shm import (
    UnixPipeServer,
    dial_unix,
    recv_descriptors,
    send_descriptors,
)
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid, block_spans, current
from baton.kv_transfer.wire import BadFrameError, Facts, FrameKind, recv_header

HANDLE_BYTES = 64
_CONNECTIONS = 8
"""Of one pipe at once: each waits for the source's computation by itself."""
_STAGED_BYTES = 8 << 20
"""Of blocks that go to host memory, at a time."""


class CudaIpcReadPipe(PooledReadPipe[Connection], DeviceReadPipe):
    """Reads another instance's device memory on the same host.

    Args:
        address: Where the block server listens.
        facts: Facts that the server has to confirm in the handshake.
        options: Token, and the arena that opens the peer's memory with the first connection.
    """

    kind: ClassVar[str] = "cuda_ipc"

    def __init__(self, address: str, facts: Facts, options: PipeOptions) -> None:
        self.peers: KVShards | None = None
        if options.arena is None:
            raise ConfigError("the cuda_ipc pipe needs an arena in device memory", field="pipes")
        opener = _shared(options.arena)

        def dial(wait: Wait) -> Connection:
            stream, theirs = dial_unix(address, facts, options.token, wait)
            with stream.closed_on_error():
                self._receive(stream, theirs.tp_size * theirs.pp_size, opener, facts, wait)
            return Connection(stream)

        super().__init__(dial, max_connections=_CONNECTIONS)

    def read_device(self, reads: BlockReads, arena: Arena, wait: Wait) -> Valid:
        if not isinstance(arena, SharedDeviceArena):
            raise InternalError("the target is no arena in device memory")

        def copy(peer: Arena, part: BlockReads) -> None:
            segments = part.segments_of(arena.block_bytes)
            taken = block_spans(part.remote_ids, segments[:, 0], segments[:, 2])
            arena.copy_from(peer, taken, block_spans(part.local_ids, segments[:, 1], segments[:, 2]))

        return self.in_requests(reads, wait, lambda connection, part: self._read(connection, part, wait, copy))

    def request(self, connection: Connection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:

        def copy(peer: Arena, part: BlockReads) -> None:
            segments = part.segments_of(local.shape[1])
            each = int(segments[:, 2].sum())
            batch = max(1, _STAGED_BYTES // max(1, each))
            for at in range(0, len(part), batch):
                wait.record_progress()
                wait.check("copying blocks")
                ids, rows = part.remote_ids[at : at + batch], part.local_ids[at : at + batch]
                buffer = np.empty((len(ids), each), np.uint8)
                peer.read_into(buffer.reshape(-1), block_spans(ids, segments[:, 0], segments[:, 2]))
                begin = 0
                for _, target, size in segments.tolist():
                    local[rows, target : target + size] = buffer[:, begin : begin + size]
                    begin += size

        return self._read(connection, reads, wait, copy)

    def close(self) -> None:
        """Close every connection, and the peer's memory with the last read."""
        super().close()
        self.peers = None

    def _read(
        self, connection: Connection, reads: BlockReads, wait: Wait, copy: Callable[[Arena, BlockReads], None]
    ) -> Valid:
        """Copy those blocks that still are what was offered, once the peer's device has done what was queued."""
        peers = self.peers
        if peers is None:
            raise PipeClosedError("the pipe was closed")
        request_progress(connection.stream, 0, wait)
        recv_progress(connection.stream, wait)
        valid = current(peers.primary, reads)
        copy(peers.arenas[reads.source_shard], reads.select(valid))
        fence()
        valid &= current(peers.primary, reads)
        if connection.stream.peer_gone():
            raise PipeClosedError(f"{connection.stream.peer} went away during a read: its lease on the blocks is over")
        return valid

    def _receive(self, stream: Stream, ranks: int, opener: SharedDeviceArena, facts: Facts, wait: Wait) -> None:
        """Take what the peer passes first, and open its memory if this is the first connection."""
        fds = recv_descriptors(stream, ranks, wait)
        try:
            passed = bytes(stream.recv_exact(HANDLE_BYTES * ranks, wait, "waiting for the handles of device memory"))
            if self.peers is not None:
                return
            handles = [passed[at : at + HANDLE_BYTES] for at in range(0, len(passed), HANDLE_BYTES)]
            arenas = []
            for handle in handles:
                arenas.append(_opened(opener, handle, fds.pop(0)))
        finally:
            for fd in fds:
                os.close(fd)
        if arenas[0].epoch != facts.epoch:
            raise BadFrameError("the arena passed has another epoch than announced", field="epoch")
        if any(arena.num_blocks != facts.num_blocks for arena in arenas):
            raise FingerprintMismatchError("the arena passed has another num_blocks than announced", field="num_blocks")
        self.peers = KVShards(arenas)


class CudaIpcServer(UnixPipeServer):
    """Passes the arenas' handles to readers, and tells them when the device has done what was queued."""

    def __init__(self, served: Served, options: PipeOptions) -> None:
        self._served = served
        self._arenas = [_shared(arena) for arena in served.shards.arenas]
        try:
            for arena in self._arenas:
                os.close(arena.export()[1])
        except OSError as error:
            raise ConfigError(f"the cuda_ipc pipe cannot serve this memory: {error}", field="pipes") from error
        super().__init__("baton-kv-ipc", options.token)

    def serve(self, stream: Stream, wait: Wait) -> None:
        """Pass handles, then answer WAIT frames; see :meth:`SocketPipeServer.serve`."""
        limits = self._served.limits
        exported = [arena.export() for arena in self._arenas]
        try:
            send_descriptors(stream, [fd for _, fd in exported])
        finally:
            for _, fd in exported:
                os.close(fd)
        stream.send_all([b"".join(handle for handle, _ in exported)], wait, "passing handles of device memory")
        while wait_for_request(stream, limits):
            frame = Wait(time.monotonic() + limits.frame_s)
            _, length = recv_header(stream, {FrameKind.WAIT: WORD.size}, frame)
            payload = stream.recv_exact(length, frame, "reading a request")
            send_progress(stream, self._served.shards, payload, limits, settle=self._settle)

    def _settle(self) -> None:
        for arena in self._arenas:
            arena.settle()


class CudaIpcKind(PipeKind):
    """Pipes from device memory to device memory on one host."""

    name: ClassVar[str] = "cuda_ipc"

    @classmethod
    def obstacle(cls, options: PipeOptions) -> str:
        """Say that blocks are not in device memory, where they are not."""
        if options.arena is not None and not isinstance(options.arena, SharedDeviceArena):
            return "the cuda_ipc pipe goes from device memory to device memory, and the blocks are in host memory"
        return ""

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        """Whether the blocks are known to be in device memory."""
        return isinstance(options.arena, SharedDeviceArena)

    def connect(self, address: str, facts: Facts, wait: Wait) -> CudaIpcReadPipe:
        pipe = CudaIpcReadPipe(address, facts, self.options)
        pipe.open_first(wait)
        return pipe

    def listen(self, served: Served) -> CudaIpcServer:
        return CudaIpcServer(served, self.options)


def _opened(opener: SharedDeviceArena, handle: bytes, fd: int) -> Arena:
    try:
        return opener.open_peer(handle, fd)
    except ConfigError as error:
        raise BadFrameError(f"the peer passed something that is no arena: {error}") from error


def _shared(arena: Arena) -> SharedDeviceArena:
    """Return an arena that other processes can open.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(arena, SharedDeviceArena):
        raise ConfigError(
            "the cuda_ipc pipe goes from device memory to device memory, and the blocks are in host memory",
            field="pipes",
        )
    return arena
