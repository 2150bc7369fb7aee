"""Ways to get a source's blocks into a target's arena: the pipes, and what the machine can do without them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, DeadlineError, PipeClosedError, TransferError
from baton.kv_cache.arena import Arena
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockReads,
    BlockSource,
    Endpoint,
    LinkOptions,
    SequenceBlocks,
    TcpOptions,
)
from baton.kv_transfer.blocks.fetcher import PipeDialer
from baton.kv_transfer.pipes.base import ReadPipe
from baton.kv_transfer.streams import (
    Buffer,
    Stream,
    Wait,
    accept_stream,
    bind_tcp,
    close_listener,
    connect_tcp,
)
from baton.kv_transfer.types import Bytes
from baton.kv_transfer.wire import HANDSHAKE_S, PURPOSE_MESSAGES, BadFrameError, Facts, greet_as_client, greet_or_refuse
from baton.rpc.addresses import join_address
from baton.rpc.service_token import Token
from baton.types import Epoch, InstanceId
from baton_bench.kv.memory import device_of, new_shards
from baton_bench.kv.plan import HOST, Ids, Shape, SourceFacts, TargetSpec, sequence_numbers

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 1 << 20
MAX_STEPS = 1 << 15
MAX_SCHEDULE_S = 600
Schedule = npt.NDArray[np.int64]
"""int64 [n, 3]: nanoseconds from the start, progress, whether to report the step (0 or 1)."""
_IDLE_S = 3600.0
"""Longest wait (seconds) for a client; closing wakes every blocked call."""
_ANSWER_S = 10.0
_REQUEST = struct.Struct("<QQ")
_PATIENCE_S = 60
"""Seconds that the kernel lets a bare call wait for the peer."""


class PeerServer(ABC):
    """Serves each peer that connects in a thread of its own.

    Args:
        host: Address to bind.
        token: Shared token.

    Attributes:
        address: host:port where peers connect.
    """

    def __init__(self, host: str, token: Token | None) -> None:
        self._token = token
        self._socket = bind_tcp(host, 0, token)
        self._socket.listen()
        self.address = join_address(host, self._socket.getsockname()[1])
        self._closing = threading.Event()
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="bench-accept", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop listening, hang up on all peers, and wait for the threads."""
        self._closing.set()
        close_listener(self._socket)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        for thread in self._threads:
            thread.join(_ANSWER_S)

    @abstractmethod
    def _serve(self, stream: Stream) -> None:
        """Serve a peer until it leaves."""

    def _accept(self) -> None:
        while True:
            try:
                stream = accept_stream(self._socket, Wait(), "a peer")
            except PipeClosedError:
                return
            if not greet_or_refuse(stream, self._token, _soon()):
                continue
            with self._lock:
                self._streams.add(stream)
            if self._closing.is_set():  # it may have come too late for ``close`` to see it
                stream.close()
            thread = threading.Thread(target=self._serve_peer, args=(stream,), name="bench-serve", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve_peer(self, stream: Stream) -> None:
        try:
            self._serve(stream)
        except (PipeClosedError, OSError) as error:
            log.debug("a peer left: %s", error)
        except BatonError as error:
            log.warning("a peer was sent away: %s", error)
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)


