"""Stream sockets with deadlines: exact sends and receives straight out of and into the caller's memory.

The socket stays in blocking mode with kernel time-outs of one tick, because one blocking ``recvmsg`` with
``MSG_WAITALL`` moves megabytes per system call where a non-blocking socket needs a poll for every wake-up.

TLS is done in user space: the bytes go through this process once more, and no batch of spans can be handed to the
kernel, so it carries about a quarter of what plain TCP does.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from baton.errors import CancelledError, ConfigError, DeadlineError, PipeClosedError, UnauthenticatedError
from baton.rpc.addresses import is_loopback
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls

T = TypeVar("T")
TICK_S = 0.02
"""Longest time (seconds) between two looks at a cancel flag while blocked in the kernel."""


class Flag(Protocol):
    """What can be asked whether to stop, e.g. a ``threading.Event``."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


class EitherFlag:
    """An event, or another flag.

    Args:
        other: The other flag; ``None``: there is none.
        event: The event; default: a new one.
    """

    def __init__(self, other: Flag | None, event: threading.Event | None = None) -> None:
        self._other = other
        self._mine = event or threading.Event()

    def is_set(self) -> bool:
        """Whether either is set."""
        return self._mine.is_set() or (self._other is not None and self._other.is_set())

    def set(self) -> None:
        """Set the event."""
        self._mine.set()


class PipeStalledError(PipeClosedError):
    """Nothing came over a pipe although its peer could send."""


class StallLimit:
    """Ends a read over which nothing comes although its source could send; one per read, thread safe.

    Args:
        seconds: Longest time without a byte, in seconds.
        source_ready: Whether the source can send everything now; else from :meth:`expect` on.
    """

    def __init__(self, seconds: float, *, source_ready: bool) -> None:
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds if source_ready else math.inf

    def expect(self) -> None:
        """Record that the source can send everything from now on."""
        if self._ends_at == math.inf:
            self._ends_at = time.monotonic() + self._seconds

    def record_progress(self) -> None:
        """Record that something came, or that this side was not ready for it."""
        if self._ends_at != math.inf:
            self._ends_at = time.monotonic() + self._seconds

    def check(self, what: str) -> None:
        """Raise if nothing has come for too long.

        Raises:
            PipeStalledError: Nothing has.
        """
        if time.monotonic() >= self._ends_at:
            raise PipeStalledError(f"nothing came for {self._seconds:g} s while {what}")


@dataclass(frozen=True, slots=True)
class Wait:
    """A deadline, a cancel flag, and a limit of silence.

    Attributes:
        deadline: ``time.monotonic()`` seconds; ``None``: no limit, for servers that wait for their
            peer's next word.
        cancelled: Set by another thread to end the wait.
        stall: Ends the wait when the peer sends nothing for too long; ``None``: silence does not end it.
    """

    deadline: float | None = None
    cancelled: Flag | None = None
    stall: StallLimit | None = None

    def check(self, what: str) -> None:
        """Raise if the wait is over.

        Raises:
            DeadlineError: The deadline has passed.
            CancelledError: The flag is set.
            PipeStalledError: The peer sent nothing for too long.
        """
        if self.cancelled is not None and self.cancelled.is_set():
            raise CancelledError(f"cancelled while {what}")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineError(f"deadline passed while {what}")
        if self.stall is not None:
            self.stall.check(what)

    def record_progress(self) -> None:
        """Record that something came, or that this side was not ready for it."""
        if self.stall is not None:
            self.stall.record_progress()

    def remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; ``None`` without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def nap(self) -> float | None:
        """Seconds to block before looking again: to the deadline, and at most a tick where there is a flag."""
        left = self.remaining()
        if self.cancelled is None:
            return left
        return TICK_S if left is None else min(TICK_S, left)


def run_together(mine: Callable[[], T], others: Sequence[Future[T]], siblings: EitherFlag) -> list[T]:
    """Run one share of a work here, and wait for the others; afterwards none runs any more.

    Args:
        mine: The share for this thread.
        others: Shares that were given to other threads; those that are cancelled by the end of ``mine`` are left out.
        siblings: Set if one of them fails.

    Raises:
        BaseException: The failure that came first.
    """
    results: list[T] = []
    failure: BaseException | None = None
    for result in itertools.chain((mine,), (other.result for other in others if not other.cancelled())):
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


IOV_MAX = 512
"""Buffers per system call (Linux allows 1024)."""
BATCH_BYTES = 16 << 20
"""Bytes per system call, so that a cancel flag is looked at every few milliseconds."""

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)

Buffer = bytes | bytearray | memoryview


