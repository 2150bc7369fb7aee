"""A gloo process group of two, made directly: no global state, no port of a store, one group per pair of instances.

The addresses that a store would carry go over a line of the call. gloo cannot call an operation off, so both ends
post one only when the other is about to post its counterpart, and only on memory of the group's own.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from baton.errors import BatonError, ConfigError, PipeClosedError
from baton.kv_transfer.pipes.lines import Lines
from baton.kv_transfer.protocol.deadline import TICK_S, Wait
from baton.kv_transfer.protocol.frames import BadFrameError, FrameKind, recv_control, send_control
from baton.kv_transfer.protocol.sockets import Stream
from baton.kv_transfer.types import Bytes

KV_RANKS = {"prefill": 0, "decode": 1}
"""Ranks by role: the one who listens and whose KV is asked for is 0, the one who calls is 1."""
_MAX_KEYS = 64
_TRIES = 4
"""How often gloo tries to connect, for so long each time; it cannot be interrupted."""
_MAX_VALUE_BYTES = 16 << 10


class LineStore(Store):
    """What gloo asks of a store, between two processes, over a line."""

    def __init__(self, line: Stream, wait: Wait) -> None:
        super().__init__()
        self._line, self._wait = line, wait
        self._values: dict[str, bytes] = {}
        self._peer_ready = False

    def set(self, key: str, value: Any) -> None:
        """Keep a value and tell the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        send_control(self._line, FrameKind.HELLO, {"key": key, "value": data.hex()}, self._wait)

    def get(self, key: str) -> bytes:
        """Return a value, once one of the two has set it."""
        while key not in self._values:
            self._hear()
        return self._values[key]

    def wait(self, keys: Any, timeout: Any = None) -> None:
        """Block until all of the keys are set."""
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Do nothing: the deadline of the call is what counts."""

    @property
    def timeout(self) -> datetime.timedelta:
        """What is left of the call's time."""
        return _left(self._wait)

    def finish(self) -> None:
        """Tell the peer that this end needs nothing more, and hear the same."""
        send_control(self._line, FrameKind.HELLO, {"ready": True}, self._wait)
        while not self._peer_ready:
            self._hear()

    def _hear(self) -> None:
        fields = recv_control(self._line, FrameKind.HELLO, self._wait)
        if self._peer_ready:
            raise BadFrameError("the peer said more after it was ready")
        if fields.get("ready") is True:
            self._peer_ready = True
            return
        key, value = _parse_entry(fields)
        if len(self._values) >= _MAX_KEYS:
            raise BadFrameError("the peer sets too many keys")
        self._values[key] = value


class Group:
    """The two ends' process group; operations are posted and waited for, each within a deadline.

    gloo listens on the address that the lines came in by, or went out by, and on no other.

    Args:
        lines: A call's lines; the addresses go over the client's first.
        wait: For the peer to do the same.
        users: How many will :meth:`leave`; a pipe has a sender and a receiver.

    Attributes:
        rank: This end's, as ``KV_RANKS`` says.

    Raises:
        ConfigError: gloo cannot bind to that address.
        PipeClosedError: The peer went away.
        DeadlineError: It took too long.
    """

    def __init__(self, lines: Lines, wait: Wait, *, users: int = 2) -> None:
        self.rank = KV_RANKS["decode" if lines.is_client else "prefill"]
        self._peer = 1 - self.rank
        self._users = users
        self._lock = threading.Lock()
        store = LineStore(lines.outgoing if lines.is_client else lines.incoming, wait)
        with lines.outgoing.in_use():
            host = str(lines.outgoing.sock.getsockname()[0])
        gloo: Any = ProcessGroupGloo  # its type description lacks the options
        options = gloo._Options()
        try:
            options._devices = [gloo.create_device(hostname=host)]
        except RuntimeError as error:
            raise ConfigError(f"gloo cannot bind to {host}: {error}", field="pipes") from error
        options._timeout, options._threads = _left(wait) / _TRIES, 1
        try:
            self._group: Any = gloo(store, self.rank, 2, options)
        except RuntimeError as error:
            if isinstance(error.__cause__, BatonError):
                raise error.__cause__ from None
            wait.check("making a gloo group")
            raise PipeClosedError(f"gloo does not reach {lines.outgoing.peer}: {_first_line(error)}") from error
        store.finish()

    def post(self, memory: Bytes, *, send: bool, wait: Wait) -> Any:
        """Begin to send or to receive; returns what :meth:`Waiter.finish` takes.

        Args:
            memory: uint8 [bytes], the group's own as far as others are concerned.
            send: Which of both.
            wait: For the error if the time is over already.

        Raises:
            PipeClosedError: The group was closed, or its peer is gone.
        """
        group = self._group
        if group is None:
            raise PipeClosedError("the pipe was closed")
        tensor = torch.from_numpy(memory)
        try:
            return (group.send if send else group.recv)([tensor], self._peer, 0)
        except RuntimeError as error:
            wait.check("posting to gloo")
            raise PipeClosedError(f"gloo lost its peer: {_first_line(error)}") from error

    def leave(self) -> None:
        """End one of the uses; the last one ends the group."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._group = None


class Waiter:
    """Waits for gloo's operations in a thread of its own, so that a wait can be cancelled although gloo's cannot."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Any, datetime.timedelta, queue.SimpleQueue[str]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def finish(self, work: Any, line: Stream, wait: Wait) -> None:
        """Block until an operation has ended.

        Raises:
            PipeClosedError: The peer is gone, or this side's pipe was closed; the operation may still be under way.
            DeadlineError, CancelledError: As their names say; likewise.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="baton-gloo", daemon=True)
            self._thread.start()
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._work.put((work, _left(wait), done))
        while True:
            try:
                failure = done.get(timeout=TICK_S)
            except queue.Empty:
                wait.check("moving bytes through gloo")
                if line.peer_gone():
                    raise PipeClosedError(f"{line.peer} went away in the middle of a message") from None
                continue
            if failure:
                wait.check("moving bytes through gloo")
                raise PipeClosedError(f"gloo lost {line.peer}: {failure}")
            return

    def close(self) -> None:
        """End the thread after its work."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, timeout, done = item
            try:
                work.wait(timeout)
            except RuntimeError as error:
                done.put(_first_line(error))
            else:
                done.put("")
            del work, item  # gloo's buffers and sockets end with the last reference


def obstacle() -> str:
    """Say why torch's gloo cannot be used; empty: it can."""
    if dist.is_available() and dist.is_gloo_available():
        return ""
    return "the gloo pipe needs a torch that was built with gloo, which this one was not: pip install torch"


def _parse_entry(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    key, value = fields.get("key"), fields.get("value")
    if not isinstance(key, str) or len(key) > 256 or not isinstance(value, str) or len(value) > 2 * _MAX_VALUE_BYTES:
        raise BadFrameError("a key of the peer's store is malformed", field="key")
    try:
        return key, bytes.fromhex(value)
    except ValueError as error:
        raise BadFrameError("a value of the peer's store is malformed", field="value") from error


def _left(wait: Wait) -> datetime.timedelta:
    left = wait.remaining()
    return datetime.timedelta(seconds=600.0 if left is None else max(left, 0.001))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