class MessageStream:
    """Small messages over a stream: one byte for the kind, the length (uint32), the payload.

    Args:
        stream: A connected stream whose peer was authenticated.
    """

    ECHO = b"E"
    """Comes back as it is."""
    SCHEDULE = b"S"
    """A :data:`Schedule` to follow from now on."""
    STEP = b"P"
    """The number (uint64) of a schedule's step that was reached."""
    _HEAD = struct.Struct("<cI")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @classmethod
    def connect(cls, address: str, token: Token | None) -> MessageStream:
        """Connect to a :class:`MessageServer`.

        Raises:
            PipeClosedError: Nothing listens there.
            UnauthenticatedError: The tokens differ.
            DeadlineError: It took too long.
        """
        return cls(_connect(address, token))

    def send(self, kind: bytes, payload: Buffer, *, timeout_s: float = _ANSWER_S) -> None:
        """Send a message.

        Raises:
            PipeClosedError, DeadlineError: As their names say.
        """
        head = self._HEAD.pack(kind, len(payload))
        self._stream.send_all([head, payload], Wait(time.monotonic() + timeout_s), "sending a message")

    def recv(self, *, deadline: float) -> tuple[bytes, bytearray]:
        """Receive a message; returns its kind and payload.

        Raises:
            BadFrameError: It is over the bound.
            PipeClosedError, DeadlineError: As their names say.
        """
        wait = Wait(deadline)
        self._stream.wait_readable(wait, "waiting for a message")
        kind, length = self._HEAD.unpack(self._stream.recv_exact(self._HEAD.size, wait, "receiving a message"))
        if length > MAX_MESSAGE_BYTES:
            raise BadFrameError(f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} are taken")
        return kind, self._stream.recv_exact(length, wait, "receiving a message")

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MessageServer(PeerServer):
    """Echoes messages, and follows schedules, with which a source that simulates computing reports its progress.

    A step of a schedule raises the source's progress and, if asked for, is reported. Waiting for it is a wait on a
    deadline, because what computes in a real instance is not this processor.

    Args:
        host: Address to bind.
        token: Shared token.
        advance: Raises the source's progress.
    """

    def __init__(self, host: str, token: Token | None, advance: Callable[[int], None]) -> None:
        self._advance = advance
        super().__init__(host, token)

    def _serve(self, stream: Stream) -> None:
        messages = MessageStream(stream)
        while True:
            try:
                kind, payload = messages.recv(deadline=time.monotonic() + _IDLE_S)
            except DeadlineError:
                continue
            if kind == MessageStream.SCHEDULE:
                self._follow(messages, _parse_schedule(payload))
            else:
                messages.send(kind, payload)

    def _follow(self, messages: MessageStream, schedule: Schedule) -> None:
        start = time.monotonic()
        for step, (after, progress, report) in enumerate(schedule.tolist()):
            if self._closing.wait(max(0.0, start + after / 1e9 - time.monotonic())):
                return
            self._advance(progress)
            if report:
                messages.send(MessageStream.STEP, step.to_bytes(8, "little"))


def round_trips(messages: MessageStream, size: int, count: int, limit_s: float) -> list[float]:
    """Send a message of ``size`` bytes and wait until it is back, up to ``count`` times or for ``limit_s`` seconds.

    Returns:
        Seconds of each round trip.

    Raises:
        BadFrameError: Another message came back.
        PipeClosedError, DeadlineError: As their names say.
    """
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()

    def round_trip() -> None:
        messages.send(MessageStream.ECHO, data)
        kind, echo = messages.recv(deadline=time.monotonic() + _ANSWER_S)
        if kind != MessageStream.ECHO or echo != data:
            raise BadFrameError("another message came back")

    return timed(round_trip, count, limit_s)


def timed(call: Callable[[], object], count: int, limit_s: float) -> list[float]:
    """Call up to ``count`` times, or until ``limit_s`` seconds are over; returns the seconds of each call."""
    seconds: list[float] = []
    start = before = time.perf_counter()
    while len(seconds) < count and before - start < limit_s:
        call()
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    return seconds


def send_schedule(messages: MessageStream, schedule: Schedule) -> None:
    """Have a schedule followed from now on; :func:`recv_step` gets its steps."""
    messages.send(MessageStream.SCHEDULE, schedule.tobytes())


def recv_step(messages: MessageStream, *, deadline: float) -> int:
    """Wait for a schedule's next step; returns its number.

    Raises:
        BadFrameError: Something else came.
        PipeClosedError, DeadlineError: As their names say.
    """
    kind, payload = messages.recv(deadline=deadline)
    if kind != MessageStream.STEP or len(payload) != 8:
        raise BadFrameError("a step was expected")
    return int.from_bytes(payload, "little")


def _parse_schedule(payload: bytearray) -> Schedule:
    rows, rest = divmod(len(payload), 24)
    if rest or not 0 < rows <= MAX_STEPS:
        raise BadFrameError(f"a schedule of {len(payload)} bytes")
    schedule = np.frombuffer(payload, dtype=np.int64).reshape(rows, 3)
    if schedule.min() < 0 or schedule[:, 0].max() > MAX_SCHEDULE_S * 1e9:
        raise BadFrameError("a schedule goes forward, and not for longer than ten minutes")
    return schedule


