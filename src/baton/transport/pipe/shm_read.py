"""One-sided reads over shared memory: map the peer's arena once, then a read is one copy from pool to pool.

The peer passes a read-only descriptor of its arena (a sealed memfd) over an abstract Unix socket that then stays open:
its end tells of the peer's death at once. Nothing has a name in a file system, so nothing is left after SIGKILL.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import ClassVar

from baton.errors import ConfigError, FingerprintMismatchError, PipeClosedError, UnauthenticatedError
from baton.kv.arena import KVArena
from baton.transport.block_types import BlockReads, Bytes, Valid, current
from baton.transport.copying import BlockCopier
from baton.transport.handshake import PURPOSE_READ, Facts, greet_as_client
from baton.transport.pipe.base import ReadPipe
from baton.transport.sockets import Stream, connect_unix
from baton.transport.waiting import Wait
from baton.transport.wire import BadFrameError


class ShmReadPipe(ReadPipe):
    """Reads another process's arena on the same host."""

    kind: ClassVar[str] = "shm"

    def __init__(self, stream: Stream, arena: KVArena, copier: BlockCopier) -> None:
        self._stream, self._copier = stream, copier
        self._arena: KVArena | None = arena

    @classmethod
    def connect(cls, address: str, facts: Facts, token: str | None, copier: BlockCopier, wait: Wait) -> ShmReadPipe:
        """Connect to a block server's shared-memory endpoint.

        Args:
            address: As :func:`shm_address` writes it.
            facts: What this side expects of the server.
            token: The shared token.
            copier: Does the copies.
            wait: For the whole handshake.

        Raises:
            PipeClosedError: Another host or nobody there.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """
        reason, name = shm_obstacle(address)
        if reason:
            raise PipeClosedError(reason)
        stream = connect_unix(name, wait)
        try:
            require_same_user(stream, token)
            greet_as_client(stream, token, wait, purpose=PURPOSE_READ, facts=facts)
            (fd,) = recv_descriptors(stream, 1, wait)
            arena = _attach(fd, facts)
        except BaseException:
            stream.close()
            raise
        return cls(stream, arena, copier)

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; see :meth:`ReadPipe.read`."""
        arena = self._arena
        if arena is None or self._stream.peer_gone():
            raise PipeClosedError(f"{self._stream.peer} is gone")
        before = current(arena, reads)
        good = reads if before.all() else reads.take(before)
        self._copier.copy(local, arena.blocks, good.remote_ids, good.local_ids, wait)
        valid = before & current(arena, reads)
        if self._stream.peer_gone():
            raise PipeClosedError(f"{self._stream.peer} went away during a read: its lease on the blocks is over")
        return valid

    def alive(self) -> bool:
        """Whether the peer is there; never blocks."""
        return not self._stream.peer_gone()

    def close(self) -> None:
        """Close; the mapping goes when the last read under way has ended."""
        self._stream.close()
        self._arena = None


def shm_address(name: str) -> str:
    """Write the address of an abstract socket: host (boot id), user and name, so that others see it isn't for them."""
    return f"{_boot_id()}/{os.geteuid()}/{name}"


def shm_obstacle(address: str) -> tuple[str, str]:
    """Say why an address cannot be reached from here (empty: it may be) and its socket's name."""
    parts = address.split("/")
    if len(parts) != 3:
        return f"{address!r} is not a shared-memory address", ""
    if parts[0] != _boot_id():
        return "shared memory of another host", ""
    return "", parts[2]


def require_same_user(stream: Stream, token: str | None) -> None:
    """Refuse a peer of another user on this host, unless a token decides.

    Raises:
        UnauthenticatedError: The peer runs as somebody else.
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
        PipeClosedError: The peer is gone.
        BadFrameError: It passed something else.
    """
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


def _attach(fd: int, facts: Facts) -> KVArena:
    try:
        arena = KVArena.attach(fd)
    except (ConfigError, OSError, ValueError) as error:
        os.close(fd)
        raise BadFrameError(f"the peer passed something that is no arena: {error}") from error
    arena.close()  # the mapping keeps the memory
    for name in ("num_blocks", "block_bytes"):
        if getattr(arena, name) != getattr(facts, name):
            raise FingerprintMismatchError(f"the arena passed has another {name} than announced", field=name)
    if arena.epoch != facts.epoch:
        raise BadFrameError("the arena passed has another epoch than announced", field="epoch")
    return arena


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
