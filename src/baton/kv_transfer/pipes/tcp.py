"""One-sided reads over TCP: a server thread per connection sends blocks out of the arenas (``read_server``).

Requests and answers are those of ``baton.kv_transfer.wire``, and::

    WAIT      value u64        wait until the source's progress has reached the value
    PROGRESS  progress u64     it has

No byte is copied in Python on either side: ``sendmsg`` takes views of the source arena, ``recvmsg_into`` fills views of
the target arena.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import numpy as np

from baton.errors import BatonError, ConfigError, InternalError, InvalidRequestError, PermissionDeniedError
from baton.kv_transfer.native_copy import PieceHasher, recv_spans
from baton.kv_transfer.pipes.base import (
    FollowingReadPipe,
    LayerRead,
    PipeKind,
    PipeOptions,
    Served,
    SocketPipeServer,
    TcpOptions,
)
from baton.kv_transfer.pipes.pool import Connection, PooledReadPipe
from baton.kv_transfer.pipes.read_server import serve_reads
from baton.kv_transfer.streams import (
    EitherFlag,
    Stream,
    Wait,
    bind_tcp,
    connect_tcp,
    run_together,
    split_address,
    tls_from,
    tls_to,
)
from baton.kv_transfer.types import BlockReads, Bytes, Ids, Valid
from baton.kv_transfer.wire import (
    PURPOSE_READ,
    BadFrameError,
    Checksums,
    Facts,
    FrameKind,
    checksums_of,
    greet_as_client,
    pack_header,
    pack_request,
    parse_tail,
    recv_header,
    send_error,
    step_sizes,
    tail_bytes,
    target_spans,
    target_views,
    unpack_bits,
)
from baton.rpc.addresses import join_address
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

log = logging.getLogger(__name__)
T = TypeVar("T")
_MAX_CONNECTIONS = 16
_ASKED_BYTES = 32 << 10
"""Bytes of requests from which on no more are made ahead: they lie in the peer's buffer while it sends."""


RecvData = Callable[[Sequence[memoryview], Wait], None]
"""Receives an answer's blocks."""