class BareServer(PeerServer):
    """Sends ranges of a block of memory to peers that ask for them.

    Args:
        memory: uint8 [bytes].
        host: Address to bind.
        token: Shared token.
    """

    def __init__(self, memory: Bytes, host: str, token: Token | None) -> None:
        self._memory = memory
        super().__init__(host, token)

    def _serve(self, stream: Stream) -> None:
        whole = self._memory.data
        while True:
            stream.wait_readable(Wait(), "waiting for a request")
            offset, size = _REQUEST.unpack(stream.recv_exact(_REQUEST.size, _soon(), "reading a request"))
            if offset + size > len(whole):
                raise BadFrameError("a bare reader asked for what is not there")
            make_bare(stream).sendall(whole[offset : offset + size])


class BareReader:
    """One bare connection."""

    def __init__(self, address: str, token: Token | None) -> None:
        self._stream = _connect(address, token)
        self._socket = make_bare(self._stream)

    def read(self, offset: int, view: memoryview) -> None:
        """Read ``len(view)`` bytes from an offset of the source's memory.

        Raises:
            PipeClosedError: The source is gone, or silent.
        """
        try:
            self._socket.sendall(_REQUEST.pack(offset, len(view)))
            at = 0
            while at < len(view):
                got = self._socket.recv_into(view[at:])
                if got == 0:
                    raise PipeClosedError("the bare socket's peer hung up")
                at += got
        except OSError as error:
            raise PipeClosedError(f"the bare socket failed: {os.strerror(error.errno or 0)}") from error

    def close(self) -> None:
        self._stream.close()


def make_bare(stream: Stream) -> socket.socket:
    """Return a stream's socket with one long kernel time-out instead of the ticks of Baton's streams."""
    sock = stream.sock
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        with contextlib.suppress(OSError):  # closed by the peer: the next call will say so
            sock.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", _PATIENCE_S, 0))
    return sock


