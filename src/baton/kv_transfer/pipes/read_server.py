"""The serving end of block reads on a byte stream: a thread per connection sends blocks out of the arenas.

No byte is copied in Python: ``sendmsg`` takes views of the arena. Requests and answers are those of
``baton.kv_transfer.wire``.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import DeadlineError, InvalidRequestError, PipeClosedError, QueueFullError
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.native_copy import PieceHasher, fence, send_spans
from baton.kv_transfer.pipes.base import ServeLimits
from baton.kv_transfer.pipes.pool import WORD
from baton.kv_transfer.streams import TICK_S, Buffer, Stream, Wait
from baton.kv_transfer.types import MAX_SPANS_PER_READ, BlockReads, block_spans, current
from baton.kv_transfer.wire import (
    MAX_READ_BYTES,
    BadFrameError,
    Checksums,
    FrameKind,
    Tail,
    check_request,
    checksums_of,
    pack_bits,
    pack_header,
    pack_tail,
    parse_request,
    recv_header,
    send_error,
    source_spans,
    source_views,
    step_sizes,
    tail_bytes,
)

ROOM_WAIT_S = 10.0
"""How long a read waits for room."""


class ReadRoom:
    """Room for so many units; for any thread.

    Args:
        most: Units that may be reserved at once. A single reservation may be larger, or it would wait for ever.
        what: Name of the units, for errors.

    Attributes:
        taken: Units that are reserved now.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self.taken = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, units: int, hung_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Reserve room while the block runs.

        Args:
            units: Units to reserve.
            hung_up: Returns whether the reader has hung up; called regularly, ends the wait.

        Raises:
            QueueFullError: There was no room within ``ROOM_WAIT_S``, or the reader has hung up.
        """
        self._enter(units, hung_up)
        try:
            yield
        finally:
            with self._changed:
                self.taken -= units
                self._changed.notify_all()

    def _enter(self, units: int, hung_up: Callable[[], bool]) -> None:
        turn = object()
        deadline = time.monotonic() + ROOM_WAIT_S
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (self.taken and self.taken + units > self._most):
                    if time.monotonic() >= deadline or hung_up():
                        raise QueueFullError(f"too many {self._what} are read at once", retry_after_s=1.0)
                    self._changed.wait(TICK_S)
                self.taken += units
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()


_UNDER_WAY_BYTES = 1 << 20
_LEAST_UNDER_WAY_BYTES = 64 << 10
_FOLLOWED_AT_ONCE = 4
"""Connections that are busy at once where a computation is followed: chunks that are late, beside the present one."""
_SHORT_TICK_S = 1e-3
_SHORT_TICKS = 64
"""Pause between two calls while a computation is waited for, so many times; afterwards a tick, which keeps a slow
medium's buffers full."""
_STAGED_BYTES = 8 << 20
"""Most bytes of several blocks that are copied at once out of memory that the host cannot address."""
_UNPACED = b"reno"
"""Congestion control that every Linux has and lets every user choose."""
_SMALL_BYTES = 64 << 10
REQUESTS = ReadRoom(64 << 20, "bytes of requests")
"""Of requests that are longer than some, while they come and are answered."""
SPANS = ReadRoom(4 * MAX_SPANS_PER_READ, "blocks times segments")
"""Of the answers of all connections of this process. A span takes 40 bytes of memory, 200 over TLS and gloo."""


Answer = Callable[[BlockReads, bool], None]
"""Answers a request that was checked; the second argument: whether checksums are wanted."""
SendData = Callable[[Sequence[Buffer], Sequence[Buffer], Wait], None]
"""Sends an answer's head and its blocks."""


def wait_for_request(stream: Stream, limits: ServeLimits) -> bool:
    """Wait for the next frame of a peer; ``False``: it has hung up, or sent none for ``limits.idle_s``."""
    try:
        stream.wait_readable(Wait(time.monotonic() + limits.idle_s), "waiting for a request")
    except DeadlineError:
        return False
    return not stream.peer_gone()


def serve_reads(stream: Stream, shards: KVShards, limits: ServeLimits, answer: Answer | None = None) -> None:
    """Answer READ and WAIT frames until the peer hangs up, is idle for too long or breaks the protocol.

    Args:
        stream: After the handshake.
        shards: Arenas that are served.
        limits: Time limits for the reader.
        answer: How READ is answered; default: over the stream.

    Raises:
        BatonError: Why the connection should end; the peer may be told.
    """
    suited = 0  # busy connections that the stream is fitted to
    while wait_for_request(stream, limits):
        wait = Wait(time.monotonic() + limits.frame_s)
        kind, length = recv_header(stream, {FrameKind.READ: MAX_READ_BYTES, FrameKind.WAIT: WORD.size}, wait)
        with REQUESTS.reserve(length, stream.hung_up) if length > _SMALL_BYTES else contextlib.nullcontext():
            wait = Wait(time.monotonic() + limits.frame_s)
            payload = stream.recv_exact(length, wait, "reading a request")
            if kind is FrameKind.WAIT:
                send_progress(stream, shards, payload, limits)
            else:
                suited = _answer_read(stream, shards, payload, limits, answer, suited)