class Stream:
    """A connected stream socket. One thread may send while another receives; ``close`` may come from any thread.

    Attributes:
        encrypted: Whether bytes must go through this class: the socket itself carries others.
        sock: The socket, for passing file descriptors and reading credentials.
    """

    encrypted = False

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self.peer = peer
        self.sock = sock
        self._closed = False
        self._state = threading.Lock()
        self._users = 0
        sock.setblocking(True)
        tick = struct.pack("ll", 0, int(TICK_S * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A host that vanished without a word is noticed after this many milliseconds of silence.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)

    @property
    def stays_on_host(self) -> bool:
        """Whether both ends of a TCP connection have one address, that is: are processes of one host."""
        try:
            return self.sock.family != socket.AF_UNIX and self.sock.getpeername()[0] == self.sock.getsockname()[0]
        except OSError:  # it is gone: the next call will say so
            return False

    def detach(self) -> socket.socket:
        """Give the socket away; the stream must be unused, and is closed afterwards."""
        with self._state:
            if self._closed:
                raise PipeClosedError("the pipe was closed")
            self._closed = True
            return self.sock

    def wait_readable(self, wait: Wait, what: str) -> None:
        """Block until bytes (or the peer's end) are there.

        Raises:
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """
        with self.in_use():
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            while True:
                nap = wait.nap()
                if poller.poll(None if nap is None else math.ceil(nap * 1000)):
                    if self._closed:
                        raise PipeClosedError("the pipe was closed")
                    return
                wait.check(what)

    def readable_within(self, seconds: float) -> bool:
        """Whether bytes (or the peer's end) are there, or come within this time (in whole milliseconds).

        Raises:
            PipeClosedError: This side has closed the stream.
        """
        with self.in_use():
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            return bool(poller.poll(math.ceil(seconds * 1000)))

    def peer_gone(self) -> bool:
        """Whether the peer has hung up or the stream was closed; never blocks."""
        try:
            with self.in_use():
                return self.sock.recv(1, _PEEK) == b""
        except BlockingIOError:
            return False
        except (OSError, PipeClosedError):
            return True

    def hung_up(self) -> bool:
        """Whether the peer will send nothing more, even if some of what it sent is still unread; never blocks."""
        try:
            with self.in_use():
                poller = select.poll()
                poller.register(self.sock, select.POLLRDHUP)
                return bool(poller.poll(0))
        except PipeClosedError:
            return True

    def recv_exact(self, size: int, wait: Wait, what: str) -> bytearray:
        """Receive exactly ``size`` bytes into fresh memory; the caller has checked ``size``."""
        data = bytearray(size)
        self.recv_into([memoryview(data)], wait, what)
        return data

    def recv_into(self, views: Sequence[memoryview], wait: Wait, what: str) -> None:
        """Fill byte buffers one after the other.

        Raises:
            PipeClosedError: The peer ended before they were full.
            DeadlineError, CancelledError: The wait was over; part of the bytes may have been taken.
        """
        with self.in_use():
            todo = _Cursor(views)
            while batch := todo.batch():
                try:
                    if len(batch) == 1:
                        got = self.sock.recv_into(batch[0], 0, socket.MSG_WAITALL)
                    else:
                        got = self.sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
                except BlockingIOError:
                    wait.check(what)
                    continue
                except OSError as error:
                    raise self.end_error(what, error) from error
                if got == 0:
                    raise self.end_error(what)
                wait.record_progress()
                todo.advance(got)
                if not todo.done:
                    wait.check(what)

    def send_all(self, buffers: Sequence[Buffer], wait: Wait, what: str, *, stall_s: float | None = None) -> None:
        """Send byte buffers one after the other.

        Args:
            buffers: Bytes to send, one buffer after the other.
            wait: Deadline and cancel flag.
            what: For error messages.
            stall_s: If given, every bit of progress moves the deadline to this many seconds from then.

        Raises:
            PipeClosedError: The peer is gone.
            DeadlineError, CancelledError: The wait was over; part of the bytes may have been sent.
        """
        with self.in_use():
            todo = _Cursor([memoryview(b) for b in buffers])
            while batch := todo.batch():
                try:
                    sent = self.sock.sendmsg(batch, [], socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    wait.check(what)
                    continue
                except OSError as error:
                    raise self.end_error(what, error) from error
                todo.advance(sent)
                if stall_s is not None:
                    wait = Wait(time.monotonic() + stall_s, wait.cancelled)
                elif not todo.done:
                    wait.check(what)

    def close(self) -> None:
        """End the stream and wake every blocked call; harmless if repeated."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            # Wakes blocked calls; fails only if the connection is gone already, and then none is blocked.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            if self._users == 0:
                self.sock.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the stream if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def end_error(self, what: str, error: OSError | None = None) -> PipeClosedError:
        """The error to raise when the stream ended while doing ``what``."""
        if self._closed:
            return PipeClosedError(f"the pipe was closed while {what}")
        reason = f" ({error.strerror or error})" if error else ""
        return PipeClosedError(f"{self.peer} hung up while {what}{reason}")

    def in_use(self) -> _Use:
        """Keep the descriptor open for a call into the kernel; raises if the stream is closed."""
        return _Use(self)


class _Use:
    """Keeps the file descriptor open while a thread is in the kernel with it (a closed number could be another's)."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        with stream._state:
            if stream._closed:
                raise PipeClosedError("the pipe was closed")
            stream._users += 1

    def __exit__(self, *exc: object) -> None:
        stream = self._stream
        with stream._state:
            stream._users -= 1
            if stream._closed and stream._users == 0:
                stream.sock.close()


def as_bytes(data: Buffer) -> memoryview:
    """View a buffer as plain bytes."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class _Cursor:
    """Walks over buffers in batches that one system call can take."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [as_bytes(v) for v in views if v.nbytes]
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at >= len(self._views)

    def batch(self) -> list[memoryview]:
        out: list[memoryview] = []
        room = BATCH_BYTES
        for view in self._views[self._at : self._at + IOV_MAX]:
            if room <= 0:
                break
            out.append(view[:room] if len(view) > room else view)
            room -= len(view)
        return out

    def advance(self, count: int) -> None:
        views = self._views
        at = self._at
        while count:
            size = len(views[at])
            if count < size:
                views[at] = views[at][count:]
                break
            count -= size
            at += 1
        self._at = at


class TlsStream(Stream):
    """A TLS connection; both ends show a certificate of one authority.

    Unlike a plain stream it is used by one thread at a time; ``close`` may come from any.

    Args:
        sock: Connected; owned from now on.
        context: Says which certificate is shown and which are believed.
        peer: The peer's name, for messages.
        server_name: Name that the peer's certificate must have; ``None``: this side is the server.
        wait: Deadline and cancel flag for the handshake.

    Raises:
        UnauthenticatedError: The peer's certificate does not hold, or it refused this side's.
        PipeClosedError: The peer does not speak TLS, or is gone.
        DeadlineError, CancelledError: As their names say.
    """

    encrypted = True

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, peer: str, server_name: str | None, wait: Wait
    ) -> None:
        try:
            self._tls = context.wrap_socket(
                sock, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            sock.close()
            raise PipeClosedError(f"no TLS with {peer}: {error}") from error
        super().__init__(self._tls, peer=peer)
        self._tls.setblocking(False)
        with self.closed_on_error():
            self._call_when_ready(self._tls.do_handshake, wait, "shaking hands over TLS")

    @property
    def certificate_uris(self) -> list[str]:
        """URIs in the peer's certificate."""
        names: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return [value for kind, value in names if kind == "URI"]

    def wait_readable(self, wait: Wait, what: str) -> None:
        if not self._tls.pending():
            super().wait_readable(wait, what)

    def readable_within(self, seconds: float) -> bool:
        return bool(self._tls.pending()) or super().readable_within(seconds)

    def peer_gone(self) -> bool:
        return not self._tls.pending() and self.hung_up()

    def recv_into(self, views: Sequence[memoryview], wait: Wait, what: str) -> None:
        for view in map(as_bytes, views):
            at = 0
            while at < len(view):
                part = view[at : at + BATCH_BYTES]
                got = self._call_when_ready(lambda part=part: self._tls.recv_into(part), wait, what)  # type: ignore[misc]
                if not got:
                    raise self.end_error(what)
                wait.record_progress()
                at += got

    def send_all(self, buffers: Sequence[Buffer], wait: Wait, what: str, *, stall_s: float | None = None) -> None:
        for view in map(as_bytes, buffers):
            at = 0
            while at < len(view):
                part = view[at : at + BATCH_BYTES]
                at += self._call_when_ready(lambda part=part: self._tls.send(part), wait, what)  # type: ignore[misc]
                if stall_s is not None:
                    wait = Wait(time.monotonic() + stall_s, wait.cancelled)

    def _call_when_ready(self, call: Callable[[], int | None], wait: Wait, what: str) -> int:
        """Call a function of the connection again whenever it is ready, until it returns."""
        while True:
            try:
                with self.in_use():
                    return call() or 0
            except ssl.SSLWantReadError:
                self._await(select.POLLIN, wait, what)
            except ssl.SSLWantWriteError:
                self._await(select.POLLOUT, wait, what)
            except ssl.SSLEOFError as error:
                raise self.end_error(what) from error
            except ssl.SSLError as error:
                if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or ""):
                    reason = getattr(error, "verify_message", "") or error.reason
                    raise UnauthenticatedError(f"{self.peer}: certificates don't hold, {what}: {reason}") from error
                raise self.end_error(what, OSError(0, f"TLS: {error.reason or error}")) from error
            except OSError as error:
                raise self.end_error(what, error) from error

    def _await(self, event: int, wait: Wait, what: str) -> None:
        wait.check(what)
        with self.in_use():
            poller = select.poll()
            poller.register(self._tls, event)
            nap = wait.nap()
            poller.poll(math.ceil(1000 * (TICK_S if nap is None else min(nap, TICK_S))))


def tls_to(stream: Stream, tls: Tls, host: str, wait: Wait) -> TlsStream:
    """Make a new connection to a server an encrypted one; errors are those of :class:`TlsStream`."""
    context = tls.pipe_context(server_side=False)
    return TlsStream(stream.detach(), context, peer=stream.peer, server_name=tls.name or host, wait=wait)


def tls_from(stream: Stream, tls: Tls, wait: Wait) -> TlsStream:
    """Make a connection that a client made an encrypted one; errors are those of :class:`TlsStream`."""
    context = tls.pipe_context(server_side=True)
    return TlsStream(stream.detach(), context, peer=stream.peer, server_name=None, wait=wait)


_FULL_S = 0.01


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``.

    Raises:
        PipeClosedError: It is not such an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise PipeClosedError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def bind_tcp(host: str, port: int, token: Token | None, *, safe: bool = False) -> socket.socket:
    """Bind a TCP socket; ``safe``: peers show a certificate.

    Raises:
        ConfigError: No token off loopback, or the address cannot be bound.
    """
    if token is None and not safe and not is_loopback(host):
        raise ConfigError(f"listening on {host} needs a shared token: only loopback goes without", field="token")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error}", field="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", field="port") from error
    return listener


def accept_stream(listener: socket.socket, wait: Wait, peer: str) -> Stream:
    """Accept a connection.

    Raises:
        DeadlineError, CancelledError: As their names say.
        PipeClosedError: The listener was closed.
    """
    while True:
        try:
            listener.settimeout(wait.nap())
            return Stream(listener.accept()[0], peer=peer)
        except (TimeoutError, BlockingIOError):  # the latter: a time-out of 0
            wait.check("waiting for a pipe")
        except OSError as error:
            raise PipeClosedError(f"the listener was closed ({error.strerror or error})") from error


def close_listener(listener: socket.socket) -> None:
    """Stop listening and wake a blocked ``accept``."""
    with contextlib.suppress(OSError):  # Linux wakes accept(), and then says that the socket was not connected
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect_tcp(address: str, wait: Wait) -> Stream:
    """Connect to ``host:port`` (IPv6 hosts in brackets).

    Raises:
        PipeClosedError: Nothing listens there.
        DeadlineError: It took too long.
    """
    host, port = split_address(address)
    wait.check(f"connecting to {address}")
    reason = "it has no address"
    try:
        for family, kind, proto, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, proto)
            try:
                code = _connect(sock, target, wait)
            except BaseException:
                sock.close()
                raise
            if code == 0:
                return Stream(sock, peer=address)
            sock.close()
            reason = os.strerror(code)
    except OSError as error:
        reason = str(error.strerror or error)
    except ValueError as error:  # a name that none can have: empty or too long between two dots, or with a NUL
        reason = str(error)
    raise PipeClosedError(f"cannot connect to {address}: {reason}")


