"""One-sided reads over shared memory: map the peer's arenas once, then a read is one copy from pool to pool.

The peer passes a read-only descriptor of each of its ranks' arenas (sealed memfds) over an abstract Unix socket that
then stays open: its end reports the peer's death at once. Nothing has a name in a file system, so nothing is left
after SIGKILL.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from pathlib import Path
from typing import ClassVar

from baton.errors import ConfigError, FingerprintMismatchError, PipeClosedError, UnauthenticatedError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import groups_of
from baton.kv_cache.shards import KVShards, shard_layout, shard_specs
from baton.kv_transfer.native_copy import BlockReader, Cast, Line, read_casting
from baton.kv_transfer.pipes.base import CastingReadPipe, PipeKind, PipeOptions, Served, SocketPipeServer
from baton.kv_transfer.streams import TICK_S, Stream, Wait, connect_unix
from baton.kv_transfer.types import BlockReads, Bytes, Valid
from baton.kv_transfer.wire import PURPOSE_READ, BadFrameError, Facts, greet_as_client
from baton.rpc.service_token import Token

MAX_DESCRIPTORS = 253
"""File descriptors that Linux passes with one message."""


class ShmReadPipe(CastingReadPipe):
    """Reads another instance's arenas on the same host."""

    kind: ClassVar[str] = "shm"
    group_bytes: ClassVar[int] = 0

    def __init__(self, stream: Stream, shards: KVShards) -> None:
        self._stream = stream
        self._peer: _Peer | None = _Peer(shards, Line(stream))

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        peer = self._peer
        if peer is None:
            raise PipeClosedError("the pipe was closed")
        return peer.readers[reads.source_shard].read(local, reads, wait)

    def read_cast(self, reads: BlockReads, local: Bytes, wait: Wait) -> Cast:
        peer = self._peer
        if peer is None:
            raise PipeClosedError("the pipe was closed")
        remote = peer.shards.arenas[reads.source_shard].blocks
        cast = read_casting(local, remote, peer.shards.primary.generations, reads, wait)
        if not peer.readers[0].holds():
            raise PipeClosedError(f"{self._stream.peer} went away during a read: its lease on the blocks is over")
        return cast

    def wait_ready(self, value: int, wait: Wait) -> int:
        while True:
            peer = self._peer
            if peer is None or not peer.readers[0].holds():
                raise PipeClosedError(f"{self._stream.peer} is gone")
            if (now := peer.shards.primary.progress.wait(value, TICK_S)) >= value:
                return now
            wait.check("waiting for the computation")

    def alive(self) -> bool:
        peer = self._peer
        return peer is not None and peer.readers[0].holds()

    def close(self) -> None:
        """Close; the mappings go when the last read under way has ended."""
        self._stream.close()
        self._peer = None


class _Peer:
    """What is mapped of the peer; it goes with the last call that uses it."""

    def __init__(self, shards: KVShards, line: Line) -> None:
        self.shards = shards
        generations = shards.primary.generations
        self.readers = [BlockReader(arena.blocks, generations, line) for arena in shards.arenas]


class UnixPipeServer(SocketPipeServer):
    """A serving end on an abstract Unix socket, for processes of one host.

    Args:
        prefix: Prefix of the socket's name.
        token: Shared token; without one, only processes of this user may connect.
    """

    def __init__(self, prefix: str, token: Token | None) -> None:
        self._token = token
        name = f"{prefix}-{secrets.token_hex(12)}"
        self.address = host_address(name)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + name)

    def admit(self, stream: Stream, wait: Wait) -> Stream:
        """Refuse other users, unless a token decides."""
        require_same_user(stream, self._token)
        return stream


class ShmServer(UnixPipeServer):
    """Passes the arenas' descriptors to readers, and holds the line."""

    def __init__(self, served: Served, options: PipeOptions) -> None:
        self._lock = threading.Lock()
        self._fds: list[int] | None = [arena.open_read_only() for arena in served.shards.arenas]
        super().__init__("baton-kv", options.token)

    def serve(self, stream: Stream, wait: Wait) -> None:
        """Pass the descriptors; see :meth:`SocketPipeServer.serve`."""
        with self._lock:
            if self._fds is None:
                raise PipeClosedError("the block server was closed")
            send_descriptors(stream, self._fds)
        stream.wait_readable(Wait(), "holding a reader's line")  # its end, or a word out of turn: over

    def close(self) -> None:
        """Close the socket and this end's descriptors."""
        super().close()
        with self._lock:
            fds = self._fds
            self._fds = None
        for fd in fds or ():
            os.close(fd)


