"""Small messages over the message pipes: a service that answers, and clients that count round trips.

A message of one tensor comes back as it is. A message of two, (uint8 word, int64 [n, 3]), asks for a schedule: so many
nanoseconds after the message came, the source's progress is raised to a value and, if the third number is 1, the
step's number is sent. That is how a source that computes tells how far it is; the wait is one on a deadline, since what
computes in a real instance is not this processor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, CancelledError, ConfigError, DeadlineError, PipeClosedError
from baton.kv_transfer.pipes.base import Pipe, PipeListener, WireTensor
from baton.kv_transfer.pipes.gloo import GlooPipe, GlooPipeListener
from baton.kv_transfer.pipes.nixl import NixlPipe, NixlPipeListener
from baton.kv_transfer.pipes.nixl_agent import NixlAgent
from baton.kv_transfer.pipes.shm import ShmPipe, ShmPipeListener
from baton.kv_transfer.pipes.tcp import TcpPipe, TcpPipeListener
from baton.kv_transfer.protocol.frames import BadFrameError

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 1 << 20
MAX_STEPS = 1 << 15
MAX_SCHEDULE_S = 600
Schedule = npt.NDArray[np.int64]
"""int64 [n, 3]: nanoseconds from the start, progress, whether to tell."""
_IDLE_S = 3600.0
"""Seconds between two looks at nobody; closing wakes all who wait."""
_ANSWER_S = 10.0


class Messenger:
    """Makes message pipes of every kind, and owns what they share.

    Args:
        host: Address of this machine that listeners bind to, and that peers reach it by.
        token: Shared token.
    """

    def __init__(self, host: str, token: str | None) -> None:
        self._host, self._token = host, token
        self._agent: NixlAgent | None = None

    def listen(self, kind: str) -> PipeListener:
        """Listen for message pipes of a kind.

        Raises:
            ConfigError: The kind carries no messages, or cannot on this machine; says why.
        """
        if kind == "shm":
            return ShmPipeListener(token=self._token, max_message_bytes=MAX_MESSAGE_BYTES)
        if kind == "tcp":
            return TcpPipeListener(self._host, token=self._token, max_message_bytes=MAX_MESSAGE_BYTES)
        if kind == "nixl":
            return NixlPipeListener(self.agent(), self._host, token=self._token, max_message_bytes=MAX_MESSAGE_BYTES)
        if kind == "gloo":
            return GlooPipeListener(self._host, token=self._token, max_message_bytes=MAX_MESSAGE_BYTES)
        raise ConfigError(f"there is no {kind} pipe for messages", field="pipe")

    def connect(self, kind: str, address: str, *, deadline: float) -> Pipe:
        """Connect to a message listener of a kind.

        Raises:
            ConfigError: The kind carries no messages, or cannot on this machine; says why.
            PipeClosedError, UnauthenticatedError, DeadlineError: As their names say.
        """
        token, most = self._token, MAX_MESSAGE_BYTES
        if kind == "shm":
            return ShmPipe.connect(address, deadline=deadline, token=token, max_message_bytes=most)
        if kind == "tcp":
            return TcpPipe.connect(address, deadline=deadline, token=token, max_message_bytes=most)
        if kind == "nixl":
            agent = self.agent()
            return NixlPipe.connect(address, agent=agent, deadline=deadline, token=token, max_message_bytes=most)
        if kind == "gloo":
            return GlooPipe.connect(address, deadline=deadline, token=token, max_message_bytes=most)
        raise ConfigError(f"there is no {kind} pipe for messages", field="pipe")

    def agent(self) -> NixlAgent:
        """Return this process's NIXL agent.

        Raises:
            ConfigError: NIXL cannot be used here; says why.
        """
        if self._agent is None:
            self._agent = NixlAgent(self._host)
        return self._agent

    def close(self) -> None:
        """End the NIXL agent, if there is one; pipes must be closed before."""
        if self._agent is not None:
            self._agent.close()


class MessageService:
    """Answers messages on one listener, a thread per pipe.

    Args:
        listener: Closed with the service.
        advance: Raises the source's progress.
    """

    def __init__(self, listener: PipeListener, advance: Callable[[int], None]) -> None:
        self._listener, self._advance = listener, advance
        self._closing = threading.Event()
        self._pipes: set[Pipe] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="bench-accept", daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._listener.address

    def close(self) -> None:
        """Close the listener and all pipes, and wait for the threads."""
        self._closing.set()
        self._listener.close()
        with self._lock:
            pipes = list(self._pipes)
        for pipe in pipes:
            pipe.close()
        for thread in self._threads:
            thread.join(_ANSWER_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                # Not in short turns: a handshake that begins at the end of one would be cut off with it.
                pipe = self._listener.accept(deadline=time.monotonic() + _IDLE_S, cancelled=self._closing)
            except DeadlineError:
                continue
            except (CancelledError, PipeClosedError):
                return
            with self._lock:
                self._pipes.add(pipe)
            if self._closing.is_set():  # it may have come too late for ``close`` to see it
                pipe.close()
            thread = threading.Thread(target=self._serve, args=(pipe,), name="bench-messages", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, pipe: Pipe) -> None:
        try:
            while not self._closing.is_set():
                try:
                    message = pipe.recv(deadline=time.monotonic() + _IDLE_S)
                except DeadlineError:
                    continue
                if message is not None and len(message) == 2:
                    self._follow(pipe, _schedule(message[1]))
                else:
                    pipe.send(message, deadline=time.monotonic() + _ANSWER_S)
        except PipeClosedError:
            log.debug("a peer left")
        except BatonError as error:
            log.warning("a peer was sent away: %s", error)
        finally:
            pipe.close()
            with self._lock:
                self._pipes.discard(pipe)

    def _follow(self, pipe: Pipe, schedule: Schedule) -> None:
        start = time.monotonic()
        for step, (after, progress, tell) in enumerate(schedule.tolist()):
            if self._closing.wait(max(0.0, start + after / 1e9 - time.monotonic())):
                return
            self._advance(progress)
            if tell:
                data = step.to_bytes(8, "little")
                pipe.send([WireTensor("int64", (), memoryview(data))], deadline=time.monotonic() + _ANSWER_S)


def round_trips(pipe: Pipe, size: int, count: int, limit_s: float) -> list[float]:
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


def ask_schedule(pipe: Pipe, schedule: Schedule) -> None:
    """Ask for a schedule to be followed from now on; see :func:`next_step`."""
    parts = [
        WireTensor("uint8", (1,), memoryview(b"S")),
        WireTensor("int64", schedule.shape, memoryview(schedule.tobytes())),
    ]
    pipe.send(parts, deadline=time.monotonic() + _ANSWER_S)


def next_step(pipe: Pipe, *, deadline: float) -> int:
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
