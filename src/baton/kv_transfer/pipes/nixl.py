"""One-sided reads through NIXL: the reader takes the blocks out of the owner's registered arenas by itself.

A connection beside it carries the handshake, what NIXL must know of the arenas, and per read::

    READ       as over TCP, without steps and checksums
    BLOCKS     sent: bitmap (which blocks had the generation asked for; these may be read now)
    WAIT, PROGRESS  as over TCP, any number of times: a reader of what is being computed asks for its next layers
    READ_DONE  (empty) the reader has them
    BLOCKS     unchanged: bitmap

Blocks may be in device memory on either side, if NIXL can register it: a card that reads the GPU's memory then takes
them without a way through the host's. What the source's device has queued it has done before the first answer
(:meth:`~baton.kv_cache.arena.SharedDeviceArena.settle`), and the target's before it is written.

Between the first answer and READ_DONE the owner's serving thread drives its agent, which UCX needs where the medium has
no one-sided reads of its own (sockets), and to connect two agents. Otherwise nothing polls.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from baton.config.environment import infiniband_ports
from baton.errors import ConfigError, InternalError, InvalidRequestError
from baton.kv_cache.arena import Arena, MemoryRange, SharedDeviceArena, memory_range
from baton.kv_cache.reshard import merge_segments
from baton.kv_transfer.native_copy import COPY_BATCH_BYTES, fence, merge_runs
from baton.kv_transfer.pipes.base import (
    DeviceReadPipe,
    FollowingReadPipe,
    LayerRead,
    PipeKind,
    PipeOptions,
    Served,
    ServeLimits,
)
from baton.kv_transfer.pipes.nixl_agent import (
    NixlAgent,
    Region,
    Rows,
    describe_agent,
    device_obstacle,
    nixl_obstacle,
    parse_agent,
    progress_until_readable,
    range_of,
    segment_type,
)
from baton.kv_transfer.pipes.pool import WORD, Connection, PooledReadPipe, recv_progress, request_progress
from baton.kv_transfer.pipes.read_server import send_progress, serve_reads
from baton.kv_transfer.pipes.tcp import TcpServer, dial_reader
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Valid, current
from baton.kv_transfer.wire import (
    BadFrameError,
    Facts,
    FrameKind,
    pack_bits,
    pack_header,
    pack_request,
    recv_control,
    recv_header,
    send_control,
    unpack_bits,
)
from baton.rpc.service_token import Token

BATCH_ROWS = 16_384
"""Rows of one NIXL request at most."""
_MAX_RANKS = 1024
_MAX_CONNECTIONS = 16
_Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Base:
    """Where blocks are.

    Attributes:
        address: Address of the first block.
        block_bytes: Bytes per block.
        device: Index of the GPU that has them; ``None``: host memory.
    """

    address: int
    block_bytes: int
    device: int | None = None

    @property
    def kind(self) -> str:
        """What NIXL calls the memory."""
        return segment_type(MemoryRange(self.address, 0, self.device))


def base_of(blocks: Bytes | SharedDeviceArena) -> Base:
    """Return where a target's blocks are."""
    if isinstance(blocks, SharedDeviceArena):
        where = blocks.memory_range()
        return Base(where.address, blocks.block_bytes, where.device)
    return Base(int(blocks.ctypes.data), blocks.shape[1])


def batches(reads: BlockReads, local: Base, base: Base) -> Iterator[tuple[Rows, Rows]]:
    """Cut reads into NIXL requests: rows of where to and where from, neighbours joined."""
    block_bytes, remote_bytes = local.block_bytes, base.block_bytes
    if reads.segments is None:
        if remote_bytes != block_bytes:
            raise InvalidRequestError(f"blocks of {remote_bytes} bytes into blocks of {block_bytes}", field="segments")
        runs = merge_runs(reads.remote_ids, reads.local_ids)
        to = runs[:, 0] * block_bytes
        source = runs[:, 1] * block_bytes
        sizes = runs[:, 2] * block_bytes
    else:
        segments = reads.segments
        to = (reads.local_ids[:, None] * block_bytes + segments[:, 1]).reshape(-1)
        source = (reads.remote_ids[:, None] * remote_bytes + segments[:, 0]).reshape(-1)
        sizes = np.broadcast_to(segments[:, 2], (len(reads), len(segments))).reshape(-1)
    to, source, sizes = _cut(to, source, sizes)
    if len(sizes) == 0:
        return
    batch = (np.cumsum(sizes) - sizes) // COPY_BATCH_BYTES
    edges = np.union1d(np.flatnonzero(np.diff(batch)) + 1, np.arange(0, len(sizes), BATCH_ROWS)).astype(np.int64)
    for first, end in zip(edges.tolist(), [*edges[1:].tolist(), len(sizes)], strict=True):
        part = slice(first, end)
        yield _rows(local, to[part], sizes[part]), _rows(base, source[part], sizes[part])