class ShmKind(PipeKind):
    """Pipes over shared memory."""

    name: ClassVar[str] = "shm"
    serves_host_memory_only: ClassVar[bool] = True

    def connect(self, address: str, facts: Facts, wait: Wait) -> ShmReadPipe:
        stream, theirs = dial_unix(address, facts, self.options.token, wait)
        with stream.closed_on_error():
            fds = recv_descriptors(stream, theirs.tp_size * theirs.pp_size, wait)
            return ShmReadPipe(stream, _attach_all(fds, theirs, facts))

    def listen(self, served: Served) -> ShmServer:
        return ShmServer(served, self.options)


def dial_unix(address: str, facts: Facts, token: Token | None, wait: Wait) -> tuple[Stream, Fingerprint]:
    """Connect to a :class:`UnixPipeServer`, and shake hands; returns the connection and the peer's fingerprint.

    Errors are those of :meth:`PipeKind.connect`.
    """
    stream = connect_unix(socket_name(address), wait)
    with stream.closed_on_error():
        require_same_user(stream, token)
        theirs = greet_as_client(stream, token, wait, purpose=PURPOSE_READ, facts=facts)
        assert theirs is not None
    return stream, theirs


def require_same_user(stream: Stream, token: Token | None) -> None:
    """Refuse a peer of another user on this host, unless a token decides.

    Raises:
        UnauthenticatedError: The peer runs as another user.
    """
    packed = stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", packed)[1]
    if token is None and uid != os.geteuid():
        raise UnauthenticatedError(f"the peer runs as user {uid}, this side as {os.geteuid()}, and there is no token")


def send_descriptors(stream: Stream, fds: list[int]) -> None:
    """Pass file descriptors with one byte."""
    try:
        socket.send_fds(stream.sock, [b"F"], fds)
    except OSError as error:
        raise PipeClosedError(f"{stream.peer} hung up: {error.strerror or error}") from error


def recv_descriptors(stream: Stream, count: int, wait: Wait) -> list[int]:
    """Receive exactly ``count`` file descriptors.

    Raises:
        PipeClosedError: The peer is gone, or one message cannot pass so many.
        BadFrameError: It passed something else.
    """
    if count > MAX_DESCRIPTORS:
        raise PipeClosedError(f"{count} ranks are more than one message passes descriptors of")
    stream.wait_readable(wait, "waiting for a file descriptor")
    try:
        data, fds, _, _ = socket.recv_fds(stream.sock, 1, count + 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise PipeClosedError(f"{stream.peer} hung up: {error.strerror or error}") from error
    if data == b"F" and len(fds) == count:
        return fds
    for fd in fds:
        os.close(fd)
    if not data:
        raise PipeClosedError(f"{stream.peer} hung up in the handshake")
    raise BadFrameError(f"the peer passed {len(fds)} file descriptors for {count}")


def _attach_all(fds: list[int], theirs: Fingerprint, facts: Facts) -> KVShards:
    arenas: list[HostArena] = []
    try:
        groups = groups_of(theirs.layer_groups)
        for spec, fd in zip(shard_specs(theirs.tp_size, theirs.pp_size), fds, strict=True):
            block_bytes = shard_layout(theirs.geometry, spec, theirs.block_size, groups).block_bytes
            arenas.append(_attach(fd, facts.num_blocks, block_bytes))
    finally:
        for fd in fds[len(arenas) :]:
            os.close(fd)
    if arenas[0].epoch != facts.epoch:
        raise BadFrameError("the arena passed has another epoch than announced", field="epoch")
    return KVShards(arenas)


def _attach(fd: int, num_blocks: int, block_bytes: int) -> HostArena:
    """Map an arena; its descriptor is closed where that succeeds, the mapping keeps the memory."""
    try:
        arena = HostArena.attach(fd)
    except (ConfigError, OSError, ValueError) as error:
        raise BadFrameError(f"the peer passed something that is no arena: {error}") from error
    for name, expected in (("num_blocks", num_blocks), ("block_bytes", block_bytes)):
        if getattr(arena, name) != expected:
            raise FingerprintMismatchError(f"the arena passed has another {name} than announced", field=name)
    arena.close()
    return arena


def host_address(name: str) -> str:
    """Return the address of an abstract Unix socket: host (boot id), user and name, so that others see whose it is."""
    return f"{_boot_id()}/{os.geteuid()}/{name}"


def socket_name(address: str) -> str:
    """Return the name of an address's socket.

    Raises:
        PipeClosedError: It cannot be reached from here.
    """
    parts = address.split("/")
    if len(parts) != 3:
        raise PipeClosedError(f"{address!r} is not a shared-memory address")
    if parts[0] != _boot_id():
        raise PipeClosedError("shared memory of another host")
    return parts[2]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
