"""The two ends of a ring of bytes: one copies in and rings a doorbell, the other copies out and gives credit.

Doorbells (bytes written, u64) and credit (bytes freed, u64) go over a socket, which orders memory, blocks, and tells of
the peer's death. How the bytes get from one end's ring to the other's is the ring's business: shared memory needs
nothing, a mirrored ring is read from afar when the doorbell rings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from baton.errors import PipeClosedError
from baton.kv_transfer.pipes.pace import Pace
from baton.kv_transfer.pipes.stream import ByteChannel
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.sockets import Buffer, Stream
from baton.kv_transfer.types import Bytes

MIN_RING_BYTES = 4096
MAX_RING_BYTES = 256 << 20
_CHUNK_BYTES = 512 << 10
"""Bytes per doorbell, so that the receiver copies out while the sender copies in."""
_JOIN_BYTES = 32 << 10
"""Messages of up to so many bytes go into the ring in one piece."""
_COUNT = struct.Struct("<Q")


class Ring:
    """A ring's bytes.

    Attributes:
        memory: uint8 [size], C-contiguous, writable.
    """

    def __init__(self, memory: Bytes) -> None:
        self.size = len(memory)
        self.memory = memory

    def release(self) -> None:
        """Drop the memory; the ring is not used afterwards."""
        self.memory = np.empty(0, dtype=np.uint8)


class RingSender(ByteChannel):
    """The writing end of a ring."""

    def __init__(self, ring: Ring, doorbell: Stream) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._at, self._free = 0, ring.size

    def send(self, buffers: Sequence[Buffer], wait: Wait) -> None:
        """Copy all of the buffers into the ring, as it has room."""
        if sum(memoryview(buffer).nbytes for buffer in buffers) <= _JOIN_BYTES:
            buffers = (b"".join(buffers),)
        unsaid = 0
        for buffer in buffers:
            source = np.frombuffer(buffer, dtype=np.uint8)
            done = 0
            while done < len(source):
                if self._free == 0 or unsaid >= _CHUNK_BYTES:
                    self._say(unsaid, wait)
                    unsaid = 0
                    self.wait_writable(wait)
                count = min(len(source) - done, self._free, self._ring.size - self._at, _CHUNK_BYTES - unsaid)
                self._ring.memory[self._at : self._at + count] = source[done : done + count]
                self._at = (self._at + count) % self._ring.size
                self._free -= count
                unsaid += count
                done += count
        self._say(unsaid, wait)

    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the ring only sends")

    def wait_readable(self, wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the ring only sends")

    def wait_writable(self, wait: Wait) -> None:
        """Block until the ring has room."""
        while self._free == 0:
            self._take_credit(wait)

    def close(self) -> None:
        """Close; the receiver still gets what was announced."""
        self._doorbell.close()

    def release(self) -> None:
        """Unmap the ring."""
        self._ring.release()

    def _take_credit(self, wait: Wait) -> None:
        (freed,) = _COUNT.unpack(self._doorbell.recv_exact(_COUNT.size, wait, "waiting for the receiver"))
        if not 0 < freed <= self._ring.size - self._free:
            raise BadFrameError(f"the peer freed {freed} bytes of a ring of {self._ring.size}")
        self._free += freed

    def _say(self, count: int, wait: Wait) -> None:
        if count:
            self._doorbell.send_all([_COUNT.pack(count)], wait, "sending a message")


class RingReceiver(ByteChannel):
    """The reading end of a ring."""

    def __init__(self, ring: Ring, doorbell: Stream) -> None:
        self._ring, self._doorbell = ring, doorbell
        self._at, self._filled, self._owed = 0, 0, 0
        self._pace = Pace()

    def send(self, buffers: Sequence[Buffer], wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the ring only receives")

    def recv(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Copy bytes out of the ring until all views are full."""
        for view in views:
            target = np.frombuffer(view, dtype=np.uint8)
            done = 0
            while done < len(target):
                self._fill(wait)
                count = min(len(target) - done, self._filled, self._ring.size - self._at)
                target[done : done + count] = self._ring.memory[self._at : self._at + count]
                self._at = (self._at + count) % self._ring.size
                self._filled -= count
                self._owed += count
                done += count
                # Few and big credits: at most 8 are ever on their way, so that sending one never waits for the sender.
                if self._owed >= self._ring.size // 8:
                    self._credit(wait)

    def wait_readable(self, wait: Wait) -> None:
        """Block until the ring holds a byte, or the sender is gone."""
        if self._filled == 0:
            self._pace.wait(self._doorbell, wait)

    def wait_writable(self, wait: Wait) -> None:
        """Never: the other direction has a channel of its own."""
        raise PipeClosedError("this end of the ring only receives")

    def close(self) -> None:
        """Close."""
        self._doorbell.close()

    def release(self) -> None:
        """Unmap the ring."""
        self._ring.release()

    def _fill(self, wait: Wait) -> None:
        while self._filled == 0:
            (count,) = _COUNT.unpack(self._doorbell.recv_exact(_COUNT.size, wait, "receiving a message"))
            if not 0 < count <= self._ring.size - self._owed:
                raise BadFrameError(f"the peer announced {count} bytes in a ring of {self._ring.size}")
            self._arrive(count, wait)
            self._filled += count

    def _arrive(self, count: int, wait: Wait) -> None:
        """Get the bytes that were announced, which begin at ``_at``, into this end's ring; shared memory has them."""

    def _credit(self, wait: Wait) -> None:
        try:
            self._doorbell.send_all([_COUNT.pack(self._owed)], wait, "freeing the ring")
        except PipeClosedError:
            # The sender is gone and needs no room; what it announced before can still be read.
            if self._doorbell.closed:
                raise
        self._owed = 0