def _answer_read(
    stream: Stream, shards: KVShards, payload: bytearray, limits: ServeLimits, answer: Answer | None, suited: int
) -> int:
    """Answer a READ frame; returns how many busy connections the stream is fitted to."""
    reads, checksums, streams = parse_request(payload)
    with contextlib.ExitStack() as held:
        try:
            check_request(reads, shards)
            if answer is not None and reads.steps is not None:
                raise InvalidRequestError("this kind of pipe does not follow a computation", field="steps")
            held.enter_context(SPANS.reserve(len(reads) * reads.num_segments, stream.hung_up))
        except (InvalidRequestError, QueueFullError) as error:
            # The frame was whole: the connection goes on.
            send_error(stream, error, Wait(time.monotonic() + limits.frame_s))
            return suited
        if answer is not None:
            answer(reads, checksums)
            return suited
        at_once = max(streams, 1 if reads.steps is None else _FOLLOWED_AT_ONCE)
        if at_once != suited:
            _suit_to_host(stream, at_once)
        send_blocks(stream, shards, reads, limits, checksums=checksums)
        return at_once


def _suit_to_host(stream: Stream, at_once: int) -> None:
    """Fit a connection between two processes of one host to what limits it there: processors, and their caches.

    What is under way, on all connections that are busy at once, only fills a cache, so it is bounded; and nothing is
    lost or shared that would have to be found out about. A congestion control that paces (BBR) costs a quarter of the
    processor time there, and begins again slowly after every pause that a computation makes. Between hosts both are
    the administrator's and the kernel's.
    """
    if not stream.stays_on_host:
        return
    sock = stream.sock
    with contextlib.suppress(OSError):  # it is gone: the next call will say so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(_LEAST_UNDER_WAY_BYTES, _UNDER_WAY_BYTES // at_once))
    with contextlib.suppress(OSError):  # a kernel that does not let us choose
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def send_progress(
    stream: Stream,
    shards: KVShards,
    payload: bytearray,
    limits: ServeLimits,
    *,
    meanwhile: Callable[[], None] | None = None,
    settle: Callable[[], None] | None = None,
) -> None:
    """Answer a WAIT frame: wait for the computation and say how far it is.

    Args:
        stream: Stream that the frame came from.
        shards: Arenas whose progress is waited for.
        payload: Payload of the frame.
        limits: Time limits for the reader.
        meanwhile: Called while it waits, often at first and seldom in the long run.
        settle: Called when the computation has come so far, before that is said.

    Raises:
        BatonError: Why the connection should end.
    """
    if len(payload) != WORD.size:
        raise BadFrameError(f"a WAIT frame has {len(payload)} bytes")
    now = _await_progress(stream, shards, WORD.unpack(payload)[0], limits, meanwhile)
    if settle is not None:
        settle()
    send = Wait(time.monotonic() + limits.frame_s)
    stream.send_all([pack_header(FrameKind.PROGRESS, WORD.size), WORD.pack(now)], send, "sending progress")


def _await_progress(
    stream: Stream, shards: KVShards, value: int, limits: ServeLimits, meanwhile: Callable[[], None] | None = None
) -> int:
    """Wait for the computation; returns how far it is."""
    progress = shards.primary.progress
    wait = Wait(time.monotonic() + limits.frame_s)
    ticks = itertools.chain(itertools.repeat(_SHORT_TICK_S, _SHORT_TICKS if meanwhile else 0), itertools.repeat(TICK_S))
    while (now := progress.wait(value, next(ticks))) < value:
        if meanwhile is not None:
            meanwhile()
        if stream.hung_up():
            raise PipeClosedError("the reader left while it waited")
        wait.check("waiting for the computation")
    return now


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
    answer = _Answer(stream, shards, reads, limits, checksums=checksums)
    if send is not None:
        answer.send_other(send)
    elif not shards.arenas[reads.source_shard].mapped:
        answer.send_staged()
    elif not stream.encrypted:
        answer.send_spans()
    else:
        answer.send_views()
    answer.end()


