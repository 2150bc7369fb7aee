"""Pipes inside one process: for tests, and for instances that share a process."""

from __future__ import annotations

import json
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from baton.errors import PipeClosedError
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.copy.block_copy import BlockCopier
from baton.kv_transfer.copy.dtype_cast import BlockCaster, Cast
from baton.kv_transfer.pipes.base import (
    MAX_MESSAGE_BYTES,
    CastingReadPipe,
    Pipe,
    PipeListener,
    WireTensor,
    check_message,
)
from baton.kv_transfer.protocol.deadline import TICK_S, Flag, Wait
from baton.kv_transfer.protocol.handshake import Facts
from baton.kv_transfer.types import BlockReads, Bytes, Valid

QUEUE_BYTES = 64 << 20
"""Bytes one direction holds before ``send`` waits; a bigger message goes alone."""


class MemoryNetwork:
    """Where servers, listeners and readers of one process find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: dict[str, tuple[Facts, KVShards]] = {}
        self._listeners: dict[str, MemoryPipeListener] = {}

    def publish(self, facts: Facts, shards: KVShards) -> str:
        """Let an instance's arenas be read; returns their address."""
        address = secrets.token_hex(8)
        with self._lock:
            self._arenas[address] = (facts, shards)
        return address

    def withdraw(self, epoch: bytes) -> None:
        """End the reading of the instance of this epoch."""
        with self._lock:
            self._arenas = {a: entry for a, entry in self._arenas.items() if entry[0].epoch != epoch}

    def find(self, address: str) -> tuple[Facts, KVShards]:
        """Return what is published there.

        Raises:
            PipeClosedError: Nothing is.
        """
        with self._lock:
            if address not in self._arenas:
                raise PipeClosedError(f"nothing is published at memory address {address}")
            return self._arenas[address]

    def listen(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> MemoryPipeListener:
        """Listen for message pipes."""
        listener = MemoryPipeListener(self, max_message_bytes)
        with self._lock:
            self._listeners[listener.address] = listener
        return listener

    def connect(self, address: str) -> MemoryPipe:
        """Connect to a listener.

        Raises:
            PipeClosedError: Nobody listens there.
        """
        with self._lock:
            listener = self._listeners.get(address)
        if listener is None:
            raise PipeClosedError(f"nobody listens at memory address {address}")
        return listener.knock()

    def forget(self, address: str) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners.pop(address, None)


class MemoryReadPipe(CastingReadPipe):
    """Copies out of an arena of the same process."""

    kind: ClassVar[str] = "memory"
    group_bytes: ClassVar[int] = 0

    def __init__(self, network: MemoryNetwork, address: str, facts: Facts, copier: BlockCopier) -> None:
        theirs, shards = network.find(address)
        facts.require(json.loads(json.dumps(theirs.to_fields())), who="source")
        self._network, self._address = network, address
        self._readers = [copier.reader(arena.blocks, shards.primary.generations) for arena in shards.arenas]

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; see :meth:`ReadPipe.read`."""
        readers = self._readers
        if not readers:
            raise PipeClosedError("the pipe was closed")
        self._network.find(self._address)
        valid = readers[reads.source_shard].read(local, reads, wait)
        self._network.find(self._address)
        return valid

    def read_cast(self, reads: BlockReads, local: Bytes, caster: BlockCaster, wait: Wait) -> Cast:
        """Convert blocks; see :meth:`CastingReadPipe.read_cast`."""
        if not self._readers:
            raise PipeClosedError("the pipe was closed")
        _, shards = self._network.find(self._address)
        remote = shards.arenas[reads.source_shard].blocks
        cast = caster.read(local, remote, shards.primary.generations, reads, wait)
        self._network.find(self._address)
        return cast

    def wait_ready(self, value: int, wait: Wait) -> int:
        """Wait for the source's progress; see :meth:`ReadPipe.wait_ready`."""
        while True:
            _, shards = self._network.find(self._address)
            if (now := shards.primary.progress.wait(value, TICK_S)) >= value:
                return now
            wait.check("waiting for the computation")

    def alive(self) -> bool:
        """Whether the arena is still published."""
        if not self._readers:
            return False
        try:
            self._network.find(self._address)
        except PipeClosedError:
            return False
        return True

    def close(self) -> None:
        """Close."""
        self._readers = []


class _Queue:
    """One direction of a memory pipe, bounded in bytes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: deque[tuple[list[WireTensor] | None, int]] = deque()
        self.num_bytes = 0
        self.closed = False

    def put(self, message: list[WireTensor] | None, size: int, wait: Wait) -> None:
        with self.changed:
            while not self.closed and self.messages and self.num_bytes + size > QUEUE_BYTES:
                wait.check("waiting for the receiver")
                self.changed.wait(wait.nap())
            if self.closed:
                raise PipeClosedError("the pipe was closed")
            wait.check("sending")
            self.messages.append((message, size))
            self.num_bytes += size
            self.changed.notify_all()

    def get(self, wait: Wait) -> list[WireTensor] | None:
        with self.changed:
            while not self.messages:
                if self.closed:
                    raise PipeClosedError("the pipe was closed")
                wait.check("waiting for a message")
                self.changed.wait(wait.nap())
            message, size = self.messages.popleft()
            self.num_bytes -= size
            self.changed.notify_all()
            return message

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class MemoryPipe(Pipe):
    """A pipe to another object of the same process; messages are copied on the way in."""

    kind: ClassVar[str] = "memory"

    def __init__(self, outgoing: _Queue, incoming: _Queue, max_message_bytes: int) -> None:
        self._out, self._in, self._max = outgoing, incoming, max_message_bytes
        self._closed = False

    @classmethod
    def pair(cls, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> tuple[MemoryPipe, MemoryPipe]:
        """Return the two ends of a new pipe."""
        there, back = _Queue(), _Queue()
        return cls(there, back, max_message_bytes), cls(back, there, max_message_bytes)

    def send(self, tensors: Sequence[WireTensor] | None, *, deadline: float, cancelled: Flag | None = None) -> None:
        """Send one message; see :meth:`Pipe.send`."""
        size = check_message(tensors, self._max)
        copies = None if tensors is None else [_copy(tensor) for tensor in tensors]
        self._out.put(copies, size, Wait(deadline, cancelled))

    def recv(self, *, deadline: float, cancelled: Flag | None = None) -> list[WireTensor] | None:
        """Receive the next message; see :meth:`Pipe.recv`."""
        if self._closed:
            raise PipeClosedError("the pipe was closed")
        return self._in.get(Wait(deadline, cancelled))

    def close(self) -> None:
        """Close both directions; what was sent before can still be received by the peer."""
        self._closed = True
        self._out.close()
        self._in.close()


class MemoryPipeListener(PipeListener):
    """Accepts memory pipes."""

    kind: ClassVar[str] = "memory"
    _BACKLOG = 128

    def __init__(self, network: MemoryNetwork, max_message_bytes: int) -> None:
        self.address = secrets.token_hex(8)
        self._network, self._max = network, max_message_bytes
        self._changed = threading.Condition()
        self._waiting: deque[MemoryPipe] = deque()
        self._closed = False

    def knock(self) -> MemoryPipe:
        """Connect: the other end waits to be accepted."""
        mine, theirs = MemoryPipe.pair(max_message_bytes=self._max)
        with self._changed:
            if self._closed or len(self._waiting) >= self._BACKLOG:
                raise PipeClosedError("the listener takes no more pipes")
            self._waiting.append(theirs)
            self._changed.notify()
        return mine

    def accept(self, *, deadline: float, cancelled: Flag | None = None) -> MemoryPipe:
        """Return the next pipe; see :meth:`PipeListener.accept`."""
        wait = Wait(deadline, cancelled)
        with self._changed:
            while not self._waiting:
                if self._closed:
                    raise PipeClosedError("the listener was closed")
                wait.check("waiting for a pipe")
                self._changed.wait(wait.nap())
            return self._waiting.popleft()

    def close(self) -> None:
        """Stop listening and hang up on those not accepted."""
        self._network.forget(self.address)
        with self._changed:
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for pipe in waiting:
            pipe.close()


def _copy(tensor: WireTensor) -> WireTensor:
    data = bytearray(tensor.data.cast("B") if tensor.data.nbytes else b"")
    return WireTensor(tensor.dtype, tensor.shape, memoryview(data))
