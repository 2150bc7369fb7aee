"""Whole messages of tensors, in order, between two endpoints: inside one process, or over TCP.

::

    TENSORS frame: head (count u32 | none u8 | bytes of descriptions u32)
                   | per tensor: dtype u8, dims u8, shape u64[dims] | the tensors' bytes in order

Lengths are checked against the bounds, and against each other, before memory is allocated. KV blocks don't travel
this way: they are read (:mod:`baton.kv_transfer.pipes.base`).
"""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from baton.errors import InvalidRequestError, PipeClosedError
from baton.kv_transfer.protocol.connect import accept_stream, bind_tcp, close_listener, connect_tcp, join_address
from baton.kv_transfer.protocol.deadline import TICK_S, Flag, Wait
from baton.kv_transfer.protocol.frames import HEADER, BadFrameError, FrameKind, pack_header, parse_header
from baton.kv_transfer.protocol.handshake import HANDSHAKE_S, PURPOSE_MESSAGES, greet_as_client, greet_or_refuse
from baton.kv_transfer.protocol.sockets import Stream
from baton.rpc.service_token import Token

MAX_TENSORS = 4096
MAX_DIMS = 16
MAX_MESSAGE_BYTES = 4 << 30
"""Default bound on one message's tensors together."""
QUEUE_BYTES = 64 << 20
"""Bytes one direction of a memory pipe holds before ``send`` waits; a bigger message goes alone."""

