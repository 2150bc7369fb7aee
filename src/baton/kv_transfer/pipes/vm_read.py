"""One-sided reads of another process's own memory: ``process_vm_readv``, for pools that no descriptor can share.

A connection over an abstract Unix socket carries the handshake and where the peer's arenas lie in its address space;
the socket's credentials say which process it is, and its end tells of the peer's death. The kernel allows such reads to
the same user; where ``kernel.yama.ptrace_scope`` is above 0 only to the peer's ancestors, and the pipe says so.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from baton.errors import PipeClosedError
from baton.kv_cache.reshard import Segments
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.copy.block_copy import BATCH_BYTES, merge_runs
from baton.kv_transfer.pipes.pool import PooledReadPipe
from baton.kv_transfer.pipes.shm_read import require_same_user, shm_obstacle
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError, FrameKind, recv_control, send_control
from baton.kv_transfer.protocol.handshake import PURPOSE_READ, Facts, greet_as_client
from baton.kv_transfer.protocol.sockets import Stream, connect_unix
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Ids, Valid
from baton.native import address_of

_IOV_MAX = 1024
_MAX_ADDRESS = 1 << 56

Spans = npt.NDArray[np.uint64]
"""uint64 [n, 2]: address and bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class VmConnection:
    """A connection to a block server on this host.

    Attributes:
        pid: The server's process.
        generations: Address of its generations.
        blocks: Address of the first block and bytes per block, per rank.
    """

    stream: Stream
    pid: int
    generations: int
    blocks: tuple[tuple[int, int], ...]

    def close(self) -> None:
        """Hang up."""
        self.stream.close()