def _connect(address: str, token: Token | None) -> Stream:
    wait = _soon()
    stream = connect_tcp(address, wait)
    try:
        greet_as_client(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
    except BaseException:
        stream.close()
        raise
    return stream


def _soon() -> Wait:
    return Wait(time.monotonic() + HANDSHAKE_S)


RUN_S = 120.0
"""Longest time (seconds) that one run may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """A sequence to move from one source.

    Attributes:
        source: Index among the target's sources.
        remote: The sequence's blocks there, int64 [n].
        local: And here, int64 [w]; blocks may have another size.
    """

    source: int
    remote: Ids
    local: Ids


class Method(ABC):
    """A way to move blocks."""

    @abstractmethod
    def run(self, flows: Sequence[Flow]) -> int:
        """Move all flows at once; returns the bytes moved once the reader knows that they are valid.

        Raises:
            BatonError: It failed, or a block was not valid.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and free memory."""


class PipeMethod(Method):
    """Baton's block fetcher over one kind of pipe, one thread per flow.

    Args:
        shards: Where to.
        spec: Specification of the target.
        name: The kind; ``tcp-unchecked``: TCP without checksums.
        streams: TCP connections per flow.
        token: Shared token.

    Raises:
        PipeClosedError: A source does not offer the kind; says why.
    """

    def __init__(self, shards: KVShards, spec: TargetSpec, name: str, streams: int, token: Token | None) -> None:
        kind, _, variant = name.partition("-")
        self._sources = [_block_source(source, kind) for source in spec.sources]
        self._generations = [sequence_numbers(source.num_blocks) for source in spec.sources]
        links = LinkOptions(token=token, tcp=TcpOptions(streams=streams, checksums=variant != "unchecked"))
        self._shards = shards
        self._spec = spec
        self._dialer = PipeDialer((kind,), links)
        self._fetcher = BlockFetcher(shards, spec.shape.fingerprint(), kinds=(kind,), links=links)
        self._pool = ThreadPoolExecutor(len(self._sources), "bench-flow")

    def run(self, flows: Sequence[Flow]) -> int:
        return _all_at_once(self._pool, [lambda flow=flow: self._fetch(flow) for flow in flows])  # type: ignore[misc]

    def close(self) -> None:
        self._pool.shutdown()
        self._fetcher.close()
        self._dialer.close()

    def open_pipe(self, source: int) -> ReadPipe:
        """Open a pipe of its own to a source; the caller closes it.

        Raises:
            PipeClosedError: The source is not reached.
        """
        there = self._sources[source]
        facts = Facts(there.epoch, self._spec.shape.fingerprint(), there.num_blocks, there.fingerprint)
        return self._dialer.connect(there, facts, Wait(time.monotonic() + RUN_S))[0]

    def read_one(self, pipe: ReadPipe, block: int) -> Callable[[], None]:
        """Return a call that reads one block to the same place of the target.

        Raises (the call):
            TransferError: The block was not valid.
        """
        reads = BlockReads.of([block], self._generations[0][[block]], [block])
        local = self._shards.primary.blocks

        def once() -> None:
            if np.count_nonzero(pipe.read(reads, local, Wait(time.monotonic() + RUN_S))) != len(reads):
                raise TransferError(f"block {block} was not valid")

        return once

    def fetch_part(self, flow: Flow, part: range, ready: int | None) -> int:
        """Fetch some blocks of a flow's sequence.

        Args:
            flow: Flow of the whole sequence.
            part: Its source blocks to fetch, by their place in the sequence.
            ready: The source's progress before their first layer, if it is still computing them.

        Returns:
            Bytes received.

        Raises:
            BatonError: It failed, or a block was not valid.
        """
        remote = flow.remote[part.start : part.stop]
        offered = remote, self._generations[flow.source][remote], np.arange(part.start, part.stop)
        blocks = SequenceBlocks.of(offered, flow.local, np.ones(len(flow.local), dtype=np.bool_), ready)
        source = self._sources[flow.source]
        deadline = time.monotonic() + RUN_S
        result = self._fetcher.fetch_sequence(source, blocks, deadline=deadline)
        if not result.valid.all():
            raise TransferError(f"{int((~result.valid).sum())} of {len(result.valid)} blocks were not valid")
        return result.num_bytes

    def _fetch(self, flow: Flow) -> int:
        return self.fetch_part(flow, range(len(flow.remote)), None)


class MemcpyMethod(Method):
    """One thread's ``memcpy`` inside the target: all bytes at once, or a call per block, read forwards as pipes do."""

    def __init__(self, shards: KVShards, shape: Shape, *, each_block: bool) -> None:
        self._target = shards
        self._each = each_block
        self._here = new_shards(shape, HOST, shards.primary.num_blocks)
        self._here.touch()

    def run(self, flows: Sequence[Flow]) -> int:
        total = 0
        for arena, here in zip(self._target.arenas, self._here.arenas, strict=True):
            to = arena.blocks.ctypes.data
            start = here.blocks.ctypes.data
            size = arena.block_bytes
            for flow in flows:
                total += len(flow.local) * size
                if self._each:
                    for remote, local in zip(np.sort(flow.local).tolist(), flow.local.tolist(), strict=True):
                        ctypes.memmove(to + local * size, start + remote * size, size)
                else:
                    at = flow.source * (arena.num_blocks // len(flows)) * size
                    ctypes.memmove(to + at, start + at, len(flow.local) * size)
        return total

    def close(self) -> None:
        self._here.close()


class DeviceCopyMethod(Method):
    """The counterpart of :class:`MemcpyMethod` in CUDA's runtime: one copy of all bytes, or one per block.

    From one device's memory to another's (or its own), or between a device's and pinned memory of the host. Source and
    target are the target's own: no other process has a part in it.

    Args:
        spec: Of the target: its blocks, and where both ends lie.
        each_block: Whether to copy block by block, in the order that pipes read them in.

    Raises:
        ConfigError: They do not fit the device.
    """

    def __init__(self, spec: TargetSpec, *, each_block: bool) -> None:
        import torch

        from baton.engine.device_memory import Place, allocate, queue_copy

        self._each = each_block
        self._queue_copy = queue_copy
        self._stream = 0
        self._blocks = spec.num_blocks
        self._sizes = [layout.block_bytes for layout in spec.shape.layouts()]
        self._done: Callable[[], None] = lambda: None
        # The device whose stream copies: where the bytes come from, unless that is the host.
        device = device_of(spec.memory if spec.source_memory == HOST else spec.source_memory)
        if device.is_cuda:
            stream = torch.cuda.Stream(device.memory)  # type: ignore[no-untyped-call]
            self._stream = stream.cuda_stream
            self._done = stream.synchronize

        def memory(where: str, size: int) -> torch.Tensor:
            if where == HOST:
                return torch.zeros(size, dtype=torch.uint8, pin_memory=device.is_cuda)
            return allocate(device_of(where).memory, size).tensor

        count = spec.num_blocks * len(spec.sources)
        self._ends = [[memory(end, count * size) for size in self._sizes] for end in (spec.memory, spec.source_memory)]
        self._places = [[Place.of(tensor) for tensor in end] for end in self._ends]

    def run(self, flows: Sequence[Flow]) -> int:
        total = 0
        for to, here, size in zip(*self._places, self._sizes, strict=True):
            for flow in flows:
                total += len(flow.local) * size
                if self._each:
                    for remote, local in zip(np.sort(flow.local).tolist(), flow.local.tolist(), strict=True):
                        self._queue_copy(to + local * size, here + remote * size, size, self._stream)
                else:
                    at = flow.source * self._blocks * size
                    self._queue_copy(to + at, here + at, len(flow.local) * size, self._stream)
        self._done()
        return total

    def close(self) -> None:
        self._places = []
        self._ends = []


class SocketMethod(Method):
    """Bare sockets, ``streams`` per source, each with its share of the bytes, contiguous in host memory on both sides.

    They move the first rank's blocks, as often as it takes to move as much as all ranks have.
    """

    def __init__(self, arena: Arena, sources: Sequence[SourceFacts], streams: int, token: Token | None) -> None:
        self._arena = arena
        self._streams = streams
        self._block_bytes = [[layout.block_bytes for layout in source.shape.layouts()] for source in sources]
        self._readers: list[list[BareReader]] = [[] for _ in sources]
        try:
            for readers, source in zip(self._readers, sources, strict=True):
                readers += [BareReader(source.bare, token) for _ in range(streams)]
        except BaseException:
            self._close_readers()
            raise
        self._pool = ThreadPoolExecutor(len(sources) * streams, "bench-socket")

    def run(self, flows: Sequence[Flow]) -> int:
        flat = self._arena.blocks.reshape(-1).data
        jobs = []
        share = self._arena.num_blocks // len(self._readers) * self._arena.block_bytes
        for flow in flows:
            first, total = (len(flow.remote) * x for x in (self._block_bytes[flow.source][0], self._all(flow.source)))
            size = min(first, share)
            edges = [size * i // self._streams for i in range(self._streams + 1)]
            base = flow.source * share
            for reader, (begin, end) in zip(self._readers[flow.source], itertools.pairwise(edges), strict=True):
                jobs.append(_reading(reader, begin, flat[base + begin : base + end], max(1, round(total / size))))
        return _all_at_once(self._pool, jobs)

    def close(self) -> None:
        self._close_readers()
        self._pool.shutdown()

    def _all(self, source: int) -> int:
        """Bytes of a block of all of a source's ranks."""
        return sum(self._block_bytes[source])

    def _close_readers(self) -> None:
        for readers in self._readers:
            for reader in readers:
                reader.close()


def _reading(reader: BareReader, offset: int, view: memoryview, times: int) -> Callable[[], int]:
    def read() -> int:
        for _ in range(times):
            reader.read(offset, view)
        return times * len(view)

    return read


def _all_at_once(pool: ThreadPoolExecutor, jobs: Sequence[Callable[[], int]]) -> int:
    """Run jobs side by side, the first in this thread; returns the sum once all have ended.

    Raises:
        BatonError: Error of the first job that failed.
    """
    others = [pool.submit(job) for job in jobs[1:]]
    failure: BaseException | None = None
    total = 0
    for result in (jobs[0], *(other.result for other in others)):
        try:
            total += result()
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return total


def _block_source(facts: SourceFacts, kind: str) -> BlockSource:
    endpoints = tuple(Endpoint(name, address) for name, address in facts.endpoints if name == kind)
    if not endpoints:
        raise PipeClosedError(dict(facts.refused).get(kind, f"source {facts.index} does not offer {kind}"))
    return BlockSource(
        InstanceId(f"source-{facts.index}-{kind}"),
        Epoch(bytes.fromhex(facts.epoch)),
        endpoints,
        facts.shape.fingerprint(),
        facts.num_blocks,
    )