DTYPE_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of what may travel; the order is the code on the wire, so new ones go to the end."""

_HEAD = struct.Struct("<IBI")
"""Number of tensors, whether the message is ``None``, bytes of the descriptions that follow."""
_MAX_DESCRIPTIONS = MAX_TENSORS * (2 + 8 * MAX_DIMS)
_DTYPE_NAMES = tuple(DTYPE_SIZES)
_DTYPE_CODES = {name: code for code, name in enumerate(_DTYPE_NAMES)}


@dataclass(frozen=True, slots=True, eq=False)
class WireTensor:
    """A dense, C-ordered tensor as bytes: what pipes move without knowing a tensor library.

    Raises:
        InvalidRequestError: dtype unknown, too many dimensions, or the bytes don't fit the shape.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != tensor_bytes(self.dtype, self.shape):
            raise InvalidRequestError(
                f"a {self.dtype} tensor of shape {self.shape} does not have {self.data.nbytes} bytes", field="tensors"
            )


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor.

    Raises:
        InvalidRequestError: The dtype is unknown, a dimension is negative, or there are too many.
    """
    if dtype not in DTYPE_SIZES:
        raise InvalidRequestError(f"pipes don't carry {dtype} tensors", field="tensors")
    if len(shape) > MAX_DIMS or any(size < 0 for size in shape):
        raise InvalidRequestError(f"a tensor of shape {tuple(shape)[:20]} cannot be sent", field="tensors")
    count = DTYPE_SIZES[dtype]
    for size in shape:
        count *= size
    return count


class MessagePipe(ABC):
    """A FIFO of messages between two endpoints. Any thread may send, any may receive, at the same time.

    A deadline or cancellation before the first byte of a message leaves the pipe usable; in the middle of one the
    order of bytes is lost, and the pipe closes.
    """

    @abstractmethod
    def send(self, tensors: Sequence[WireTensor] | None, *, deadline: float, cancelled: Flag | None = None) -> None:
        """Send one message; on return the caller may reuse the memory.

        Args:
            tensors: At most ``MAX_TENSORS``; ``None`` ("nothing for you") is a message of its own, unlike ``[]``.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Set by another thread to give up.

        Raises:
            InvalidRequestError: The message is over the pipe's bounds.
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """

    @abstractmethod
    def recv(self, *, deadline: float, cancelled: Flag | None = None) -> list[WireTensor] | None:
        """Receive the next message into fresh memory.

        Raises:
            DeadlineError, CancelledError, PipeClosedError: As their names say.
            TransferError: The peer broke the protocol; the pipe is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close and wake every blocked call; harmless if repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class MemoryMessagePipe(MessagePipe):
    """A pipe to another object of the same process; messages are copied on the way in."""

    def __init__(self, outgoing: _Queue, incoming: _Queue, max_message_bytes: int) -> None:
        self._out, self._in, self._max = outgoing, incoming, max_message_bytes
        self._closed = False

    @classmethod
    def pair(cls, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> tuple[MemoryMessagePipe, MemoryMessagePipe]:
        """Return the two ends of a new pipe."""
        there, back = _Queue(), _Queue()
        return cls(there, back, max_message_bytes), cls(back, there, max_message_bytes)

    def send(self, tensors: Sequence[WireTensor] | None, *, deadline: float, cancelled: Flag | None = None) -> None:
        """Send one message; see :meth:`MessagePipe.send`."""
        size = _check_message(tensors, self._max)
        copies = None if tensors is None else [_copy(tensor) for tensor in tensors]
        self._out.put(copies, size, Wait(deadline, cancelled))

    def recv(self, *, deadline: float, cancelled: Flag | None = None) -> list[WireTensor] | None:
        """Receive the next message; see :meth:`MessagePipe.recv`."""
        if self._closed:
            raise PipeClosedError("the pipe was closed")
        return self._in.get(Wait(deadline, cancelled))

    def close(self) -> None:
        """Close both directions; what was sent before can still be received by the peer."""
        self._closed = True
        self._out.close()
        self._in.close()


class TcpMessagePipe(MessagePipe):
    """A pipe over one connected stream socket."""

    def __init__(self, stream: Stream, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._stream, self._max = stream, max_message_bytes
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    @classmethod
    def connect(
        cls, address: str, *, deadline: float, token: Token | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> TcpMessagePipe:
        """Connect to a :class:`MessageListener`.

        Raises:
            PipeClosedError: Nothing listens there.
            UnauthenticatedError: The tokens differ.
            DeadlineError: It took too long.
        """
        wait = Wait(deadline)
        stream = connect_tcp(address, wait)
        try:
            greet_as_client(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
        except BaseException:
            stream.close()
            raise
        return cls(stream, max_message_bytes=max_message_bytes)

    def send(self, tensors: Sequence[WireTensor] | None, *, deadline: float, cancelled: Flag | None = None) -> None:
        """Send one message; see :meth:`MessagePipe.send`."""
        size = _check_message(tensors, self._max)
        head = describe(tensors)
        data = [tensor.data for tensor in tensors or () if tensor.data.nbytes]
        wait = Wait(deadline, cancelled)
        with self._turn(self._sending, wait, "waiting for another send"):
            self._stream.wait_writable(wait, "waiting to send")
            with self._whole_message():
                header = pack_header(FrameKind.TENSORS, len(head) + size)
                self._stream.send_all([header, head, *data], wait, "sending a message")

    def recv(self, *, deadline: float, cancelled: Flag | None = None) -> list[WireTensor] | None:
        """Receive the next message; see :meth:`MessagePipe.recv`."""
        wait = Wait(deadline, cancelled)
        with self._turn(self._receiving, wait, "waiting for another receive"):
            self._stream.wait_readable(wait, "waiting for a message")
            with self._whole_message():
                return self._recv_message(wait)

    def close(self) -> None:
        """Close both directions."""
        self._stream.close()

    def _recv_message(self, wait: Wait) -> list[WireTensor] | None:
        most = self._max + _HEAD.size + _MAX_DESCRIPTIONS
        _, length = parse_header(self._take(HEADER.size, wait), {FrameKind.TENSORS: most})
        if length < _HEAD.size:
            raise BadFrameError("a message is shorter than its head")
        count, none, described = _HEAD.unpack(self._take(_HEAD.size, wait))
        if none not in (0, 1) or (none and (count or described)) or count > MAX_TENSORS:
            raise BadFrameError(f"a message of {count} tensors")
        if described > min(_MAX_DESCRIPTIONS, length - _HEAD.size):
            raise BadFrameError(f"a message with {described} bytes of descriptions")
        shapes = _parse_descriptions(self._take(described, wait), count)
        sizes = [tensor_bytes(dtype, shape) for dtype, shape in shapes]
        if sum(sizes) > self._max or _HEAD.size + described + sum(sizes) != length:
            raise BadFrameError(f"a message of {length} bytes for tensors of {sum(sizes)}")
        if none:
            return None
        # numpy's memory is not cleared first, unlike bytearray's.
        data = [np.empty(size, dtype=np.uint8).data for size in sizes]
        self._stream.recv_into([view for view in data if view.nbytes], wait, "receiving a message")
        return [WireTensor(dtype, shape, view) for (dtype, shape), view in zip(shapes, data, strict=True)]

    def _take(self, size: int, wait: Wait) -> bytearray:
        return self._stream.recv_exact(size, wait, "receiving a message") if size else bytearray()

    @contextmanager
    def _turn(self, lock: threading.Lock, wait: Wait, what: str) -> Iterator[None]:
        """Hold one direction of the pipe."""
        while not lock.acquire(timeout=min(TICK_S, wait.remaining() or 0.0)):
            self._check_open()
            wait.check(what)
        try:
            self._check_open()
            wait.check(what)
            yield
        finally:
            lock.release()

    @contextmanager
    def _whole_message(self) -> Iterator[None]:
        """Close the pipe if a message breaks off in the middle: its rest could not be told from what follows."""
        try:
            yield
        except InvalidRequestError as error:  # a description that this side's sender never writes
            self.close()
            raise BadFrameError(error.message) from error
        except BaseException:
            self.close()
            raise

    def _check_open(self) -> None:
        if self._stream.closed:
            raise PipeClosedError("the pipe was closed")


class MessageListener:
    """Listens on TCP for message pipes.

    Args:
        host: Address to bind.
        port: 0: any free one.
        token: Shared token.
        max_message_bytes: Bound on the messages of its pipes.

    Attributes:
        address: host:port where peers connect.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: Token | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._token, self._max = token, max_message_bytes
        self._socket = bind_tcp(host, port, token)
        self.address = join_address(host, self._socket.getsockname()[1])
        self._socket.listen()

    def accept(self, *, deadline: float, cancelled: Flag | None = None) -> TcpMessagePipe:
        """Return the next pipe that a peer connected; peers that fail the handshake are sent away.

        Raises:
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """
        while True:
            stream = accept_stream(self._socket, Wait(deadline, cancelled), "tcp peer")
            wait = Wait(min(deadline, time.monotonic() + HANDSHAKE_S), cancelled)
            if greet_or_refuse(stream, self._token, wait):
                return TcpMessagePipe(stream, max_message_bytes=self._max)

    def close(self) -> None:
        """Stop listening; accepted pipes live on."""
        close_listener(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Queue:
    """One direction of a memory pipe, bounded in bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[tuple[list[WireTensor] | None, int]] = deque()
        self._num_bytes = 0
        self._closed = False

    def put(self, message: list[WireTensor] | None, size: int, wait: Wait) -> None:
        with self._changed:
            while not self._closed and self._messages and self._num_bytes + size > QUEUE_BYTES:
                wait.check("waiting for the receiver")
                self._changed.wait(wait.nap())
            if self._closed:
                raise PipeClosedError("the pipe was closed")
            wait.check("sending")
            self._messages.append((message, size))
            self._num_bytes += size
            self._changed.notify_all()

    def get(self, wait: Wait) -> list[WireTensor] | None:
        with self._changed:
            while not self._messages:
                if self._closed:
                    raise PipeClosedError("the pipe was closed")
                wait.check("waiting for a message")
                self._changed.wait(wait.nap())
            message, size = self._messages.popleft()
            self._num_bytes -= size
            self._changed.notify_all()
            return message

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def describe(tensors: Sequence[WireTensor] | None) -> bytes:
    """Write what stands between a message's header and its tensors' bytes."""
    parts = [struct.pack(f"<BB{len(t.shape)}Q", _DTYPE_CODES[t.dtype], len(t.shape), *t.shape) for t in tensors or ()]
    body = b"".join(parts)
    return _HEAD.pack(len(parts), tensors is None, len(body)) + body


def _parse_descriptions(data: bytearray, count: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = []
    at = 0
    for _ in range(count):
        if at + 2 > len(data):
            raise BadFrameError("a message's descriptions are cut off")
        code, dims = data[at], data[at + 1]
        at += 2
        if code >= len(_DTYPE_NAMES) or dims > MAX_DIMS or at + 8 * dims > len(data):
            raise BadFrameError(f"a tensor with dtype code {code} and {dims} dimensions")
        shapes.append((_DTYPE_NAMES[code], struct.unpack_from(f"<{dims}Q", data, at)))
        at += 8 * dims
    if at != len(data):
        raise BadFrameError("a message's descriptions are too long")
    return shapes


def _check_message(tensors: Sequence[WireTensor] | None, max_bytes: int) -> int:
    """Return a message's bytes.

    Raises:
        InvalidRequestError: Too many tensors or bytes.
    """
    if tensors is None:
        return 0
    size = sum(tensor.data.nbytes for tensor in tensors)
    if len(tensors) > MAX_TENSORS or size > max_bytes:
        raise InvalidRequestError(
            f"{len(tensors)} tensors of {size} bytes are over the pipe's bounds of {MAX_TENSORS} and {max_bytes}",
            field="tensors",
        )
    return size


def _copy(tensor: WireTensor) -> WireTensor:
    data = bytearray(tensor.data.cast("B") if tensor.data.nbytes else b"")
    return WireTensor(tensor.dtype, tensor.shape, memoryview(data))
