"""One-sided reads over TCP: a server thread per connection sends blocks out of the arena, scatter to gather.

::

    READ    count u32 | block ids u32[count] | generations u64[count]
    BLOCKS  sent: bitmap | bytes of the sent blocks, in the order asked for | unchanged: bitmap

``sent`` says which blocks had the generation asked for before they were sent, ``unchanged`` which had it afterwards;
a block counts only if both say so. Bitmaps have ceil(count / 8) bytes, little bit order. No byte is copied in Python on
either side: ``sendmsg`` takes views of the source arena, ``recvmsg_into`` fills views of the target arena.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from baton.errors import CancelledError, DeadlineError, InvalidRequestError, PipeClosedError
from baton.kv.arena import KVArena
from baton.transport.block_types import MAX_BLOCKS_PER_READ, BlockReads, Bytes, Ids, Valid, current
from baton.transport.copying import fence, id_runs
from baton.transport.handshake import PURPOSE_READ, Facts, greet_as_client
from baton.transport.pipe.base import ReadPipe
from baton.transport.sockets import Stream, connect_tcp
from baton.transport.waiting import EitherFlag, Wait
from baton.transport.wire import BadFrameError, FrameKind, pack_header, recv_header, send_error

_COUNT = struct.Struct("<I")
_BYTES_PER_ENTRY = 4 + 8
MAX_READ_BYTES = _COUNT.size + _BYTES_PER_ENTRY * MAX_BLOCKS_PER_READ


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """How long a server waits for its peer, in seconds.

    Attributes:
        frame_s: For the rest of a frame once its first byte is there, and for a peer that takes none of what it
            asked for.
        idle_s: For the next request.
    """

    frame_s: float = 30.0
    idle_s: float = 300.0


def serve_reads(stream: Stream, arena: KVArena, limits: ServeLimits) -> None:
    """Answer READ frames until the peer hangs up, is idle for too long or breaks the protocol.

    Raises:
        BatonError: Why the connection should end; the peer may be told.
    """
    while True:
        try:
            stream.wait_readable(Wait(time.monotonic() + limits.idle_s), "waiting for a request")
        except DeadlineError:
            return
        if stream.peer_gone():
            return
        wait = Wait(time.monotonic() + limits.frame_s)
        _, length = recv_header(stream, {FrameKind.READ: MAX_READ_BYTES}, wait)
        reads = _parse_read(stream.recv_exact(length, wait, "reading a request"))
        try:
            reads.check_range(arena.num_blocks, len(reads))
        except InvalidRequestError as error:
            send_error(stream, error, wait)  # the frame was whole: the connection goes on
            continue
        _send_blocks(stream, arena, reads, limits)


def _send_blocks(stream: Stream, arena: KVArena, reads: BlockReads, limits: ServeLimits) -> None:
    before = current(arena, reads)
    views = block_views(arena.blocks, reads.remote_ids[before])
    sent = _pack_bits(before)
    header = pack_header(FrameKind.BLOCKS, 2 * len(sent) + sum(view.nbytes for view in views))
    wait = Wait(time.monotonic() + limits.frame_s)
    stream.send_all([header, sent, *views], wait, "sending blocks", stall_s=limits.frame_s)
    # The kernel has its own copy of every byte now, so a generation that still holds held for all of them.
    fence()
    stream.send_all([_pack_bits(before & current(arena, reads))], Wait(time.monotonic() + limits.frame_s), "sending")


class TcpReadPipe(ReadPipe):
    """Reads a peer's blocks over a small pool of connections.

    Args:
        dial: Opens one more connection, handshake included.
        streams: Connections that one read is split over.
        max_streams: Connections open at once; further reads wait for one.
    """

    kind: ClassVar[str] = "tcp"

    def __init__(self, dial: Callable[[Wait], Stream], *, streams: int = 1, max_streams: int = 8) -> None:
        self._dial, self._streams = dial, streams
        self._max_streams = max(streams, max_streams)
        self._changed = threading.Condition()
        self._idle: list[Stream] = []
        self._open: set[Stream] = set()
        self._dialling = 0
        self._closed = False
        self._pool = ThreadPoolExecutor(self._max_streams, "baton-tcp-read") if streams > 1 else None

    @classmethod
    def connect(cls, address: str, facts: Facts, token: str | None, wait: Wait, *, streams: int = 1) -> TcpReadPipe:
        """Connect to a block server's TCP endpoint; the first connection is made at once.

        Raises:
            PipeClosedError: Nobody there.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """

        def dial(wait: Wait) -> Stream:
            stream = connect_tcp(address, wait)
            try:
                greet_as_client(stream, token, wait, purpose=PURPOSE_READ, facts=facts)
            except BaseException:
                stream.close()
                raise
            return stream

        pipe = cls(dial, streams=streams)
        try:
            pipe._give(pipe._take(wait))
        except BaseException:
            pipe.close()
            raise
        return pipe

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; see :meth:`ReadPipe.read`."""
        parts = min(self._streams, max(1, len(reads)))
        edges = [len(reads) * i // parts for i in range(parts + 1)]
        shares = [reads.take(slice(a, b)) for a, b in itertools.pairwise(edges)]
        if self._pool is None or len(shares) == 1:
            return self._read_share(reads, local, wait)
        siblings = EitherFlag(wait.cancelled)
        each = Wait(wait.deadline, siblings)
        others = [self._pool.submit(self._read_share, share, local, each) for share in shares[1:]]
        return np.concatenate(_gather(lambda: self._read_share(shares[0], local, each), others, siblings))

    def alive(self) -> bool:
        """Whether any connection is known to live; never blocks."""
        with self._changed:
            return not self._closed and any(not stream.peer_gone() for stream in self._open)

    def close(self) -> None:
        """Close every connection."""
        with self._changed:
            self._closed = True
            streams = list(self._open)
            self._open.clear()
            self._idle.clear()
            self._changed.notify_all()
        for stream in streams:
            stream.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _read_share(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        stream = self._take(wait)
        try:
            valid = np.concatenate(
                [np.zeros(0, dtype=np.bool_)]
                + [
                    request_blocks(stream, reads.take(slice(at, at + MAX_BLOCKS_PER_READ)), local, wait)
                    for at in range(0, len(reads), MAX_BLOCKS_PER_READ)
                ]
            )
        except InvalidRequestError:
            self._give(stream)  # refused as a whole: the connection is in step
            raise
        except BaseException:
            self._drop(stream)
            raise
        self._give(stream)
        return valid

    def _take(self, wait: Wait) -> Stream:
        with self._changed:
            while True:
                if self._closed:
                    raise PipeClosedError("the pipe was closed")
                while self._idle:
                    stream = self._idle.pop()
                    if not stream.peer_gone():
                        return stream
                    self._open.discard(stream)
                    stream.close()
                if len(self._open) + self._dialling < self._max_streams:
                    self._dialling += 1
                    break
                wait.check("waiting for a connection")
                self._changed.wait(wait.nap())
        return self._dial_one(wait)

    def _dial_one(self, wait: Wait) -> Stream:
        try:
            stream = self._dial(wait)
        except BaseException:
            with self._changed:
                self._dialling -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._dialling -= 1
            if not self._closed:
                self._open.add(stream)
                return stream
        stream.close()
        raise PipeClosedError("the pipe was closed")

    def _give(self, stream: Stream) -> None:
        with self._changed:
            if stream in self._open:
                self._idle.append(stream)
            self._changed.notify()

    def _drop(self, stream: Stream) -> None:
        stream.close()
        with self._changed:
            self._open.discard(stream)
            self._changed.notify()


def request_blocks(stream: Stream, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
    """Ask for blocks on one connection and receive them; at most ``MAX_BLOCKS_PER_READ``."""
    payload = (
        _COUNT.pack(len(reads)) + reads.remote_ids.astype("<u4").tobytes() + reads.generations.astype("<u8").tobytes()
    )
    stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], wait, "asking for blocks")
    bitmap = -(-len(reads) // 8)
    most = 2 * bitmap + len(reads) * local.shape[1]
    _, length = recv_header(stream, {FrameKind.BLOCKS: most}, wait)
    sent = _unpack_bits(stream.recv_exact(bitmap, wait, "receiving blocks"), len(reads))
    targets = reads.local_ids if sent.all() else reads.local_ids[sent]
    if length != 2 * bitmap + len(targets) * local.shape[1]:
        raise BadFrameError(f"{length} bytes came for {len(targets)} blocks")
    stream.recv_into(block_views(local, targets), wait, "receiving blocks")
    return sent & _unpack_bits(stream.recv_exact(bitmap, wait, "receiving blocks"), len(reads))


def block_views(blocks: Bytes, ids: Ids) -> list[memoryview]:
    """Return views of blocks in order, neighbours joined."""
    flat, size = blocks.reshape(-1).data, blocks.shape[1]
    return [flat[first * size : end * size] for first, end in id_runs(ids)]


def _parse_read(payload: bytearray) -> BlockReads:
    """Read a request's payload; the local ids are just 0, 1, ..."""
    if len(payload) < _COUNT.size:
        raise BadFrameError("a READ frame is too short")
    (count,) = _COUNT.unpack_from(payload)
    if len(payload) != _COUNT.size + _BYTES_PER_ENTRY * count:
        raise BadFrameError(f"a READ frame for {count} blocks has {len(payload)} bytes")
    ids = np.frombuffer(payload, "<u4", count, _COUNT.size).astype(np.int64)
    generations = np.frombuffer(payload, "<u8", count, _COUNT.size + 4 * count).astype(np.uint64)
    return BlockReads(ids, generations, np.arange(count))


def _pack_bits(bits: Valid) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def _unpack_bits(data: bytearray, count: int) -> Valid:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little").astype(np.bool_)


def _gather(mine: Callable[[], Valid], others: Sequence[Future[Valid]], siblings: EitherFlag) -> list[Valid]:
    """Run one share here, wait for all of them, and raise the failure that came first; nobody writes afterwards."""
    results: list[Valid] = []
    failure: BaseException | None = None
    for result in (mine, *(future.result for future in others)):
        try:
            results.append(result())
        except BaseException as error:
            siblings.set()
            # A sibling that was told to stop says "cancelled"; the reason is the other's.
            if failure is None or isinstance(failure, CancelledError):
                failure = error
    if failure is not None:
        raise failure
    return results