def _connect(sock: socket.socket, target: Any, wait: Wait) -> int:
    """Connect without blocking past the wait; returns the error number, 0 for success."""
    sock.setblocking(False)
    code = sock.connect_ex(target)
    if code != errno.EINPROGRESS:
        return code
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while True:
        nap = wait.nap()
        if poller.poll(None if nap is None else math.ceil(nap * 1000)):
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        wait.check("connecting")


def connect_unix(name: str, wait: Wait) -> Stream:
    """Connect to an abstract Unix socket (without its leading NUL).

    Raises:
        PipeClosedError: Nothing listens there.
        DeadlineError: It took too long.
    """
    wait.check(f"connecting to @{name}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(wait.remaining())
            try:
                sock.connect("\0" + name)
                break
            except BlockingIOError:  # more wait to be accepted than may: it soon takes more
                time.sleep(_FULL_S)
                wait.check(f"connecting to @{name}")
    except BaseException as error:
        sock.close()
        if not isinstance(error, OSError):
            raise
        if isinstance(error, TimeoutError):
            wait.check(f"connecting to @{name}")
            raise PipeClosedError(f"@{name} did not answer") from error
        raise PipeClosedError(f"cannot connect to @{name}: {error.strerror or error}") from error
    return Stream(sock, peer=f"@{name}")
