"""Message pipes over shared memory: per direction a ring in a sealed memfd, and a socket that says how far it is.

The sender copies into the ring and rings a doorbell (bytes written, u64) on the socket; the receiver copies out and
sends credit (bytes freed, u64) back. The socket orders memory, blocks, and tells of the peer's death; rings and sockets
are passed as descriptors over an abstract Unix socket, so nothing has a name and nothing is left after SIGKILL.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import time
from typing import ClassVar

import numpy as np

from baton.errors import BatonError, InvalidRequestError, PipeClosedError
from baton.kv_transfer.pipes.base import MAX_MESSAGE_BYTES, PipeListener
from baton.kv_transfer.pipes.ring import MAX_RING_BYTES, MIN_RING_BYTES, Ring, RingReceiver, RingSender
from baton.kv_transfer.pipes.shm_read import (
    recv_descriptors,
    require_same_user,
    send_descriptors,
    shm_address,
    shm_obstacle,
)
from baton.kv_transfer.pipes.stream import StreamPipe
from baton.kv_transfer.pipes.tcp import HANDSHAKE_S, accept_stream, close_listener, greet
from baton.kv_transfer.protocol.deadline import Flag, Wait
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.handshake import PURPOSE_MESSAGES, greet_as_client
from baton.kv_transfer.protocol.sockets import Stream, connect_unix

RING_BYTES = 8 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedRing(Ring):
    """A ring in memory that both processes map."""

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8))

    @classmethod
    def create(cls, size: int) -> tuple[SharedRing, int]:
        """Make a ring and a file descriptor of its memory, which the caller closes.

        Raises:
            InvalidRequestError: The size is out of bounds.
        """
        if not MIN_RING_BYTES <= size <= MAX_RING_BYTES:
            raise InvalidRequestError(
                f"a ring has {MIN_RING_BYTES} to {MAX_RING_BYTES} bytes, not {size}", field="ring_bytes"
            )
        fd = os.memfd_create("baton-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, size), fd

    @classmethod
    def attach(cls, fd: int) -> SharedRing:
        """Map a ring that a peer passed.

        Raises:
            BadFrameError: It is no sealed memory of a size within bounds.
        """
        try:
            size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise BadFrameError("the peer passed something that is no ring") from error
        if seals & _SEALS != _SEALS or not MIN_RING_BYTES <= size <= MAX_RING_BYTES:
            raise BadFrameError(f"the peer passed a ring of {size} bytes, or one that is not sealed")
        return cls(fd, size)


class ShmPipe(StreamPipe):
    """A pipe over two rings."""

    kind: ClassVar[str] = "shm"

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        deadline: float,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        ring_bytes: int = RING_BYTES,
    ) -> ShmPipe:
        """Connect to a :class:`ShmPipeListener`; this side makes the rings.

        Raises:
            PipeClosedError: Another host, or nobody there.
            UnauthenticatedError: Another user without a token, or the tokens differ.
            DeadlineError: It took too long.
        """
        reason, name = shm_obstacle(address)
        if reason:
            raise PipeClosedError(reason)
        wait = Wait(deadline)
        control = connect_unix(name, wait)
        try:
            require_same_user(control, token)
            greet_as_client(control, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
            return cls._offer_rings(control, ring_bytes, max_message_bytes)
        finally:
            control.close()

    @classmethod
    def _offer_rings(cls, control: Stream, ring_bytes: int, max_message_bytes: int) -> ShmPipe:
        passed: list[int] = []
        doorbells: list[Stream] = []
        rings: list[SharedRing] = []
        try:
            for _ in range(2):
                ring, fd = SharedRing.create(ring_bytes)
                mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                rings.append(ring)
                doorbells.append(Stream(mine, peer=control.peer))
                passed += [fd, theirs.detach()]
            send_descriptors(control, passed)
        except BaseException:
            for stream in doorbells:
                stream.close()
            raise
        finally:
            for fd in passed:
                os.close(fd)
        out, back = RingSender(rings[0], doorbells[0]), RingReceiver(rings[1], doorbells[1])
        return cls(out, back, max_message_bytes=max_message_bytes)

    @classmethod
    def take_rings(cls, control: Stream, wait: Wait, *, max_message_bytes: int) -> ShmPipe:
        """Take the rings that a connecting peer made.

        Raises:
            BadFrameError: They are none.
        """
        fds = recv_descriptors(control, 4, wait)
        doorbells: list[Stream] = []
        try:
            incoming, outgoing = SharedRing.attach(fds[0]), SharedRing.attach(fds[2])
            for fd in (fds[1], fds[3]):
                doorbells.append(Stream(_unix_socket(fd), peer=control.peer))
        except BaseException:
            for stream in doorbells:
                stream.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return cls(
            RingSender(outgoing, doorbells[1]),
            RingReceiver(incoming, doorbells[0]),
            max_message_bytes=max_message_bytes,
        )


class ShmPipeListener(PipeListener):
    """Listens for message pipes from the same host.

    Args:
        token: Shared token; without one, only the same user may connect.
        max_message_bytes: Bound on the messages of its pipes.
    """

    kind: ClassVar[str] = "shm"

    def __init__(self, *, token: str | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._token, self._max = token, max_message_bytes
        name = f"baton-pipe-{secrets.token_hex(12)}"
        self.address = shm_address(name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + name)
        self._socket.listen()

    def accept(self, *, deadline: float, cancelled: Flag | None = None) -> ShmPipe:
        """Return the next pipe; see :meth:`PipeListener.accept`."""
        while True:
            control = accept_stream(self._socket, Wait(deadline, cancelled), "shm peer")
            wait = Wait(min(deadline, time.monotonic() + HANDSHAKE_S), cancelled)
            try:
                require_same_user(control, self._token)
                if greet(control, self._token, wait):
                    return ShmPipe.take_rings(control, wait, max_message_bytes=self._max)
            except BatonError:
                Wait(deadline, cancelled).check("waiting for a pipe")  # ours is over; else the peer's was
            finally:
                control.close()

    def close(self) -> None:
        """Stop listening."""
        close_listener(self._socket)


def _unix_socket(fd: int) -> socket.socket:
    """Own a copy of a passed socket.

    Raises:
        BadFrameError: It is none.
    """
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise BadFrameError("the peer passed something that is no socket") from error
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.close()
        raise BadFrameError("the peer passed a socket of another kind")
    return sock