def _cut(to: _Numbers, source: _Numbers, sizes: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Cut rows longer than a batch."""
    if len(sizes) == 0 or int(sizes.max()) <= COPY_BATCH_BYTES:
        return to, source, sizes
    pieces = -(-sizes // COPY_BATCH_BYTES)
    of = np.repeat(np.arange(len(sizes)), pieces)
    offsets = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * COPY_BATCH_BYTES
    return to[of] + offsets, source[of] + offsets, np.minimum(COPY_BATCH_BYTES, sizes[of] - offsets)


def _rows(base: Base, offsets: _Numbers, sizes: _Numbers) -> Rows:
    rows = np.empty((len(sizes), 3), dtype=np.uint64)
    rows[:, 0] = offsets + base.address
    rows[:, 1] = sizes
    rows[:, 2] = base.device or 0
    return rows


def parse_arenas(arenas: object, devices: object) -> tuple[Base, ...]:
    """Read what a peer says of its arenas.

    Args:
        arenas: [[address, bytes per block], ...], one per rank.
        devices: The index of the GPU that has each, or ``None``; ``None``: all are in host memory.

    Raises:
        BadFrameError: Malformed; names the field.
    """
    if not isinstance(arenas, list) or not 0 < len(arenas) <= _MAX_RANKS:
        raise BadFrameError("the peer's arenas are malformed", field="arenas")
    for arena in arenas:
        right = isinstance(arena, list) and len(arena) == 2 and all(type(v) is int and 0 < v < 1 << 63 for v in arena)
        if not right:
            raise BadFrameError("the peer's arenas are malformed", field="arenas")
    found = [None] * len(arenas) if devices is None else devices
    if not isinstance(found, list) or len(found) != len(arenas) or not all(map(_may_be_device, found)):
        raise BadFrameError("the devices of the peer's arenas are malformed", field="devices")
    return tuple(Base(int(address), int(size), device) for (address, size), device in zip(arenas, found, strict=True))


def _may_be_device(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < _MAX_RANKS)


AGENTS = 4
"""Agents of a process that reads: as many reads move bytes at once, as many as an instance makes. After the first each
costs 30 ms to make, 5 MB and a registration of the arenas, once that many reads go on at once."""
MAX_RETIRED = 16
"""Agents at most that NIXL's refusals have spoilt. They end with the process: ended before that, with half of a peer in
them, they were seen to take the process down with them. Beyond that the next kind of pipe is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class NixlConnection(Connection):
    """A connection to a block server. The pipe, not this, disconnects from the peer's agent.

    Attributes:
        peer: Name of the server's agent.
        bases: Where the blocks of each rank of the source are.
    """

    agent: NixlAgent
    peer: str
    bases: tuple[Base, ...]


class NixlTargets:
    """The registered arenas that a process reads into, and its agents; made for the first connections, thread safe.

    An agent moves one reader's bytes at a time: between processes UCX copies in the thread that asks. So there are
    several, and connections take them in turn. One that can no longer meet some peer serves the connections that it
    has, and gets no others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: list[NixlAgent] = []
        self._retired: list[NixlAgent] = []
        self._regions: dict[tuple[NixlAgent, int, int], Region] = {}

    def agent(self, host: str) -> NixlAgent:
        """Return the agent for a new connection; a new one, for this address of this machine, if there are few.

        Raises:
            ConfigError: NIXL cannot work here, or has refused too many peers; says why.
        """
        with self._lock:
            self._retire()
            self._regions = {key: region for key, region in self._regions.items() if not key[0].closed}
            full = len(self._agents) + len(self._retired) >= AGENTS + MAX_RETIRED
            if full and not self._agents:
                raise ConfigError(f"NIXL has refused what {MAX_RETIRED} peers said of themselves", field="pipes")
            agent = self._agents.pop(0) if full or len(self._agents) >= AGENTS else NixlAgent(host)
            self._agents.append(agent)
            return agent

    def region(self, agent: NixlAgent, blocks: Bytes | SharedDeviceArena) -> Region:
        """Return an agent's registration of an arena's blocks."""
        where = range_of(blocks)
        key = (agent, where.address, where.size)
        with self._lock:
            region = self._regions.get(key)
            if region is None:
                region = agent.register(blocks if isinstance(blocks, SharedDeviceArena) else blocks.reshape(-1))
                if agent in self._agents or agent in self._retired:
                    self._regions[key] = region
            return region

    def _retire(self) -> None:
        """Sort out agents that were given up, or can no longer meet some peer."""
        self._retired += [agent for agent in self._agents if agent.refused]
        self._agents = [agent for agent in self._agents if not (agent.closed or agent.refused)]
        self._retired = [agent for agent in self._retired if not agent.closed]

    def close(self) -> None:
        """End the agents."""
        with self._lock:
            agents = [*self._agents, *self._retired]
            self._agents = []
            self._retired = []
            self._regions = {}
        for agent in agents:
            agent.close()


class NixlReadPipe(PooledReadPipe[NixlConnection], FollowingReadPipe, DeviceReadPipe):
    """Reads a peer's blocks one-sided.

    Args:
        address: Where the block server listens.
        facts: Facts that the server has to confirm in the handshake.
        token: Shared token.
        targets: This process's agents and arenas; outlive the pipe.
    """

    kind: ClassVar[str] = "nixl"

    def __init__(self, address: str, facts: Facts, token: Token | None, targets: NixlTargets) -> None:
        self._targets = targets
        self._met: dict[tuple[NixlAgent, str], None] = {}

        def dial(wait: Wait) -> NixlConnection:
            stream = dial_reader(address, facts, token, wait)
            with stream.closed_on_error():
                agent = targets.agent(str(stream.sock.getsockname()[0]))
                return self._meet(agent, stream, recv_control(stream, FrameKind.WELCOME, wait))

        super().__init__(dial, max_connections=_MAX_CONNECTIONS)

    def reaches(self, arena: Arena) -> bool:
        """Whether NIXL can register the arena's memory."""
        return not device_obstacle(arena)

    def read_device(self, reads: BlockReads, arena: Arena, wait: Wait) -> Valid:
        if not isinstance(arena, SharedDeviceArena):
            raise InternalError("the target is no arena in device memory")
        # Work that is still queued for the blocks' previous users: a copy from elsewhere is on no stream.
        arena.settle()
        return self.in_requests(reads, wait, lambda connection, part: self.request(connection, part, arena, wait))

    def request(
        self, connection: NixlConnection, reads: BlockReads, local: Bytes | SharedDeviceArena, wait: Wait
    ) -> Valid:
        sent = _ask(connection, reads, wait)
        self._fetch(connection, reads if sent.all() else reads.select(sent), local, wait)
        return sent & _finish(connection, len(reads), wait)

    def follow(self, reads: Sequence[LayerRead], wait: Wait) -> tuple[list[Valid], float]:
        """Read layers as they are computed, those that are there by now at once; see the class above."""
        if any(len(each.reads) > each.reads.blocks_per_request for each in reads):
            raise InvalidRequestError("the reads have too many blocks to be followed", field="reads")
        with self.connection(wait) as connection:
            source = _SourceProgress(connection.stream, wait)
            valid = [self._follow(connection, each.reads, each.local, source, wait) for each in reads]
            return valid, source.waited_s

    def _follow(
        self, connection: NixlConnection, reads: BlockReads, local: Bytes, source: _SourceProgress, wait: Wait
    ) -> Valid:
        sent = _ask(connection, dataclasses.replace(reads, steps=None), wait)
        good = reads if sent.all() else reads.select(sent)
        steps = good.segments_by_step(local.shape[1]) if len(good) else []
        if steps:
            source.request(steps[0][0])
        while steps:
            now = source.recv()
            there = sum(ready <= now for ready, _ in steps)
            some = steps[:there]
            steps = steps[there:]
            if steps:
                source.request(steps[0][0])  # its answer comes meanwhile
            segments = merge_segments(np.concatenate([each for _, each in some]))
            self._fetch(connection, dataclasses.replace(good, segments=segments, steps=None), local, wait)
        return sent & _finish(connection, len(reads), wait)

    def _fetch(
        self, connection: NixlConnection, reads: BlockReads, local: Bytes | SharedDeviceArena, wait: Wait
    ) -> None:
        """Copy blocks that the peer lets be read."""
        agent, region = connection.agent, self._targets.region(connection.agent, local)
        source = connection.bases[reads.source_shard]
        try:
            for rows in batches(reads, base_of(local), source):
                agent.read(connection.peer, rows, region, connection.stream, wait, source=source.kind)
        finally:
            if region.stuck:  # only the agent's end keeps it from writing into the blocks one day
                agent.close()

    def close(self) -> None:
        """Close every connection and let go of the peer's agent."""
        super().close()
        while self._met:
            (agent, peer), _ = self._met.popitem()
            agent.disconnect(peer)

    def _meet(self, agent: NixlAgent, stream: Stream, fields: Mapping[str, Any]) -> NixlConnection:
        name, metadata = parse_agent(fields)
        bases = parse_arenas(fields.get("arenas"), fields.get("devices"))
        if (agent, name) not in self._met:
            agent.connect(name, metadata)
            self._met[agent, name] = None
        return NixlConnection(stream, agent, name, bases)


class NixlServer(TcpServer):
    """An instance's registered arenas, to be read from; registered at the first reader, thread safe.

    Raises:
        ConfigError: NIXL cannot work here; says why.
    """

    def __init__(self, served: Served, options: PipeOptions) -> None:
        super().__init__(served, options)
        try:
            self._agent = NixlAgent(served.host)
        except BaseException:
            self.listener.close()
            raise
        self._lock = threading.Lock()
        self._region: Region | None = None

    def serve(self, stream: Stream, wait: Wait) -> None:
        """Describe the arenas and let them be read; see :meth:`SocketPipeServer.serve`."""
        send_control(stream, FrameKind.WELCOME, self._describe(), wait)
        limits = self._served.limits

        def answer(reads: BlockReads, checksums: bool) -> None:
            self._let_read(stream, reads, limits)

        serve_reads(stream, self._served.shards, limits, answer)

    def _settle(self) -> None:
        """Wait until all is done that computes into the arenas and is queued by now."""
        for arena in self._served.shards.arenas:
            if isinstance(arena, SharedDeviceArena):
                arena.settle()

    def close(self) -> None:
        """Close the socket and end the agent."""
        super().close()
        self._agent.close()

    def _describe(self) -> dict[str, Any]:
        arenas = self._served.shards.arenas
        with self._lock:
            if self._region is None:
                memories = (
                    arena if isinstance(arena, SharedDeviceArena) else arena.blocks.reshape(-1) for arena in arenas
                )
                self._region = self._agent.register(*memories)
            region = self._region
        ranges = [memory_range(arena) for arena in arenas]
        about: dict[str, Any] = {
            "arenas": [[each.address, arena.block_bytes] for each, arena in zip(ranges, arenas, strict=True)]
        }
        if any(each.device is not None for each in ranges):  # without it: host memory, as older readers take it to be
            about["devices"] = [each.device for each in ranges]
        return describe_agent(self._agent.name, region.metadata) | about

    def _let_read(self, stream: Stream, reads: BlockReads, limits: ServeLimits) -> None:
        self._settle()
        before = current(self._served.shards.primary, reads)
        _send_bits(stream, before, limits)
        while True:
            # The reader has a deadline of its own, and its connection ends with it.
            progress_until_readable(
                self._agent, stream, Wait(time.monotonic() + limits.idle_s), "letting blocks be read"
            )
            wait = Wait(time.monotonic() + limits.frame_s)
            kind, length = recv_header(stream, {FrameKind.READ_DONE: 0, FrameKind.WAIT: WORD.size}, wait)
            if kind is FrameKind.READ_DONE:
                break
            payload = stream.recv_exact(length, wait, "reading a request")
            send_progress(
                stream, self._served.shards, payload, limits, meanwhile=self._agent.progress, settle=self._settle
            )
        fence()
        _send_bits(stream, before & current(self._served.shards.primary, reads), limits)


class NixlKind(PipeKind):
    """Pipes through NIXL."""

    name: ClassVar[str] = "nixl"

    def __init__(self, options: PipeOptions) -> None:
        super().__init__(options)
        self._targets = NixlTargets()

    @classmethod
    def obstacle(cls, options: PipeOptions) -> str:
        """NIXL must be installed, and what is served must be memory that it can register."""
        if (why := nixl_obstacle()) or options.host_memory or options.arena is None:
            return why
        return device_obstacle(options.arena)

    @classmethod
    def suits(cls, options: PipeOptions) -> bool:
        """Whether there is RDMA: over sockets ``tcp`` serves as well, with checksums."""
        return options.tls is None and bool(infiniband_ports())

    def connect(self, address: str, facts: Facts, wait: Wait) -> NixlReadPipe:
        pipe = NixlReadPipe(address, facts, self.options.token, self._targets)
        pipe.open_first(wait)
        return pipe

    def listen(self, served: Served) -> NixlServer:
        return NixlServer(served, self.options)

    def close(self) -> None:
        """End the agents that pipes read with."""
        self._targets.close()


class _SourceProgress:
    """The source's computation, as reported to a reader.

    Attributes:
        waited_s: Seconds that passed in waiting for it.
    """

    def __init__(self, stream: Stream, wait: Wait) -> None:
        self._stream = stream
        self._wait = wait
        self._now = 0
        self._requested = False
        self.waited_s = 0.0

    def request(self, value: int) -> None:
        """Ask to be told when it has come so far."""
        self._requested = self._now < value
        if self._requested:
            request_progress(self._stream, value, self._wait)

    def recv(self) -> int:
        """Wait until it has come as far as was asked; returns how far it is."""
        if self._requested:
            start = time.perf_counter()
            self._now = recv_progress(self._stream, self._wait)
            self.waited_s += time.perf_counter() - start
        return self._now


def _ask(connection: NixlConnection, reads: BlockReads, wait: Wait) -> Valid:
    """Ask for blocks; returns which may be read until :func:`_finish`."""
    stream = connection.stream
    payload = pack_request(reads, checksums=False)
    stream.send_all([pack_header(FrameKind.READ, len(payload)), payload], wait, "asking for blocks")
    sent = _recv_bits(stream, len(reads), wait)
    if reads.source_shard >= len(connection.bases):
        raise BadFrameError("the peer lets a rank be read that it did not describe")
    return sent


def _finish(connection: NixlConnection, count: int, wait: Wait) -> Valid:
    """Say that all has been read; returns which blocks were the same until then."""
    connection.stream.send_all([pack_header(FrameKind.READ_DONE, 0)], wait, "reading blocks")
    return _recv_bits(connection.stream, count, wait)


def _send_bits(stream: Stream, bits: Valid, limits: ServeLimits) -> None:
    payload = pack_bits(bits)
    wait = Wait(time.monotonic() + limits.frame_s)
    stream.send_all([pack_header(FrameKind.BLOCKS, len(payload)), payload], wait, "answering a reader")


def _recv_bits(stream: Stream, count: int, wait: Wait) -> Valid:
    size = -(-count // 8)
    _, length = recv_header(stream, {FrameKind.BLOCKS: size}, wait)
    if length != size:
        raise BadFrameError(f"{length} bytes came for the bits of {count} blocks")
    return unpack_bits(stream.recv_exact(size, wait, "asking for blocks"), count)
