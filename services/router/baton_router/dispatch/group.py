"""The sequences of a request that travel together, and one attempt to have an instance generate them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from baton.errors import QueueFullError
from baton_router.dispatch.attempt import Attempt, AttemptFailed, Message, out_of_time
from baton_router.dispatch.worker_stream import WorkerStreams
from baton_router.scheduler.placement import Placement


class Sequence(msgspec.Struct):
    """One of the request's sequences: what was handed on of it."""

    index: int
    token_ids: list[int] = msgspec.field(default_factory=list)
    finished: bool = False


class Group(msgspec.Struct):
    """Sequences that travel together, and what went wrong with them so far.

    Attributes:
        excluded: Identities of instances that failed them.
        full: The latest refusal for lack of room, until somebody took the group.
        last: The latest other failure.
        failures: How many others there were.
    """

    sequences: list[Sequence]
    excluded: set[tuple[str, int]] = msgspec.field(default_factory=set)
    full: QueueFullError | None = None
    last: AttemptFailed | None = None
    failures: int = 0

    @property
    def open(self) -> list[Sequence]:
        """Those that have not ended."""
        return [s for s in self.sequences if not s.finished]

    def has_open(self) -> bool:
        """Whether there are any."""
        for s in self.sequences:  # noqa: SIM110  once per token, and a generator costs more than the look
            if not s.finished:
                return True
        return False

    @property
    def num_tokens(self) -> int:
        """Tokens that were handed on of all of them."""
        count = 0
        for s in self.sequences:
            count += len(s.token_ids)
        return count

    @property
    def started(self) -> bool:
        """Whether anything was handed on."""
        return any(s.token_ids or s.finished for s in self.sequences)


class Owner(Protocol):
    """The run of a request, as its attempts know it."""

    def on_message(self, attempt: GroupAttempt, message: Message) -> None:
        """Take a message."""

    def judge(self, attempt: GroupAttempt, failure: AttemptFailed | None) -> None:
        """See whether a group whose call has ended may go on, if it has to.

        Raises:
            BatonError: It may not.
        """

    def on_left(self, attempt: GroupAttempt) -> None:
        """A group leaves its instance."""

    def go_on(self, group: Group) -> None:
        """What a group held is given back, and it may go on."""

    def on_failure(self, error: Exception) -> None:
        """The request cannot go on."""


class GroupAttempt:
    """A group on one instance: what it holds there, and the call. :meth:`close` it, whatever happens.

    Args:
        owner: Is told what comes.
        group: The sequences.
        placement: Where they are.
        number: The request's attempts so far, with this one.

    Attributes:
        tokens_before: Tokens that the group had when it came here.
        closed: Whether it has left again.
    """

    __slots__ = ("_attempt", "_owner", "closed", "group", "number", "placement", "tokens_before")

    def __init__(self, owner: Owner, group: Group, placement: Placement, number: int) -> None:
        self._owner = owner
        self.group = group
        self.placement = placement
        self.number = number
        self.tokens_before = group.num_tokens
        self._attempt: Attempt | None = None
        self.closed = False

    def start(self, streams: WorkerStreams, request: bytes) -> None:
        """Begin the call.

        Args:
            streams: Where calls run.
            request: What to send, serialized.
        """
        indices = [s.index for s in self.group.sequences]
        self._attempt = Attempt(streams, self.placement.decode, request, indices, self)

    def hold(self, held: bool) -> None:
        """Keep what comes from now on, or go on handing it on."""
        if self._attempt is not None:
            self._attempt.hold(held)

    def expire(self) -> None:
        """The request's time is over."""
        if self._attempt is not None:
            self._attempt.expire()
        else:  # its call is not even sent
            self.on_end(out_of_time())

    def close(self) -> None:
        """End the call and give back what the group holds; once."""
        if self.closed:
            return
        self.closed = True
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()
        self._owner.on_left(self)
        self.placement.release()

    def on_message(self, message: Message) -> None:
        """Take a message of the call."""
        if self.closed:
            return
        try:
            self._owner.on_message(self, message)
        except Exception as error:  # of ours, or of whoever takes the chunks: this request's end alone
            self._owner.on_failure(error)
            return
        if self._attempt is not None and not self.closed and not self.group.has_open():
            self._attempt.expect_end()

    def on_end(self, failure: AttemptFailed | None) -> None:
        """Take the call's end."""
        if self.closed:
            return
        try:
            self._owner.judge(self, failure)
            error = None
        except Exception as refusal:
            error = refusal
        self.close()
        if error is not None:
            self._owner.on_failure(error)
        else:
            self._owner.go_on(self.group)
