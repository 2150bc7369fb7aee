"""Small messages over a message pipe: a service that answers, and clients that count round trips.

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

from baton.errors import BatonError, CancelledError, DeadlineError, PipeClosedError
from baton.kv_transfer.pipes.messages import MessageListener, MessagePipe, WireTensor
from baton.kv_transfer.protocol.frames import BadFrameError

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 1 << 20
MAX_STEPS = 1 << 15
MAX_SCHEDULE_S = 600
Schedule = npt.NDArray[np.int64]
"""int64 [n, 3]: nanoseconds from the start, progress, whether to tell."""
_IDLE_S = 3600.0
"""Longest wait (seconds) for a client; closing wakes every blocked call."""
_ANSWER_S = 10.0


class MessageService:
    """Answers messages on one listener, a thread per pipe.

    Args:
        listener: Closed with the service.
        advance: Raises the source's progress.
    """

    def __init__(self, listener: MessageListener, advance: Callable[[int], None]) -> None:
        self._listener, self._advance = listener, advance
        self._closing = threading.Event()
        self._pipes: set[MessagePipe] = set()
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

    def _serve(self, pipe: MessagePipe) -> None:
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
