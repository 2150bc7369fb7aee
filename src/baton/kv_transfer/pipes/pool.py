"""Reads over a small pool of connections to one peer: what the pipes that ask for their blocks have in common."""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from baton.errors import InvalidRequestError, PipeClosedError
from baton.kv_transfer.pipes.base import ReadPipe
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid
from baton.kv_transfer.wire import BadFrameError, FrameKind, pack_header, recv_header

WORD = struct.Struct("<Q")
"""A progress, in WAIT and PROGRESS frames."""


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """A connection to a block server, handshake done."""

    stream: Stream

    def close(self) -> None:
        """Close the connection; harmless if repeated."""
        self.stream.close()


C = TypeVar("C", bound=Connection)


class PooledReadPipe(ReadPipe, Generic[C]):
    """Reads a peer's blocks over a small pool of connections.

    Args:
        dial: Opens one more connection, handshake included.
        max_connections: Connections open at once; further reads wait for one.
    """

    def __init__(self, dial: Callable[[Wait], C], *, max_connections: int) -> None:
        self._dial = dial
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._idle: list[C] = []
        self._open: set[C] = set()
        self._dialling = 0
        self._closed = False

    @abstractmethod
    def request(self, connection: C, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Read at most ``reads.blocks_per_request`` blocks over one connection; see :meth:`ReadPipe.read`.

        Raises:
            InvalidRequestError: Refused as a whole, and the connection is in step; after other errors it is closed.
        """

    def open_first(self, wait: Wait) -> None:
        """Make the first connection, so that a peer that cannot be reached is known at once; closes on errors."""
        try:
            self._release(self._acquire(wait))
        except BaseException:
            self.close()
            raise

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        return self.in_requests(reads, wait, lambda connection, part: self.request(connection, part, local, wait))

    def in_requests(self, reads: BlockReads, wait: Wait, request: Callable[[C, BlockReads], Valid]) -> Valid:
        """Make a read over one connection, in requests of at most ``reads.blocks_per_request`` blocks."""
        most = reads.blocks_per_request
        with self.connection(wait, in_step_if_refused=True) as connection:
            return np.concatenate(
                [np.zeros(0, dtype=np.bool_)]
                + [request(connection, reads.select(slice(at, at + most))) for at in range(0, len(reads), most)]
            )

    def wait_ready(self, value: int, wait: Wait) -> int:
        with self.connection(wait) as connection:
            request_progress(connection.stream, value, wait)
            return recv_progress(connection.stream, wait)

    @contextmanager
    def connection(self, wait: Wait, *, in_step_if_refused: bool = False) -> Iterator[C]:
        """Lend a connection; it is closed if the block raises, as an answer may be under way.

        Args:
            wait: Deadline and cancel flag for getting one.
            in_step_if_refused: A request that the peer refuses as a whole leaves the connection in step.
        """
        connection = self._acquire(wait)
        try:
            yield connection
        except BaseException as error:
            if in_step_if_refused and isinstance(error, InvalidRequestError):
                self._release(connection)
            else:
                self._drop(connection)
            raise
        self._release(connection)

    def alive(self) -> bool:
        with self._changed:
            return not self._closed and any(not each.stream.peer_gone() for each in self._open)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            connections = list(self._open)
            self._open.clear()
            self._idle.clear()
            self._changed.notify_all()
        for connection in connections:
            connection.close()

    def _acquire(self, wait: Wait) -> C:
        with self._changed:
            while True:
                if self._closed:
                    raise PipeClosedError("the pipe was closed")
                while self._idle:
                    connection = self._idle.pop()
                    if not connection.stream.peer_gone():
                        return connection
                    self._open.discard(connection)
                    connection.close()
                if len(self._open) + self._dialling < self._max_connections:
                    self._dialling += 1
                    break
                wait.record_progress()  # others use them: no fault of the peer
                wait.check("waiting for a connection")
                self._changed.wait(wait.nap())
        return self._dial_one(wait)

    def _dial_one(self, wait: Wait) -> C:
        try:
            connection = self._dial(wait)
        except BaseException:
            with self._changed:
                self._dialling -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._dialling -= 1
            if not self._closed:
                self._open.add(connection)
                return connection
        connection.close()
        raise PipeClosedError("the pipe was closed")

    def _release(self, connection: C) -> None:
        with self._changed:
            if connection in self._open:
                self._idle.append(connection)
            self._changed.notify()

    def _drop(self, connection: C) -> None:
        connection.close()
        with self._changed:
            self._open.discard(connection)
            self._changed.notify()


def request_progress(stream: Stream, value: int, wait: Wait) -> None:
    """Ask a block server to say when its computation has come so far; see :func:`recv_progress`.

    Raises:
        BadFrameError: The value is no progress at all.
        PipeClosedError, DeadlineError, CancelledError: As their names say.
    """
    if not 0 <= value < 1 << 64:
        raise BadFrameError(f"a progress of {value} cannot be reached", field="ready")
    stream.send_all([pack_header(FrameKind.WAIT, WORD.size), WORD.pack(value)], wait, "asking for progress")


def recv_progress(stream: Stream, wait: Wait) -> int:
    """Wait for the answer to :func:`request_progress`; returns how far the computation is.

    Raises:
        BadFrameError: The answer is malformed.
        PipeClosedError, DeadlineError, CancelledError: As their names say.
    """
    _, length = recv_header(stream, {FrameKind.PROGRESS: WORD.size}, wait)
    if length != WORD.size:
        raise BadFrameError("a PROGRESS frame has another length")
    (now,) = WORD.unpack(stream.recv_exact(length, wait, "waiting for progress"))
    return int(now)
