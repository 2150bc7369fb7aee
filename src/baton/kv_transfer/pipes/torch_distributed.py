"""Reads of a peer's blocks through torch.distributed: requests and answers as over TCP, big answers through a group.

gloo has no one-sided operations: the owner's serving thread sends what was asked for, scatter to gather, with the same
generations before and after, and the same checksums.

Each connection has a process group of two, made directly: no global state, no port of a store. The addresses that a
store would carry go over the connection. gloo cannot call an operation off, so the two ends post one only when the
other is about to post its counterpart: the reader posts a piece's receive and gives credit for it on the connection;
the sender posts the send when it has the credit. Pieces lie in memory of the group's own, so one that is cut off
touches no block.

NCCL moves device memory only; it is another backend of the same group once arenas lie there.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from baton.background import BackgroundThread
from baton.errors import BatonError, ConfigError, PipeClosedError
from baton.kv_transfer.pipes.base import PipeKind, PipeOptions, Served, TcpOptions
from baton.kv_transfer.pipes.pool import Connection, PooledReadPipe
from baton.kv_transfer.pipes.read_server import send_blocks, serve_reads
from baton.kv_transfer.pipes.tcp import TcpServer, dial_reader, request_blocks
from baton.kv_transfer.streams import TICK_S, Buffer, Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid
from baton.kv_transfer.wire import BadFrameError, Facts, FrameKind, recv_control, send_control

KV_RANKS = {"prefill": 0, "decode": 1}
"""Ranks by role: the listener, whose KV is asked for, is 0; the caller is 1."""
EAGER_BYTES = 64 << 10
"""From this many bytes of blocks on they go through the group; both ends must agree."""
PIECE_BYTES = 1 << 20
_SLOTS = 4
"""Pieces under way at once."""
_MAX_CONNECTIONS = 4
_CREDIT = b"+"
_MAX_KEYS = 64
_TRIES = 4
"""How often gloo tries to connect, for so long each time; it cannot be interrupted."""
_MAX_VALUE_BYTES = 16 << 10
_SLOWEST_BYTES_PER_S = 10e6
"""A reader that takes less for long is given up."""


class StreamStore(Store):
    """What gloo asks of a store, between two processes, over their connection."""

    def __init__(self, stream: Stream, wait: Wait) -> None:
        super().__init__()
        self._stream = stream
        self._wait = wait
        self._values: dict[str, bytes] = {}
        self._peer_ready = False

    def set(self, key: str, value: Any) -> None:
        """Keep a value and tell the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        send_control(self._stream, FrameKind.HELLO, {"key": key, "value": data.hex()}, self._wait)

    def get(self, key: str) -> bytes:
        """Return a value, once one of the two has set it."""
        while key not in self._values:
            self._recv_entry()
        return self._values[key]

    def wait(self, keys: Any, timeout: Any = None) -> None:
        """Block until all of the keys are set."""
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Do nothing: the deadline of the connection is what counts."""

    @property
    def timeout(self) -> datetime.timedelta:
        """What is left of the connection's time."""
        return _time_left(self._wait)

    def finish(self) -> None:
        """Tell the peer that this end needs nothing more, and wait until it says the same."""
        send_control(self._stream, FrameKind.HELLO, {"ready": True}, self._wait)
        while not self._peer_ready:
            self._recv_entry()

    def _recv_entry(self) -> None:
        fields = recv_control(self._stream, FrameKind.HELLO, self._wait)
        if self._peer_ready:
            raise BadFrameError("the peer said more after it was ready")
        if fields.get("ready") is True:
            self._peer_ready = True
            return
        key, value = _parse_entry(fields)
        if len(self._values) >= _MAX_KEYS:
            raise BadFrameError("the peer sets too many keys")
        self._values[key] = value


