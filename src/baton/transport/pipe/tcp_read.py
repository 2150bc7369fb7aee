"""One-sided reads over TCP: a server thread per connection sends blocks out of the arenas, scatter to gather.

Requests and answers are those of ``baton.transport.read_wire``, and::

    WAIT      value u64        wait until the source's progress has reached the value
    PROGRESS  progress u64     it has

No byte is copied in Python on either side: ``sendmsg`` takes views of the source arena, ``recvmsg_into`` fills views of
the target arena.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from baton.errors import DeadlineError, InvalidRequestError, PipeClosedError
from baton.kv.shards import KVShards
from baton.transport.block_types import BlockReads, Bytes, Valid, current
from baton.transport.copying import fence
from baton.transport.handshake import PURPOSE_READ, Facts, greet_as_client
from baton.transport.moving import SpanMover
from baton.transport.pipe.pool import WORD, PooledReadPipe
from baton.transport.read_wire import (
    MAX_READ_BYTES,
    Checksums,
    check_request,
    checksums_of,
    pack_bits,
    pack_request,
    pack_tail,
    parse_request,
    parse_tail,
    source_spans,
    source_views,
    tail_bytes,
    target_spans,
    target_views,
    unpack_bits,
)
from baton.transport.sockets import Buffer, Stream, connect_tcp
from baton.transport.waiting import TICK_S, EitherFlag, Wait, run_together
from baton.transport.wire import BadFrameError, FrameKind, pack_header, recv_header, send_error

log = logging.getLogger(__name__)
_UNDER_WAY_BYTES = 256 << 10
_LEAST_UNDER_WAY_BYTES = 64 << 10


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


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """How a reader uses its connections.

    Attributes:
        streams: Connections that one read is split over.
        share_bytes: Least bytes that are worth a connection of their own.
        checksums: Ask for checksums and compare them.
    """

    streams: int = 1
    share_bytes: int = 1 << 20
    checksums: bool = True


Answer = Callable[[BlockReads, bool], None]
"""Answers a request that was checked; the second argument: whether checksums are wanted."""
SendData = Callable[[Sequence[Buffer], Sequence[Buffer], Wait], None]
"""Sends an answer's head and its blocks."""
RecvData = Callable[[Sequence[memoryview], Wait], None]
"""Receives an answer's blocks."""


