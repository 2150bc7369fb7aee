"""Message pipes over torch.distributed's gloo: one group of two per pipe, beside the lines of :mod:`.lines`.

A big message's data goes in pieces. The receiver posts a piece's receive and gives credit for it on the line; the
sender posts the send when it has the credit. So an end that waits has posted nothing, and pieces go from and into
memory of the pipe's own: one that is cut off touches nobody else's.

torch is imported when the first pipe or listener is made, not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from baton.errors import ConfigError
from baton.kv_transfer.pipes.base import MAX_MESSAGE_BYTES
from baton.kv_transfer.pipes.lines import LineReceiver, Lines, LineSender, LinesListener, call_lines, total_bytes
from baton.kv_transfer.pipes.stream import StreamPipe
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.sockets import Buffer, Stream
from baton.kv_transfer.types import Bytes

if TYPE_CHECKING:
    from baton.kv_transfer.pipes.gloo_group import Group

PIECE_BYTES = 1 << 20
_SLOTS = 4
"""Pieces under way at once."""
_CREDIT = b"+"


class _End:
    """What a group's sender and receiver have in common: pieces of memory, a thread that waits, a share of the group.

    Args:
        group: Left when the end is released.
    """

    def __init__(self, group: Group) -> None:
        from baton.kv_transfer.pipes.gloo_group import Waiter

        self._group, self._waiter = group, Waiter()
        self._pieces: list[Bytes] = []
        self._released = False

    def piece(self, number: int, size: int) -> Bytes:
        """Return memory for the first ``size`` bytes of a piece."""
        if not self._pieces:
            self._pieces = [np.empty(PIECE_BYTES, dtype=np.uint8) for _ in range(_SLOTS)]
        return self._pieces[number % _SLOTS][:size]

    def post(self, piece: Bytes, wait: Wait, *, send: bool) -> Any:
        """Begin to send or receive a piece."""
        return self._group.post(piece, send=send, wait=wait)

    def finish(self, work: Any, line: Stream, wait: Wait) -> None:
        """Block until a piece is through."""
        self._waiter.finish(work, line, wait)

    def release(self) -> None:
        """Leave the group; harmless if repeated."""
        if not self._released:
            self._released = True
            self._pieces = []
            self._waiter.close()
            self._group.leave()


class GlooSender(LineSender):
    """Sends big data through a group."""

    def __init__(self, group: Group, line: Stream) -> None:
        super().__init__(line)
        self._end = _End(group)

    def move(self, data: Sequence[Buffer], wait: Wait) -> None:
        """Send the data in pieces, each when the receiver has posted its receive."""
        source = _Cursor(data)
        under_way: deque[Any] = deque()
        for number, size in enumerate(_piece_sizes(total_bytes(data))):
            if len(under_way) == _SLOTS:
                self._end.finish(under_way.popleft(), self.line, wait)
            wait.check("sending a message")
            piece = self._end.piece(number, size)
            at = 0
            for part in source.take(size):
                piece[at : at + len(part)] = part
                at += len(part)
            if self.line.recv_exact(1, wait, "waiting for the receiver") != _CREDIT:
                raise BadFrameError("the peer gave something else than credit")
            under_way.append(self._end.post(piece, wait, send=True))
        while under_way:
            self._end.finish(under_way.popleft(), self.line, wait)

    def release(self) -> None:
        """Leave the group."""
        self._end.release()


class GlooReceiver(LineReceiver):
    """Receives big data through a group."""

    def __init__(self, group: Group, line: Stream) -> None:
        super().__init__(line)
        self._end = _End(group)

    def move(self, views: Sequence[memoryview], wait: Wait) -> None:
        """Receive the data in pieces, and copy each out when it is whole."""
        target = _Cursor(views)
        posted: deque[tuple[Bytes, Any]] = deque()
        for number, size in enumerate(_piece_sizes(total_bytes(views))):
            if len(posted) == _SLOTS:
                self._take(*posted.popleft(), target, wait)
            wait.check("receiving a message")
            piece = self._end.piece(number, size)
            posted.append((piece, self._end.post(piece, wait, send=False)))
            self.line.send_all([_CREDIT], wait, "receiving a message")
        while posted:
            self._take(*posted.popleft(), target, wait)

    def release(self) -> None:
        """Leave the group."""
        self._end.release()

    def _take(self, piece: Bytes, work: Any, target: _Cursor, wait: Wait) -> None:
        self._end.finish(work, self.line, wait)
        at = 0
        for part in target.take(len(piece)):
            part[:] = piece[at : at + len(part)]
            at += len(part)


class GlooPipe(StreamPipe):
    """A pipe over a group of two."""

    kind: ClassVar[str] = "gloo"

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        deadline: float,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> GlooPipe:
        """Connect to a :class:`GlooPipeListener`.

        Args:
            address: As the listener says it.
            deadline: ``time.monotonic()`` seconds.
            token: Shared token.
            max_message_bytes: Bound on messages.

        Raises:
            ConfigError: gloo cannot work here; says why.
            PipeClosedError: Nobody there.
            UnauthenticatedError: The tokens differ.
            DeadlineError: It took too long.
        """
        require_gloo()
        wait = Wait(deadline)
        lines = call_lines(cls.kind, address, token, wait)
        try:
            return cls.over(lines, wait, max_message_bytes=max_message_bytes)
        except BaseException:
            lines.close()
            raise

    @classmethod
    def over(cls, lines: Lines, wait: Wait, *, max_message_bytes: int) -> GlooPipe:
        """Make an end of a pipe over a call's lines; the caller closes them if this fails.

        Raises:
            BatonError: As :class:`Group` says.
        """
        from baton.kv_transfer.pipes.gloo_group import Group

        group = Group(lines, wait)
        sender, receiver = GlooSender(group, lines.outgoing), GlooReceiver(group, lines.incoming)
        return cls(sender, receiver, max_message_bytes=max_message_bytes)


class GlooPipeListener(LinesListener):
    """Listens for message pipes; takes what :class:`LinesListener` takes. Without gloo it is refused, with a reason."""

    kind: ClassVar[str] = "gloo"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        require_gloo()
        super().__init__(host, port, token=token, max_message_bytes=max_message_bytes)

    def make_pipe(self, lines: Lines, wait: Wait) -> GlooPipe:
        """Make this end; see :meth:`LinesListener.make_pipe`."""
        return GlooPipe.over(lines, wait, max_message_bytes=self._max)


def gloo_obstacle() -> str:
    """Say why gloo cannot be used in this process; empty: it can."""
    try:
        from baton.kv_transfer.pipes import gloo_group
    except ImportError as error:
        return f"the gloo pipe needs torch, built with gloo ({error}): pip install torch"
    return gloo_group.obstacle()


def require_gloo() -> None:
    """Refuse to go on without gloo.

    Raises:
        ConfigError: Says what is missing.
    """
    reason = gloo_obstacle()
    if reason:
        raise ConfigError(reason, field="pipes")


class _Cursor:
    """Walks over buffers as if they were one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._parts = deque(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers if len(buffer))

    def take(self, size: int) -> Iterator[Bytes]:
        """Return the next ``size`` bytes, as the parts they lie in."""
        while size:
            part = self._parts.popleft()
            if len(part) > size:
                self._parts.appendleft(part[size:])
                part = part[:size]
            size -= len(part)
            yield part


def _piece_sizes(size: int) -> list[int]:
    rest = size % PIECE_BYTES
    return [PIECE_BYTES] * (size // PIECE_BYTES) + ([rest] if rest else [])
