"""Lets readers copy blocks out of this instance's arenas. Serves reads only: no peer ever writes into them."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.background import BackgroundThread
from baton.errors import (
    BatonError,
    CancelledError,
    ConfigError,
    DeadlineError,
    PermissionDeniedError,
    PipeClosedError,
    QueueFullError,
    UnauthenticatedError,
)
from baton.kv_cache.arena import Arena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import groups_of
from baton.kv_cache.shards import KVShards, shard_layout, shard_specs
from baton.kv_transfer.pipes.base import (
    MemoryNetwork,
    PipeKind,
    PipeOptions,
    PipeServer,
    Served,
    ServeLimits,
    SocketPipeServer,
)
from baton.kv_transfer.pipes.registry import load_kind, resolve_kinds
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockSource, Endpoint
from baton.kv_transfer.wire import HANDSHAKE_S, PURPOSE_READ, Facts, greet_as_server, send_error
from baton.rpc.audit import Event, audit
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import Epoch, InstanceId

log = logging.getLogger(__name__)
_BACKLOG = 128
_ACCEPT_BACKOFF_S = 0.1
_LAST_STEPS_S = 5.0
"""Seconds that a thread has to end after its connection has ended."""
_COMPLAINTS_S = 60.0
"""Pause between two lines in the log about connections that had to give way."""
_MAX_TOLD = 256
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a block server that rarely differ from their defaults.

    Attributes:
        port: Port of the ``tls`` or ``tcp`` kind; 0: any free one. Other kinds always take free ones.
        advertise_host: Host that readers are told; default: the one bound.
        max_connections: Readers of one kind of pipe at once; more are told to come later.
        max_handshakes: Connections of one kind that have not proved yet who they are. For one more, the oldest of the
            peer that has most of them is closed, so that silent peers keep no others out.
        handshake_s: Seconds a new connection has for its handshake.
        limits: Patience with readers.
        memory: Network of the ``memory`` kind.
        tls: Certificates, if KV is to be encrypted on its way.
    """

    port: int = 0
    advertise_host: str | None = None
    max_connections: int = 256
    max_handshakes: int = 64
    handshake_s: float = HANDSHAKE_S
    limits: ServeLimits = field(default_factory=ServeLimits)
    memory: MemoryNetwork | None = None
    tls: Tls | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Greeting:
    """A connection that has not proved yet who it is.

    Attributes:
        peer: Its address, or its process on this host.
        evicted: Whether it had to give way to another.
    """

    kind: str
    peer: str
    evicted: threading.Event = field(default_factory=threading.Event)