class Group:
    """The two ends' process group, with memory of its own that pieces go from and into.

    gloo listens on the address that the connection came in by, or went out by, and on no other. Operations are waited
    for in a thread of the group's own, so that a wait can be cancelled although gloo's cannot.

    Args:
        stream: The connection; the addresses go over it first.
        wait: For the peer to do the same.
        is_client: Whether this is the client's end; ranks are as in ``KV_RANKS``.

    Raises:
        ConfigError: gloo cannot bind to that address.
        PipeClosedError: The peer went away.
        DeadlineError: It took too long.
    """

    def __init__(self, stream: Stream, wait: Wait, *, is_client: bool) -> None:
        self._stream = stream
        self.rank = KV_RANKS["decode" if is_client else "prefill"]
        self._pieces: list[Bytes] = []
        self._work: queue.SimpleQueue[tuple[Any, datetime.timedelta, queue.SimpleQueue[str]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        store = StreamStore(stream, wait)
        with stream.in_use():
            host = str(stream.sock.getsockname()[0])
        gloo: Any = ProcessGroupGloo  # its type description lacks the options
        options = gloo._Options()
        try:
            options._devices = [gloo.create_device(hostname=host)]
        except RuntimeError as error:
            raise ConfigError(f"gloo cannot bind to {host}: {error}", field="pipes") from error
        options._timeout = _time_left(wait) / _TRIES
        options._threads = 1
        try:
            self._group: Any = gloo(store, self.rank, 2, options)
        except RuntimeError as error:
            if isinstance(error.__cause__, BatonError):
                raise error.__cause__ from None
            wait.check("making a gloo group")
            raise PipeClosedError(f"gloo does not reach {stream.peer}: {_first_line(error)}") from error
        store.finish()

    def send(self, head: Sequence[Buffer], data: Sequence[Buffer], wait: Wait) -> None:
        """Send an answer: small ones over the connection as they are, else the data in pieces, each with credit."""
        stream = self._stream
        total = _total_bytes(data)
        if total < EAGER_BYTES:
            stream.send_all([*head, *data], wait, "sending blocks")
            return
        stream.send_all(head, wait, "sending blocks")
        source = _Cursor(data)
        under_way: deque[Any] = deque()
        for number, size in enumerate(_piece_sizes(total)):
            if len(under_way) == _SLOTS:
                self._finish(under_way.popleft(), wait)
            wait.check("sending blocks")
            piece = self._piece(number, size)
            at = 0
            for part in source.next_parts(size):
                piece[at : at + len(part)] = part
                at += len(part)
            if stream.recv_exact(1, wait, "waiting for the receiver") != _CREDIT:
                raise BadFrameError("the peer gave something else than credit")
            under_way.append(self._post(piece, wait, send=True))
        while under_way:
            self._finish(under_way.popleft(), wait)

    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Receive what :meth:`send` sends; a piece is copied out when it is whole."""
        stream = self._stream
        total = _total_bytes(views)
        if total < EAGER_BYTES:
            stream.recv_into(views, wait, "receiving blocks")
            return
        target = _Cursor(views)
        posted: deque[tuple[Bytes, Any]] = deque()
        for number, size in enumerate(_piece_sizes(total)):
            if len(posted) == _SLOTS:
                self._copy_piece(*posted.popleft(), target, wait)
            wait.check("receiving blocks")
            piece = self._piece(number, size)
            posted.append((piece, self._post(piece, wait, send=False)))
            stream.send_all([_CREDIT], wait, "receiving blocks")
        while posted:
            self._copy_piece(*posted.popleft(), target, wait)

    def close(self) -> None:
        """End the group and its thread; harmless if repeated."""
        self._group = None
        self._pieces = []
        self._work.put(None)

    def _copy_piece(self, piece: Bytes, work: Any, target: _Cursor, wait: Wait) -> None:
        self._finish(work, wait)
        at = 0
        for part in target.next_parts(len(piece)):
            part[:] = piece[at : at + len(part)]
            at += len(part)

    def _piece(self, number: int, size: int) -> Bytes:
        """Return memory for the first ``size`` bytes of a piece."""
        if not self._pieces:
            self._pieces = [np.empty(PIECE_BYTES, dtype=np.uint8) for _ in range(_SLOTS)]
        return self._pieces[number % _SLOTS][:size]

    def _post(self, piece: Bytes, wait: Wait, *, send: bool) -> Any:
        """Begin to send or to receive a piece; returns what :meth:`_finish` takes."""
        group = self._group
        if group is None:
            raise PipeClosedError("the pipe was closed")
        try:
            return (group.send if send else group.recv)([torch.from_numpy(piece)], 1 - self.rank, 0)
        except RuntimeError as error:
            wait.check("posting to gloo")
            raise PipeClosedError(f"gloo lost its peer: {_first_line(error)}") from error

    def _finish(self, work: Any, wait: Wait) -> None:
        """Block until an operation has ended.

        Raises:
            PipeClosedError: The peer is gone, or this side's pipe was closed; the operation may still be under way.
            DeadlineError, CancelledError: As their names say; likewise.
        """
        if self._thread is None:
            self._thread = BackgroundThread("baton-gloo", self._wait_for_work)
            self._thread.start()
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._work.put((work, _time_left(wait), done))
        while True:
            try:
                failure = done.get(timeout=TICK_S)
            except queue.Empty:
                wait.check("moving bytes through gloo")
                if self._stream.peer_gone():
                    raise PipeClosedError(f"{self._stream.peer} went away in the middle of a read") from None
                continue
            if failure:
                wait.check("moving bytes through gloo")
                raise PipeClosedError(f"gloo lost {self._stream.peer}: {failure}")
            wait.record_progress()
            return

    def _wait_for_work(self) -> None:
        while (item := self._work.get()) is not None:
            work, timeout, done = item
            try:
                work.wait(timeout)
            except Exception as error:
                done.put(_first_line(error))
            else:
                done.put("")
            del work, item  # gloo's buffers and sockets end with the last reference


@dataclass(frozen=True, slots=True, eq=False)
class GlooConnection(Connection):
    """A connection to a block server, with a group."""

    group: Group

    def close(self) -> None:
        self.stream.close()
        self.group.close()


class GlooReadPipe(PooledReadPipe[GlooConnection]):
    """Reads a peer's blocks through groups of two.

    Args:
        address: Where the block server listens.
        facts: Facts that the server has to confirm in the handshake.
        options: Token, and whether to ask for checksums.
    """

    kind: ClassVar[str] = "gloo"

    def __init__(self, address: str, facts: Facts, options: PipeOptions) -> None:
        def dial(wait: Wait) -> GlooConnection:
            stream = dial_reader(address, facts, options.token, wait)
            with stream.closed_on_error():
                return GlooConnection(stream, Group(stream, wait, is_client=True))

        super().__init__(dial, max_connections=_MAX_CONNECTIONS)
        self._options = TcpOptions(checksums=options.tcp.checksums)

    def request(self, connection: GlooConnection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        recv = connection.group.recv
        return request_blocks(connection.stream, reads, local, wait, options=self._options, recv=recv)


class GlooServer(TcpServer):
    """Makes a group with each reader, and sends blocks through it."""

    def serve(self, stream: Stream, wait: Wait) -> None:
        """Make the group and send blocks; see :meth:`SocketPipeServer.serve`."""
        group = Group(stream, wait, is_client=False)
        limits = self._served.limits

        def send(head: Sequence[Buffer], data: Sequence[Buffer], wait: Wait) -> None:
            patience = limits.frame_s + _total_bytes(data) / _SLOWEST_BYTES_PER_S
            group.send(head, data, Wait(time.monotonic() + patience))

        def answer(reads: BlockReads, checksums: bool) -> None:
            send_blocks(stream, self._served.shards, reads, limits, checksums=checksums, send=send)

        try:
            serve_reads(stream, self._served.shards, limits, answer)
        finally:
            stream.close()  # first, so that the other end does not wait for what does not come
            group.close()


class GlooKind(PipeKind):
    """Pipes over torch.distributed's gloo."""

    name: ClassVar[str] = "gloo"
    serves_host_memory_only: ClassVar[bool] = True

    @classmethod
    def obstacle(cls, options: PipeOptions) -> str:
        """A torch that was built with gloo is needed."""
        if dist.is_available() and dist.is_gloo_available():
            return ""
        return "the gloo pipe needs a torch that was built with gloo, which this one was not: pip install torch"

    def connect(self, address: str, facts: Facts, wait: Wait) -> GlooReadPipe:
        if reason := self.obstacle(self.options):
            raise ConfigError(reason, field="pipes")
        pipe = GlooReadPipe(address, facts, self.options)
        pipe.open_first(wait)
        return pipe

    def listen(self, served: Served) -> GlooServer:
        return GlooServer(served, self.options)


class _Cursor:
    """Walks over buffers as if they were one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._parts = deque(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers if len(buffer))

    def next_parts(self, size: int) -> Iterator[Bytes]:
        """Return the next ``size`` bytes, as the parts they lie in."""
        while size:
            part = self._parts.popleft()
            if len(part) > size:
                self._parts.appendleft(part[size:])
                part = part[:size]
            size -= len(part)
            yield part


def _total_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def _piece_sizes(size: int) -> list[int]:
    rest = size % PIECE_BYTES
    return [PIECE_BYTES] * (size // PIECE_BYTES) + ([rest] if rest else [])


def _parse_entry(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    key = fields.get("key")
    value = fields.get("value")
    if not isinstance(key, str) or len(key) > 256 or not isinstance(value, str) or len(value) > 2 * _MAX_VALUE_BYTES:
        raise BadFrameError("a key of the peer's store is malformed", field="key")
    try:
        return key, bytes.fromhex(value)
    except ValueError as error:
        raise BadFrameError("a value of the peer's store is malformed", field="value") from error


def _time_left(wait: Wait) -> datetime.timedelta:
    left = wait.remaining()
    return datetime.timedelta(seconds=600.0 if left is None else max(left, 0.001))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