class TcpReadPipe(PooledReadPipe[Connection], FollowingReadPipe):
    """Reads a peer's blocks over a small pool of connections.

    Args:
        dial: Opens one more connection, handshake included.
        options: How reads are split and checked.
    """

    kind: ClassVar[str] = "tcp"

    def __init__(self, dial: Callable[[Wait], Connection], options: TcpOptions) -> None:
        streams = options.streams
        super().__init__(dial, max_connections=max(streams, _MAX_CONNECTIONS))
        self._options = options
        self._pool = ThreadPoolExecutor(self._max_connections, "baton-tcp-read") if streams > 1 else None

    def read(self, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        size = len(reads) * reads.bytes_per_block(local.shape[1])
        parts = self._num_shares(self._streams_of_read(), len(reads), size)
        if parts == 1:
            return super().read(reads, local, wait)
        read = super().read
        shares = _shares(reads, parts)
        return np.concatenate(self._together(lambda i, each: read(shares[i], local, each), parts, wait))

    def follow(self, reads: Sequence[LayerRead], wait: Wait) -> tuple[list[Valid], float]:
        """Ask for several reads ahead; see :meth:`FollowingReadPipe.follow`."""
        if any(len(each.reads) > each.reads.blocks_per_request for each in reads):
            raise InvalidRequestError("the reads have too many blocks to be followed", field="reads")
        most = max((len(each.reads) for each in reads), default=0)
        size = sum(len(each.reads) * each.reads.bytes_per_block(each.local.shape[1]) for each in reads)
        parts = self._num_shares(self._streams_of_chunk(), most, size)
        if parts == 1:
            return self._follow(reads, wait, 1)
        cut = [[LayerRead(share, each.local) for share in _shares(each.reads, parts)] for each in reads]
        came = self._together(lambda i, wait: self._follow([shares[i] for shares in cut], wait, parts), parts, wait)
        valid = [np.concatenate(each) for each in zip(*(share for share, _ in came), strict=True)]
        return valid, max(waited_s for _, waited_s in came)

    def request(self, connection: Connection, reads: BlockReads, local: Bytes, wait: Wait) -> Valid:
        return request_blocks(connection.stream, reads, local, wait, options=self._options)

    def _streams_of_read(self) -> int:
        """Connections for a read in one go."""
        options = self._options
        return min(options.streams, options.streams_on_host) if self._stays_on_host() else options.streams

    def _stays_on_host(self) -> bool:
        with self._changed:
            connection = next(iter(self._open), None)
        return connection is not None and connection.stream.stays_on_host

    def _streams_of_chunk(self) -> int:
        """Connections for a chunk that is followed: a chunk that cannot keep pace still travels when the next begins.

        Between hosts half of them. On one host the two ends compete for its processors, and each connection more costs
        processor time for every layer, so chunks get a quarter: as many chunks travel at once as fetches are made.
        """
        return self._options.streams // (4 if self._stays_on_host() else 2)

    def _follow(self, reads: Sequence[LayerRead], wait: Wait, parts: int) -> tuple[list[Valid], float]:
        """Follow over one connection of so many that share the reads."""
        valid = list[Valid]()
        waited_s = 0.0
        ahead: deque[tuple[LayerRead, int]] = deque()
        coming = iter(reads)
        under_way = 0
        with self.connection(wait) as connection:
            stream = connection.stream
            while True:
                while (not ahead or under_way < _ASKED_BYTES) and (each := next(coming, None)) is not None:
                    ahead.append((each, _ask(stream, each.reads, wait, self._options.checksums, parts)))
                    under_way += ahead[-1][1]
                if not ahead:
                    break
                each, size = ahead.popleft()
                answer = _Answer(stream, each.reads, each.local, self._options)
                valid.append(answer.receive(wait))
                waited_s += answer.waited_s
                under_way -= size
        return valid, waited_s

    def _num_shares(self, most: int, num_blocks: int, num_bytes: int) -> int:
        """Connections that are worth their while."""
        return max(1, min(most, num_blocks, num_bytes // self._options.share_bytes))

    def _together(self, one: Callable[[int, Wait], T], parts: int, wait: Wait) -> list[T]:
        """Do each connection's share."""
        if self._pool is None:
            raise InternalError("a read over several connections without threads for them")
        siblings = EitherFlag(wait.cancelled)
        each = Wait(wait.deadline, siblings, wait.stall)
        others = [self._pool.submit(one, i, each) for i in range(1, parts)]
        return run_together(lambda: one(0, each), others, siblings)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class TlsReadPipe(TcpReadPipe):
    """The same over TLS."""

    kind: ClassVar[str] = "tls"


class TcpServer(SocketPipeServer):
    """Serves reads on a TCP port; with ``safe`` peers show certificates, and no token is needed."""

    def __init__(self, served: Served, options: PipeOptions, *, safe: bool = False) -> None:
        self._served = served
        self.listener = bind_tcp(served.host, served.port, options.token, safe=safe)
        self.address = join_address(served.advertise_host or served.host, self.listener.getsockname()[1])

    def serve(self, stream: Stream, wait: Wait) -> None:
        serve_reads(stream, self._served.shards, self._served.limits)


class TlsServer(TcpServer):
    """The same over TLS."""

    def __init__(self, served: Served, options: PipeOptions, tls: Tls) -> None:
        super().__init__(served, options, safe=True)
        self._tls = tls

    def admit(self, stream: Stream, wait: Wait) -> Stream:
        """Encrypt the connection, of a peer that may read blocks."""
        encrypted = tls_from(stream, self._tls, wait)
        if self._tls.roles is not None:
            try:
                self._tls.roles.require_reader(encrypted.certificate_uris)
            except PermissionDeniedError as error:
                # It reads this in the place of a challenge.
                with contextlib.suppress(BatonError):
                    send_error(encrypted, error, wait)
                encrypted.close()
                raise
        return encrypted


class TcpKind(PipeKind):
    """Pipes over TCP."""

    name: ClassVar[str] = "tcp"
    read_pipe: ClassVar[type[TcpReadPipe]] = TcpReadPipe
    _tls: Tls | None = None

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        """Whether KV may travel in the clear."""
        return options.tls is None

    def connect(self, address: str, facts: Facts, wait: Wait) -> TcpReadPipe:
        def dial(wait: Wait) -> Connection:
            return Connection(dial_reader(address, facts, self.options.token, wait, tls=self._tls))

        pipe = self.read_pipe(dial, self.options.tcp)
        pipe.open_first(wait)
        return pipe

    def listen(self, served: Served) -> TcpServer:
        return TcpServer(served, self.options) if self._tls is None else TlsServer(served, self.options, self._tls)


class TlsKind(TcpKind):
    """Pipes over TLS."""

    name: ClassVar[str] = "tls"
    read_pipe: ClassVar[type[TcpReadPipe]] = TlsReadPipe

    def __init__(self, options: PipeOptions) -> None:
        super().__init__(options)
        if options.tls is None:
            raise ConfigError(self.obstacle(options), field="pipes")
        self._tls = options.tls

    @classmethod
    def obstacle(cls, options: PipeOptions) -> str:
        """Certificates are needed."""
        return "the tls pipe needs --tls-cert, and no --clear-kv" if options.tls is None else ""

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        return True


def dial_reader(address: str, facts: Facts, token: Token | None, wait: Wait, *, tls: Tls | None = None) -> Stream:
    """Connect to a block server's endpoint that listens on TCP, and shake hands; with certificates over TLS first.

    Raises:
        PipeClosedError: Nothing listens there.
        UnauthenticatedError, StaleBlockError, FingerprintMismatchError: The handshake failed.
    """
    stream = connect_tcp(address, wait)
    if tls is not None:
        stream = tls_to(stream, tls, split_address(address)[0], wait)
    with stream.closed_on_error():
        greet_as_client(stream, token, wait, purpose=PURPOSE_READ, facts=facts)
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
    """Ask for blocks on one connection and receive them; at most ``reads.blocks_per_request``.

    ``recv``: another way for the blocks than the stream.
    """
    _ask(stream, reads, wait, options.checksums, options.streams)
    return _Answer(stream, reads, local, options).receive(wait, recv)


def _shares(reads: BlockReads, parts: int) -> list[BlockReads]:
    edges = [len(reads) * i // parts for i in range(parts + 1)]
    return [reads.select(slice(a, b)) for a, b in itertools.pairwise(edges)]


def _ask(stream: Stream, reads: BlockReads, wait: Wait, checksums: bool, streams: int) -> int:
    """Send a request; returns its size in bytes."""
    payload = pack_request(reads, checksums=checksums, streams=streams)
    stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], wait, "asking for blocks")
    return len(payload)


class _Answer:
    """The answer to a request.

    Attributes:
        waited_s: Seconds that the source says it waited for its computation.
    """

    def __init__(self, stream: Stream, reads: BlockReads, local: Bytes, options: TcpOptions) -> None:
        self._stream = stream
        self._reads = reads
        self._local = local
        self._options = options
        self._steps = [segments for _, segments in reads.segments_by_step(local.shape[1])]
        self.waited_s = 0.0

    def receive(self, wait: Wait, recv: RecvData | None = None) -> Valid:
        """Receive it; ``recv``: another way for the blocks than the stream. Returns which blocks are valid."""
        stream, reads, checksums, count = self._stream, self._reads, self._options.checksums, len(self._reads)
        each = reads.bytes_per_block(self._local.shape[1])
        bitmap = -(-count // 8)
        most = bitmap + count * each + tail_bytes(reads, count, checksums=checksums)
        _, length = recv_header(stream, {FrameKind.BLOCKS: most}, wait)
        sent_bits = stream.recv_exact(bitmap, wait, "receiving blocks")
        sent = unpack_bits(sent_bits, count)
        targets = reads.local_ids if sent.all() else reads.local_ids[sent]
        rest = tail_bytes(reads, len(targets), checksums=checksums)
        if length != bitmap + len(targets) * each + rest:
            raise BadFrameError(f"{length} bytes came for {len(targets)} blocks")
        found = self._receive_blocks(targets, wait, recv)
        tail = parse_tail(reads, sent_bits, stream.recv_exact(rest, wait, "receiving blocks"), checksums=checksums)
        self.waited_s = tail.waited_us / 1e6
        valid = sent & tail.unchanged
        if tail.sums is not None:
            right = (tail.sums == found).reshape(len(self._steps), len(targets)).all(axis=0)
            wrong = np.flatnonzero(sent)[~right]
            damaged = wrong[valid[wrong]]  # blocks recycled meanwhile are known to be stale, and no fault of the way
            if len(damaged):
                log.error("%d of %d blocks from %s were damaged on their way", len(damaged), len(targets), stream.peer)
                valid[damaged] = False
        return valid

    def _receive_blocks(self, targets: Ids, wait: Wait, recv: RecvData | None) -> Checksums | None:
        """Fill the target's blocks; returns what their checksums are, step by step, if they are wanted."""
        stream = self._stream
        local = self._local
        checksums = self._options.checksums
        if recv is None and not stream.encrypted:
            hasher = PieceHasher(np.repeat(step_sizes(self._steps), len(targets))) if checksums else None
            recv_spans(stream, target_spans(local, targets, self._steps), wait, hasher)
            return None if hasher is None else hasher.sums
        if recv is None:
            views = [view for segments in self._steps for view in target_views(local, targets, segments)]
            stream.recv_into(views, wait, "receiving blocks")
        else:
            recv(target_views(local, targets, self._steps[0]), wait)
        if not checksums:
            return None
        # Before the tail is there: the server hashes at the same time.
        return np.concatenate([checksums_of(local, targets, each[:, 1], each[:, 2]) for each in self._steps])
