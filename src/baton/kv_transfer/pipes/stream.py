"""Tensor messages over any ordered channel of bytes: what all pipes between processes have in common.

::

    TENSORS frame: count u32 | none u8 | per tensor: dtype u8, dims u8, shape u64[dims] | the tensors' bytes in order

Lengths are checked against the bounds, and against each other, before memory is taken.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from baton.errors import InvalidRequestError, PipeClosedError
from baton.kv_transfer.pipes.base import (
    DTYPE_SIZES,
    MAX_DIMS,
    MAX_TENSORS,
    Pipe,
    WireTensor,
    check_message,
    tensor_bytes,
)
from baton.kv_transfer.protocol.deadline import TICK_S, Flag, Wait
from baton.kv_transfer.protocol.frames import HEADER, BadFrameError, FrameKind, pack_header, parse_header
from baton.kv_transfer.protocol.sockets import Buffer

_HEAD = struct.Struct("<IBI")
"""Number of tensors, whether the message is ``None``, bytes of the descriptions that follow."""
_MAX_DESCRIPTIONS = MAX_TENSORS * (2 + 8 * MAX_DIMS)
_DTYPE_NAMES = tuple(DTYPE_SIZES)
_DTYPE_CODES = {name: code for code, name in enumerate(_DTYPE_NAMES)}


class ByteChannel(ABC):
    """Moves bytes one way, in order."""

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], wait: Wait) -> None:
        """Send all of the buffers."""

    @abstractmethod
    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Fill all of the views."""

    def send_message(self, head: Sequence[Buffer], data: Sequence[Buffer], wait: Wait) -> None:
        """Send a message's head and then its tensors' bytes; a channel may know a better way for many bytes."""
        self.send([*head, *data], wait)

    def recv_data(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Receive all of one message's tensors' bytes, as :meth:`send_message` sent them."""
        self.recv(views, wait)

    @abstractmethod
    def wait_readable(self, wait: Wait) -> None:
        """Block until something can be received, taking nothing."""

    @abstractmethod
    def wait_writable(self, wait: Wait) -> None:
        """Block until something can be sent, sending nothing."""

    @abstractmethod
    def close(self) -> None:
        """Close and wake whoever is blocked."""

    def release(self) -> None:
        """Give memory back; called once nobody is in the channel any more."""
        return


class StreamPipe(Pipe):
    """Messages over two byte channels (which may be the same object)."""

    def __init__(self, outgoing: ByteChannel, incoming: ByteChannel, *, max_message_bytes: int) -> None:
        self._out, self._in, self._max = outgoing, incoming, max_message_bytes
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = False

    def send(self, tensors: Sequence[WireTensor] | None, *, deadline: float, cancelled: Flag | None = None) -> None:
        """Send one message; see :meth:`Pipe.send`."""
        size = check_message(tensors, self._max)
        head = describe(tensors)
        data = [tensor.data for tensor in tensors or () if tensor.data.nbytes]
        wait = Wait(deadline, cancelled)
        with _Turn(self, self._sending, wait, "waiting for another send"):
            self._out.wait_writable(wait)
            with _WholeMessage(self):
                self._out.send_message([pack_header(FrameKind.TENSORS, len(head) + size), head], data, wait)

    def recv(self, *, deadline: float, cancelled: Flag | None = None) -> list[WireTensor] | None:
        """Receive the next message; see :meth:`Pipe.recv`."""
        wait = Wait(deadline, cancelled)
        with _Turn(self, self._receiving, wait, "waiting for another receive"):
            self._in.wait_readable(wait)
            with _WholeMessage(self):
                return self._recv_message(wait)

    def close(self) -> None:
        """Close both directions."""
        self._closed = True
        self._out.close()
        self._in.close()
        self._release()

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
        self._in.recv_data([view for view in data if view.nbytes], wait)
        return [WireTensor(dtype, shape, view) for (dtype, shape), view in zip(shapes, data, strict=True)]

    def _take(self, size: int, wait: Wait) -> bytearray:
        data = bytearray(size)
        if size:
            self._in.recv([memoryview(data)], wait)
        return data

    def _release(self) -> None:
        """Let go of the channels' memory, or leave it to the call that is still in one of them."""
        for lock, channel in ((self._sending, self._out), (self._receiving, self._in)):
            if lock.acquire(blocking=False):
                try:
                    channel.release()
                finally:
                    lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise PipeClosedError("the pipe was closed")


class _Turn:
    """Holds one direction of a pipe; the last to leave a closed pipe gives its memory back."""

    def __init__(self, pipe: StreamPipe, lock: threading.Lock, wait: Wait, what: str) -> None:
        self._pipe, self._lock, self._wait, self._what = pipe, lock, wait, what

    def __enter__(self) -> None:
        pipe, lock, wait = self._pipe, self._lock, self._wait
        if not lock.acquire(blocking=False):
            while not lock.acquire(timeout=min(TICK_S, wait.remaining() or 0.0)):
                pipe._check_open()
                wait.check(self._what)
        try:
            pipe._check_open()
            wait.check(self._what)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        if self._pipe._closed:
            self._pipe._release()


class _WholeMessage:
    """Closes a pipe if a message breaks off in the middle: what follows could not be told apart from its rest."""

    def __init__(self, pipe: StreamPipe) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            return
        self._pipe.close()
        if isinstance(error, InvalidRequestError):  # a description that no sender of ours writes
            raise BadFrameError(error.message) from error


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