class BlockServer:
    """Serves one-sided reads of an instance's arenas over one or more kinds of pipe.

    Args:
        pool: What is served: the arenas of all ranks, or the only one.
        fingerprint: Fingerprint of the blocks.
        instance_id: Id of the instance that owns the pool.
        kinds: Kinds of pipe, or ``auto``, as :func:`resolve_kinds` says; readers see the endpoints in this order.
        host: Address that TCP binds to.
        token: Shared token; readers must know it.
        options: The rest.

    Attributes:
        endpoints: Where readers connect.

    Raises:
        ConfigError: An unknown kind, no token off loopback, or the address cannot be bound.
    """

    def __init__(
        self,
        pool: KVShards | Arena,
        fingerprint: Fingerprint,
        instance_id: InstanceId,
        *,
        kinds: Sequence[str] | str = ("shm", "tcp"),
        host: str = "127.0.0.1",
        token: Token | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        self._shards = pool if isinstance(pool, KVShards) else KVShards((pool,))
        self._instance_id = instance_id
        self._token = token
        self._options = options or ServerOptions()
        self._facts = Facts(self._shards.primary.epoch, fingerprint, self._shards.primary.num_blocks)
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._greetings: dict[_Greeting, Stream] = {}
        self._readers: Counter[str] = Counter()
        self._num_evicted = 0
        self._complained_at = -_COMPLAINTS_S
        self._told_at: dict[tuple[str, str], float] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._kinds: list[PipeKind] = []
        self._servers: list[PipeServer] = []
        self.endpoints: list[Endpoint] = []
        check_shards(fingerprint, self._shards)
        pipe_options = PipeOptions(
            token,
            memory=self._options.memory,
            tls=self._options.tls,
            host_memory=all(arena.mapped for arena in self._shards.arenas),
            arena=self._shards.primary,
        )
        names = resolve_kinds(kinds, pipe_options)
        try:
            for name in names:
                with_port = name == ("tls" if "tls" in names else "tcp")
                self._listen(name, pipe_options, host, self._options.port if with_port else 0)
        except BaseException:
            self.close()
            raise

    @property
    def source(self) -> BlockSource:
        """What readers need to know."""
        facts = self._facts
        return BlockSource(
            self._instance_id, Epoch(facts.epoch), tuple(self.endpoints), facts.fingerprint, facts.num_blocks
        )

    def num_connections(self) -> int:
        """Return the number of open connections."""
        with self._lock:
            return len(self._streams)

    def close(self) -> None:
        """Stop listening, end every connection and wait for the threads; harmless if repeated.

        Takes as long as a handshake may where one is under way that cannot be interrupted: gloo's.

        Raises:
            DeadlineError: A thread did not end in time.
        """
        with self._lock:
            self._closed.set()
            servers = self._servers
            streams = list(self._streams)
            threads = list(self._threads)
            self._servers = []
        for server in servers:
            if isinstance(server, SocketPipeServer):
                with contextlib.suppress(OSError):  # Linux wakes accept(), and then says the socket was not connected
                    server.listener.shutdown(socket.SHUT_RDWR)
            else:
                server.close()
        for stream in streams:
            stream.close()
        deadline = time.monotonic() + self._options.handshake_s + _LAST_STEPS_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for server in servers:
            server.close()
        for kind in self._kinds:
            kind.close()
        if any(thread.is_alive() for thread in threads):
            raise DeadlineError("a thread of the block server did not end in time")

    def _listen(self, name: str, options: PipeOptions, host: str, port: int) -> None:
        kind = load_kind(name)(options)
        self._kinds.append(kind)
        advertise_host = self._options.advertise_host or ""
        served = Served(self._shards, self._facts, host, port, advertise_host, self._options.limits)
        server = kind.listen(served)
        self._servers.append(server)
        if isinstance(server, SocketPipeServer):
            server.listener.listen(_BACKLOG)
            self._start(f"baton-kv-{name}-accept", partial(self._accept, name, server), restart=True)
        self.endpoints.append(Endpoint(name, server.address))

    def _start(self, name: str, work: Callable[[], None], *, restart: bool) -> None:
        def run() -> None:
            work()
            with self._lock:
                self._threads.discard(thread)

        def discard(error: BaseException) -> None:
            if not restart:
                with self._lock:
                    self._threads.discard(thread)

        thread = BackgroundThread(name, run, restart=restart, is_closing=self._closed.is_set, on_failure=discard)
        with self._lock:
            if self._closed.is_set():
                raise PipeClosedError("the block server was closed")
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._threads.discard(thread)
                raise

    def _accept(self, kind: str, server: SocketPipeServer) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = server.listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                # Out of descriptors, or a peer that left before it was greeted: the listener itself is sound.
                log.warning("accepting a %s reader failed: %s", kind, error)
                self._closed.wait(_ACCEPT_BACKOFF_S)
                continue
            stream = Stream(sock, peer=f"{kind} reader {peer[0] if peer else ''}".strip())
            try:
                greeting = self._admit(kind, stream)
                self._start(f"baton-kv-{kind}", partial(self._serve, server, stream, greeting), restart=False)
            except (QueueFullError, PipeClosedError) as error:
                self._refuse(stream, error)
            except (RuntimeError, MemoryError) as error:  # no further thread could be started
                log.warning("a %s reader was sent away: %s", kind, error)
                self._refuse(stream, QueueFullError("the instance can serve no further reader"))

    def _admit(self, kind: str, stream: Stream) -> _Greeting:
        """Let a new connection shake hands; another one may have to give way.

        Raises:
            QueueFullError: There are all the readers of this kind that there may be.
        """
        greeting = _Greeting(kind, _peer_of(stream))
        with self._lock:
            self._require_room(kind)
            oldest = self._longest_greeting(kind)
            evicted = None if oldest is None else self._greetings.pop(oldest)
            self._greetings[greeting] = stream
            self._streams.add(stream)
        if oldest is not None and evicted is not None:
            oldest.evicted.set()
            evicted.close()
            self._complain(oldest)
        return greeting

    def _require_room(self, kind: str) -> None:
        if self._readers[kind] >= self._options.max_connections:
            raise QueueFullError("the instance has all the readers it can take")

    def _longest_greeting(self, kind: str) -> _Greeting | None:
        """Which connection gives way to a new one; ``None``: there is room."""
        waiting = [each for each in self._greetings if each.kind == kind]
        if len(waiting) < self._options.max_handshakes:
            return None
        ((busiest, _),) = Counter(each.peer for each in waiting).most_common(1)
        return next(each for each in waiting if each.peer == busiest)

    def _complain(self, greeting: _Greeting) -> None:
        self._num_evicted += 1
        if time.monotonic() >= self._complained_at + _COMPLAINTS_S:
            self._complained_at = time.monotonic()
            log.warning(
                "%d connections were closed before their handshake, to make room for others: the latest %s from %s",
                *(self._num_evicted, greeting.kind, greeting.peer),
            )
            self._num_evicted = 0

    def _level(self, peer: str, code: str) -> int:
        """Return the log level of a rejected peer: repeated rejections are logged at most once a minute."""
        with self._lock:
            now = time.monotonic()
            self._told_at = {key: at for key, at in self._told_at.items() if now < at + _COMPLAINTS_S}
            if (peer, code) in self._told_at or len(self._told_at) >= _MAX_TOLD:
                return logging.DEBUG
            self._told_at[peer, code] = now
            return logging.WARNING

    def _refuse(self, stream: Stream, error: BatonError) -> None:
        with contextlib.suppress(BatonError):  # it fits the socket's empty buffer, so this never waits
            send_error(stream, error, Wait(time.monotonic() + 0.1))
        stream.close()
        with self._lock:
            self._streams.discard(stream)
            self._greetings = {key: each for key, each in self._greetings.items() if each is not stream}

    def _serve(self, server: SocketPipeServer, stream: Stream, greeting: _Greeting) -> None:
        is_reader = False
        try:
            wait = Wait(time.monotonic() + self._options.handshake_s, greeting.evicted)
            stream = self._replace(stream, server.admit(stream, wait), greeting)
            greet_as_server(stream, self._token, wait, purpose=PURPOSE_READ, facts=self._facts)
            with self._lock:
                self._require_room(greeting.kind)
                self._greetings.pop(greeting, None)
                self._readers[greeting.kind] += 1
                is_reader = True
            server.serve(stream, wait)
        except (PipeClosedError, CancelledError):
            log.debug("%s left, or gave way", stream.peer)
        except BatonError as error:
            # As text: a handler that keeps the record would keep the exception's frames, and a gloo group in them.
            log.log(self._level(stream.peer, error.code), "%s was sent away: %s", stream.peer, str(error))
            if isinstance(error, UnauthenticatedError | PermissionDeniedError):
                what: Event = "denied" if isinstance(error, PermissionDeniedError) else "authentication_failed"
                audit(what, over="pipe", kind=greeting.kind, peer=greeting.peer)
            with contextlib.suppress(BatonError):  # it may not even listen
                send_error(stream, error, Wait(time.monotonic() + 1.0))
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)
                self._greetings.pop(greeting, None)
                self._readers[greeting.kind] -= is_reader

    def _replace(self, old: Stream, new: Stream, greeting: _Greeting) -> Stream:
        """Go on with the stream that a connection was admitted as."""
        if new is not old:
            with self._lock:
                self._streams.discard(old)
                self._streams.add(new)
                if greeting in self._greetings:
                    self._greetings[greeting] = new
                closed = self._closed.is_set()
            if closed:
                new.close()
        return new