def serve_reads(stream: Stream, shards: KVShards, limits: ServeLimits, answer: Answer | None = None) -> None:
    """Answer READ and WAIT frames until the peer hangs up, is idle for too long or breaks the protocol.

    Args:
        stream: After the handshake.
        shards: What is served.
        limits: Patience.
        answer: How READ is answered; default: over the stream.

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
        kind, length = recv_header(stream, {FrameKind.READ: MAX_READ_BYTES, FrameKind.WAIT: WORD.size}, wait)
        payload = stream.recv_exact(length, wait, "reading a request")
        if kind is FrameKind.WAIT:
            _send_progress(stream, shards, payload, limits)
            continue
        reads, checksums, streams = parse_request(payload)
        try:
            check_request(reads, shards)
        except InvalidRequestError as error:
            send_error(stream, error, wait)  # the frame was whole: the connection goes on
            continue
        if answer is None:
            if streams > 1:
                _keep_in_cache(stream, streams)
            send_blocks(stream, shards, reads, limits, checksums=checksums)
        else:
            answer(reads, checksums)


def _keep_in_cache(stream: Stream, streams: int) -> None:
    """Bound what is under way between two processes of one host, where it only fills the processor's cache.

    With several connections there is always one to go on with. A single one is left as it is: bounded so, its two ends
    would wait for each other. Between hosts the kernel finds the right size by itself.
    """
    sock = stream.sock
    with contextlib.suppress(OSError):  # it is gone: whoever sends will be told
        if sock.family != socket.AF_UNIX and sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, max(_LEAST_UNDER_WAY_BYTES, _UNDER_WAY_BYTES // streams)
            )


def _send_progress(stream: Stream, shards: KVShards, payload: bytearray, limits: ServeLimits) -> None:
    if len(payload) != WORD.size:
        raise BadFrameError(f"a WAIT frame has {len(payload)} bytes")
    (value,) = WORD.unpack(payload)
    progress, wait = shards.primary.progress, Wait(time.monotonic() + limits.frame_s)
    while (now := progress.wait(value, TICK_S)) < value:
        if stream.peer_gone():
            raise PipeClosedError("the reader left while it waited")
        wait.check("waiting for the computation")
    send = Wait(time.monotonic() + limits.frame_s)
    stream.send_all([pack_header(FrameKind.PROGRESS, WORD.size), WORD.pack(now)], send, "sending progress")


def send_blocks(
    stream: Stream,
    shards: KVShards,
    reads: BlockReads,
    limits: ServeLimits,
    *,
    checksums: bool,
    send: SendData | None = None,
) -> None:
    """Answer a READ that was checked; ``send``: another way for the blocks than the stream."""
    blocks = shards.arenas[reads.source_shard].blocks
    segments = reads.segments_of(blocks.shape[1])
    before = current(shards.primary, reads)
    ids = reads.remote_ids[before]
    sent = pack_bits(before)
    tail = tail_bytes(len(reads), len(ids), checksums=checksums)
    header = pack_header(FrameKind.BLOCKS, len(sent) + len(ids) * reads.bytes_per_block(blocks.shape[1]) + tail)
    wait = Wait(time.monotonic() + limits.frame_s)
    sums: Checksums | None = None
    mover = SpanMover.load() if send is None else None
    if mover is not None:
        stream.send_all([header, sent], wait, "sending blocks", stall_s=limits.frame_s)
        hasher = mover.hasher(len(ids), reads.bytes_per_block(blocks.shape[1])) if checksums else None
        mover.send(stream, source_spans(blocks, ids, segments), wait, hasher, stall_s=limits.frame_s)
        sums = None if hasher is None else hasher.sums
    elif send is None:
        views = source_views(blocks, ids, segments)
        stream.send_all([header, sent, *views], wait, "sending blocks", stall_s=limits.frame_s)
    else:
        send([header, sent], source_views(blocks, ids, segments), wait)
    if checksums and sums is None:
        sums = checksums_of(blocks, ids, segments[:, 0], segments[:, 2])
    # The kernel has its own copy of every byte now, so a generation that still holds held for all of them.
    fence()
    unchanged = pack_bits(before & current(shards.primary, reads))
    stream.send_all([pack_tail(sent, unchanged, sums)], Wait(time.monotonic() + limits.frame_s), "sending")


@dataclass(frozen=True, slots=True, eq=False)
class TcpConnection:
    """One TCP connection to a block server."""

    stream: Stream

    def close(self) -> None:
        """Hang up."""
        self.stream.close()


class TcpReadPipe(PooledReadPipe[TcpConnection]):
    """Reads a peer's blocks over a small pool of connections.

    Args:
        dial: Opens one more connection, handshake included.
        options: How reads are split and checked.
        max_streams: Connections open at once; further reads wait for one.
    """

    kind: ClassVar[str] = "tcp"

    def __init__(self, dial: Callable[[Wait], TcpConnection], options: TcpOptions, *, max_streams: int = 16) -> None:
        streams = options.streams
        super().__init__(dial, max_connections=max(streams, max_streams))
        self._options = options
        # Begin and end of a read that is split cost more; reads of one connection each just get in each other's way.
        self.layer_reads = 2 if streams > 1 else 1
        self._pool = ThreadPoolExecutor(self._max_connections, "baton-tcp-read") if streams > 1 else None

    @classmethod
    def connect(
        cls, address: str, facts: Facts, token: str | None, wait: Wait, options: TcpOptions | None = None
    ) -> TcpReadPipe:
        """Connect to a block server's TCP endpoint; the first connection is made at once.

        Raises:
            PipeClosedError: Nobody there.
            UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
        """

        def dial(wait: Wait) -> TcpConnection:
            return TcpConnection(dial_reader(address, facts, token, wait))

        pipe = cls(dial, options or TcpOptions())
        pipe.open_first(wait)
        return pipe

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Copy blocks; see :meth:`ReadPipe.read`."""
        size = len(reads) * reads.bytes_per_block(local.shape[1])
        parts = max(1, min(self._options.streams, len(reads), size // self._options.share_bytes))
        edges = [len(reads) * i // parts for i in range(parts + 1)]
        shares = [reads.take(slice(a, b)) for a, b in itertools.pairwise(edges)]
        if self._pool is None or len(shares) == 1:
            return super().read(reads, local, wait)
        siblings = EitherFlag(wait.cancelled)
        each = Wait(wait.deadline, siblings)
        read_share = super().read
        others = [self._pool.submit(read_share, share, local, each) for share in shares[1:]]
        return np.concatenate(run_together(lambda: read_share(shares[0], local, each), others, siblings))

    def request(self, connection: TcpConnection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        """Read over one connection; see :meth:`PooledReadPipe.request`."""
        return request_blocks(connection.stream, reads, local, wait, options=self._options)

    def close(self) -> None:
        """Close every connection."""
        super().close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def dial_reader(address: str, facts: Facts, token: str | None, wait: Wait) -> Stream:
    """Connect to a block server's endpoint that listens on TCP, and shake hands.

    Raises:
        PipeClosedError: Nobody there.
        UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
    """
    stream = connect_tcp(address, wait)
    try:
        greet_as_client(stream, token, wait, purpose=PURPOSE_READ, facts=facts)
    except BaseException:
        stream.close()
        raise
    return stream


def request_blocks(
    stream: Stream,
    reads: BlockReads,
    local: Bytes,
    wait: Wait,
    *,
    options: TcpOptions,
    recv: RecvData | None = None,
) -> Valid:
    """Ask for blocks on one connection and receive them; at most ``MAX_BLOCKS_PER_READ``.

    ``recv``: another way for the blocks than the stream.
    """
    checksums = options.checksums
    payload = pack_request(reads, checksums=checksums, streams=options.streams)
    stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], wait, "asking for blocks")
    segments, count = reads.segments_of(local.shape[1]), len(reads)
    bitmap, each = -(-count // 8), reads.bytes_per_block(local.shape[1])
    most = bitmap + count * each + tail_bytes(count, count, checksums=checksums)
    _, length = recv_header(stream, {FrameKind.BLOCKS: most}, wait)
    sent_bits = stream.recv_exact(bitmap, wait, "receiving blocks")
    sent = unpack_bits(sent_bits, count)
    targets = reads.local_ids if sent.all() else reads.local_ids[sent]
    tail = tail_bytes(count, len(targets), checksums=checksums)
    if length != bitmap + len(targets) * each + tail:
        raise BadFrameError(f"{length} bytes came for {len(targets)} blocks")
    found: Checksums | None = None
    mover = SpanMover.load() if recv is None else None
    if mover is not None:
        hasher = mover.hasher(len(targets), each) if checksums else None
        mover.recv(stream, target_spans(local, targets, segments), wait, hasher)
        found = None if hasher is None else hasher.sums
    elif recv is None:
        stream.recv_into(target_views(local, targets, segments), wait, "receiving blocks")
    else:
        recv(target_views(local, targets, segments), wait)
    if checksums and found is None:  # before the tail is there: the server hashes at the same time
        found = checksums_of(local, targets, segments[:, 1], segments[:, 2])
    unchanged, sums = parse_tail(
        sent_bits, stream.recv_exact(tail, wait, "receiving blocks"), count, checksums=checksums
    )
    valid = sent & unchanged
    if sums is not None:
        wrong = np.flatnonzero(sent)[sums != found]
        damaged = wrong[valid[wrong]]  # blocks recycled meanwhile are known to be stale, and no fault of the way
        if len(damaged):
            log.error("%d of %d blocks from %s were damaged on their way", len(damaged), len(targets), stream.peer)
            valid[damaged] = False
    return valid
