"""What a source answers beside its block servers: small messages, and ranges of bytes over bare sockets.

A message of one tensor comes back as it is. A message of two, (uint8 word, int64 [n, 3]), asks for a schedule: so many
nanoseconds after the message came, the source's progress is raised to a value and, if the third number is 1, the
step's number is sent. That is how a source that computes tells how far it is; the wait is one on a deadline, since what
computes in a real instance is not this processor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, DeadlineError, PipeClosedError
from baton.kv_transfer.pipes.messages import MessagePipe, TcpMessagePipe, WireTensor
from baton.kv_transfer.protocol.connect import accept_stream, bind_tcp, close_listener, connect_tcp, join_address
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.handshake import HANDSHAKE_S, PURPOSE_MESSAGES, greet_as_client, greet_or_refuse
from baton.kv_transfer.protocol.sockets import Stream
from baton.kv_transfer.types import Bytes
from baton.rpc.service_token import Token

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 1 << 20
MAX_STEPS = 1 << 15
MAX_SCHEDULE_S = 600
Schedule = npt.NDArray[np.int64]
"""int64 [n, 3]: nanoseconds from the start, progress, whether to tell."""
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


class MessageService(PeerServer):
    """Answers messages.

    Args:
        host: Address to bind.
        token: Shared token.
        advance: Raises the source's progress.
    """

    def __init__(self, host: str, token: Token | None, advance: Callable[[int], None]) -> None:
        self._advance = advance
        super().__init__(host, token)

    def _serve(self, stream: Stream) -> None:
        pipe = TcpMessagePipe(stream, max_message_bytes=MAX_MESSAGE_BYTES)
        while True:
            try:
                message = pipe.recv(deadline=time.monotonic() + _IDLE_S)
            except DeadlineError:
                continue
            if message is not None and len(message) == 2:
                self._follow(pipe, _schedule(message[1]))
            else:
                pipe.send(message, deadline=time.monotonic() + _ANSWER_S)

    def _follow(self, pipe: MessagePipe, schedule: Schedule) -> None:
        start = time.monotonic()
        for step, (after, progress, tell) in enumerate(schedule.tolist()):
            if self._closing.wait(max(0.0, start + after / 1e9 - time.monotonic())):
                return
            self._advance(progress)
            if tell:
                data = step.to_bytes(8, "little")
                pipe.send([WireTensor("int64", (), memoryview(data))], deadline=time.monotonic() + _ANSWER_S)


def round_trips(pipe: MessagePipe, size: int, count: int, limit_s: float) -> list[float]:
    """Send a message of ``size`` bytes and wait until it is back, up to ``count`` times or for ``limit_s`` seconds.

    Returns:
        Seconds of each round trip.

    Raises:
        BadFrameError: Another message came back.
        PipeClosedError, DeadlineError: As their names say.
    """
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).data
    message = [WireTensor("uint8", (size,), data)]

    def once() -> None:
        deadline = time.monotonic() + _ANSWER_S
        pipe.send(message, deadline=deadline)
        back = pipe.recv(deadline=deadline)
        if back is None or len(back) != 1 or back[0].data != data:
            raise BadFrameError("another message came back")

    return timed(once, count, limit_s)


def timed(call: Callable[[], object], count: int, limit_s: float) -> list[float]:
    """Call up to ``count`` times, or until ``limit_s`` seconds are over; returns the seconds of each call."""
    out: list[float] = []
    start = before = time.perf_counter()
    while len(out) < count and before - start < limit_s:
        call()
        now = time.perf_counter()
        out.append(now - before)
        before = now
    return out


def ask_schedule(pipe: MessagePipe, schedule: Schedule) -> None:
    """Ask for a schedule to be followed from now on; see :func:`next_step`."""
    parts = [
        WireTensor("uint8", (1,), memoryview(b"S")),
        WireTensor("int64", schedule.shape, memoryview(schedule.tobytes())),
    ]
    pipe.send(parts, deadline=time.monotonic() + _ANSWER_S)


def next_step(pipe: MessagePipe, *, deadline: float) -> int:
    """Wait for a schedule's next step; returns its number.

    Raises:
        BadFrameError: Something else came.
        PipeClosedError, DeadlineError: As their names say.
    """
    message = pipe.recv(deadline=deadline)
    if message is None or len(message) != 1 or message[0].data.nbytes != 8:
        raise BadFrameError("a step was expected")
    return int.from_bytes(message[0].data, "little")


def _schedule(tensor: WireTensor) -> Schedule:
    if (
        tensor.dtype != "int64"
        or len(tensor.shape) != 2
        or not 0 < tensor.shape[0] <= MAX_STEPS
        or tensor.shape[1] != 3
    ):
        raise BadFrameError(f"a schedule of shape {tensor.shape}")
    schedule = np.frombuffer(tensor.data, dtype=np.int64).reshape(tensor.shape)
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
        wait = _soon()
        self._stream = connect_tcp(address, wait)
        try:
            greet_as_client(self._stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
        except BaseException:
            self._stream.close()
            raise
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
        """Close."""
        self._stream.close()


def make_bare(stream: Stream) -> socket.socket:
    """Return a stream's socket with one long kernel time-out instead of the ticks of Baton's streams."""
    sock = stream.sock
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        with contextlib.suppress(OSError):  # closed by the peer: the next call will say so
            sock.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", _PATIENCE_S, 0))
    return sock


def _soon() -> Wait:
    return Wait(time.monotonic() + HANDSHAKE_S)