def _peer_of(stream: Stream) -> str:
    """Whose connection it is: an address, or a process of this host."""
    try:
        if stream.sock.family == socket.AF_UNIX:
            packed = stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return f"process {_CREDENTIALS.unpack(packed)[0]}"
        return str(stream.sock.getpeername()[0])
    except OSError:  # it has gone: its thread will find out
        return "a peer that left"


def check_shards(fingerprint: Fingerprint, shards: KVShards) -> None:
    """Refuse arenas that are not what a fingerprint says.

    Raises:
        ConfigError: Names ``tp_size`` or ``block_bytes``.
    """
    specs = shard_specs(fingerprint.tp_size, fingerprint.pp_size)
    if len(specs) != len(shards.arenas):
        raise ConfigError(
            f"the fingerprint says {len(specs)} ranks, there are arenas of {len(shards.arenas)}", field="tp_size"
        )
    groups = groups_of(fingerprint.layer_groups)
    for spec, arena in zip(specs, shards.arenas, strict=True):
        expected = shard_layout(fingerprint.geometry, spec, fingerprint.block_size, groups).block_bytes
        if arena.block_bytes != expected:
            raise ConfigError(
                f"the fingerprint says {expected} bytes per block on rank {spec.index}, its arena has "
                f"{arena.block_bytes}",
                field="block_bytes",
            )