class VmReadPipe(PooledReadPipe[VmConnection]):
    """Reads a peer's blocks out of its address space.

    Args:
        address: As ``shm_address`` writes it.
        facts: What this side expects of the server.
        token: Shared token.
        max_connections: Reads at once; further ones wait.
    """

    kind: ClassVar[str] = "vm"

    def __init__(self, address: str, facts: Facts, token: str | None, *, max_connections: int = 16) -> None:
        def dial(wait: Wait) -> VmConnection:
            return _connect(address, facts, token, wait)

        super().__init__(dial, max_connections=max_connections)

    @classmethod
    def connect(cls, address: str, facts: Facts, token: str | None, wait: Wait) -> VmReadPipe:
        """Connect to a block server's endpoint; the first connection is made at once.

        Raises:
            PipeClosedError: Another host, nobody there, or the kernel forbids it.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """
        pipe = cls(address, facts, token)
        pipe.open_first(wait)
        return pipe

    def request(self, connection: VmConnection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Read over one connection; see :meth:`PooledReadPipe.request`."""
        base, size = connection.blocks[reads.source_shard]
        segments = reads.segments_of(local.shape[1])
        valid: Valid = _generations(connection, reads.remote_ids) == reads.generations
        batch = max(1, BATCH_BYTES // max(1, reads.bytes_per_block(local.shape[1])))
        good = reads.take(valid)
        for at in range(0, len(good), batch):
            wait.check("copying blocks")
            part = good.take(slice(at, at + batch))
            target = int(local.__array_interface__["data"][0])
            here, there = _spans(part, segments, (target, local.shape[1]), (base, size))
            _read(connection, here, there)
        valid &= _generations(connection, reads.remote_ids) == reads.generations
        if connection.stream.peer_gone():
            raise PipeClosedError(f"{connection.stream.peer} went away during a read: its lease on the blocks is over")
        return valid


def send_places(stream: Stream, shards: KVShards, wait: Wait) -> None:
    """Tell a reader where the arenas lie in this process."""
    arenas = [[address_of(arena.blocks), arena.block_bytes] for arena in shards.arenas]
    fields = {"generations": address_of(shards.primary.generations), "blocks": arenas}
    send_control(stream, FrameKind.WELCOME, fields, wait)


def _connect(address: str, facts: Facts, token: str | None, wait: Wait) -> VmConnection:
    reason, name = shm_obstacle(address)
    if reason:
        raise PipeClosedError(reason)
    stream = connect_unix(name, wait)
    try:
        require_same_user(stream, token)
        theirs = greet_as_client(stream, token, wait, purpose=PURPOSE_READ, facts=facts)
        assert theirs is not None
        fields = recv_control(stream, FrameKind.WELCOME, wait)
        packed = stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = int(struct.unpack("3i", packed)[0])
        if pid <= 0:
            raise PipeClosedError("the peer's process cannot be seen from here (another pid namespace)")
        places = _parse(fields, theirs.tp_size * theirs.pp_size)
        connection = VmConnection(stream, pid, *places)
        _generations(connection, np.zeros(1, np.int64))  # whether the kernel allows it at all
    except BaseException:
        stream.close()
        raise
    return connection


def _parse(fields: dict[str, Any], num_ranks: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    generations, blocks = fields.get("generations"), fields.get("blocks")
    numbers: list[Any] = [generations]
    if isinstance(blocks, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in blocks):
        numbers += [number for pair in blocks for number in pair]
    right = len(numbers) == 1 + 2 * num_ranks and all(type(n) is int and 0 < n < _MAX_ADDRESS for n in numbers)
    if not right:
        raise BadFrameError("the peer's places are malformed", field="blocks")
    return numbers[0], tuple(zip(numbers[1::2], numbers[2::2], strict=True))


def _generations(connection: VmConnection, ids: Ids) -> Generations:
    out = np.empty(len(ids), np.uint64)
    if len(ids):
        there = np.stack((np.uint64(connection.generations) + ids.astype(np.uint64) * np.uint64(8),) * 2, axis=1)
        there[:, 1] = 8
        _read(connection, np.array([[address_of(out), out.nbytes]], np.uint64), there)
    return out


def _spans(
    reads: BlockReads, segments: Segments, local: tuple[int, int], remote: tuple[int, int]
) -> tuple[Spans, Spans]:
    """Where bytes go and where they are; neighbours among whole blocks are joined."""
    if len(segments) == 1 and int(segments[0, 2]) == local[1] == remote[1]:
        runs = merge_runs(reads.remote_ids, reads.local_ids)
        to, source, sizes = runs[:, 0] * local[1], runs[:, 1] * remote[1], runs[:, 2] * local[1]
    else:
        to = (reads.local_ids[:, None] * local[1] + segments[:, 1]).ravel()
        source = (reads.remote_ids[:, None] * remote[1] + segments[:, 0]).ravel()
        sizes = np.broadcast_to(segments[:, 2], (len(reads), len(segments))).ravel()
    here = np.stack((to + local[0], sizes), axis=1).astype(np.uint64)
    return here, np.stack((source + remote[0], sizes), axis=1).astype(np.uint64)


def _read(connection: VmConnection, here: Spans, there: Spans) -> None:
    """Copy spans of the peer's memory; one local span may take many remote ones.

    Raises:
        PipeClosedError: The process is gone, its memory is, or the kernel forbids it.
    """
    one = len(here) == 1
    at = 0
    for first in range(0, len(there), _IOV_MAX):
        source = np.ascontiguousarray(there[first : first + _IOV_MAX])
        wanted = int(source[:, 1].sum())
        target = here[first : first + _IOV_MAX]
        if one:
            target = np.array([[int(here[0, 0]) + at, wanted]], np.uint64)
        target = np.ascontiguousarray(target)
        got, code = _readv()(connection.pid, address_of(target), len(target), address_of(source), len(source))
        at += wanted
        if got != wanted:
            raise PipeClosedError(_reason(connection.pid, got, code))


def _reason(pid: int, got: int, code: int) -> str:
    if got >= 0:
        return f"process {pid} let go of its memory during a read"
    if code == errno.EPERM:
        return f"the kernel forbids reading the memory of process {pid} (see kernel.yama.ptrace_scope)"
    return f"the memory of process {pid} cannot be read: {os.strerror(code)}"


@functools.cache
def _readv() -> Callable[[int, int, int, int, int], tuple[int, int]]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t

    def call(pid: int, local: int, num_local: int, remote: int, num_remote: int) -> tuple[int, int]:
        got = int(function(pid, local, num_local, remote, num_remote, 0))
        return got, ctypes.get_errno()

    return call