class _Answer:
    """An answer on its way."""

    def __init__(
        self, stream: Stream, shards: KVShards, reads: BlockReads, limits: ServeLimits, *, checksums: bool
    ) -> None:
        self._stream = stream
        self._shards = shards
        self._reads = reads
        self._limits = limits
        self._checksums = checksums
        self._arena = shards.arenas[reads.source_shard]
        block_bytes = self._arena.block_bytes
        self._ready, self._steps = zip(*reads.segments_by_step(block_bytes), strict=True)
        self._before = current(shards.primary, reads)
        self._ids = reads.remote_ids[self._before]
        self._sent = pack_bits(self._before)
        length = len(self._sent) + len(self._ids) * reads.bytes_per_block(block_bytes)
        length += tail_bytes(reads, len(self._ids), checksums=checksums)
        self._head: list[Buffer] = [pack_header(FrameKind.BLOCKS, length), self._sent]
        self._sums: Checksums | None = None
        self._waited_s = 0.0

    def send_spans(self) -> None:
        """Send head and blocks out of the arena, hashing on the way."""
        self._stream.send_all(self._head, self._patience(), "sending blocks", stall_s=self._limits.frame_s)
        sizes = step_sizes(self._steps)
        count = len(self._ids)
        hasher = PieceHasher(np.repeat(sizes, count)) if self._checksums else None
        ends = np.cumsum(sizes).astype(np.int64) * count
        send_spans(
            self._stream,
            source_spans(self._arena.blocks, self._ids, self._steps),
            self._patience(),
            hasher,
            stall_s=self._limits.frame_s,
            gate=None if self._reads.steps is None else lambda gone: self._gate(ends, gone),
        )
        self._sums = None if hasher is None else hasher.sums

    def send_views(self) -> None:
        """Send head and blocks through TLS."""
        self._stream.send_all(self._head, self._patience(), "sending blocks", stall_s=self._limits.frame_s)
        for ready, segments in zip(self._ready, self._steps, strict=True):
            self._await(ready)
            views = source_views(self._arena.blocks, self._ids, segments)
            self._stream.send_all(views, self._patience(), "sending blocks", stall_s=self._limits.frame_s)

    def send_staged(self) -> None:
        """Send head and blocks of an arena that the host cannot address, by way of a buffer."""
        self._stream.send_all(self._head, self._patience(), "sending blocks", stall_s=self._limits.frame_s)
        sums: list[Checksums] = [np.empty(0, np.uint64)]
        for ready, segments in zip(self._ready, self._steps, strict=True):
            self._await(ready)
            each = int(segments[:, 2].sum())
            batch = max(1, _STAGED_BYTES // each)
            buffer = np.empty((min(batch, len(self._ids)), each), np.uint8)
            for at in range(0, len(self._ids), batch):
                ids = self._ids[at : at + batch]
                data = buffer[: len(ids)]
                self._arena.read_into(data.reshape(-1), block_spans(ids, segments[:, 0], segments[:, 2]))
                if self._checksums:
                    sums.append(checksums_of(data, np.arange(len(ids)), np.zeros(1, np.int64), np.array([each])))
                whole = data.reshape(-1).data
                self._stream.send_all([whole], self._patience(), "sending blocks", stall_s=self._limits.frame_s)
        self._sums = np.concatenate(sums) if self._checksums else None

    def send_other(self, send: SendData) -> None:
        """Send head and blocks another way; there is one step."""
        send(self._head, source_views(self._arena.blocks, self._ids, self._steps[0]), self._patience())

    def end(self) -> None:
        """Send the tail."""
        if self._checksums and self._sums is None:
            self._sums = np.concatenate(
                [checksums_of(self._arena.blocks, self._ids, each[:, 0], each[:, 2]) for each in self._steps]
            )
        # The kernel has its own copy of every byte now, so a generation that still holds held for all of them.
        fence()
        unchanged = self._before & current(self._shards.primary, self._reads)
        tail = Tail(unchanged, self._sums, round(1e6 * self._waited_s))
        self._stream.send_all([pack_tail(self._reads, self._sent, tail)], self._patience(), "sending")

    def _gate(self, ends: npt.NDArray[np.int64], gone: int) -> int:
        """Wait for the step that begins after so many bytes; returns the end of the last that is there."""
        step = int(np.searchsorted(ends, gone, side="right"))
        now = self._await(self._ready[step])
        while step + 1 < len(ends) and self._ready[step + 1] <= now:
            step += 1
        return int(ends[step])

    def _await(self, ready: int) -> int:
        now = self._shards.primary.progress.value
        if now < ready:
            start = time.perf_counter()
            now = _await_progress(self._stream, self._shards, ready, self._limits)
            self._waited_s += time.perf_counter() - start
        return now

    def _patience(self) -> Wait:
        return Wait(time.monotonic() + self._limits.frame_s)
