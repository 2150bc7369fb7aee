"""What the chain asks of each tier behind memory, and the queue that most tiers have before a thread of their own."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from baton.types import BlockHash
from baton_kvstore.types import KvFormat, TierListener


class Offer(Protocol):
    """Takes blocks that a tier is about to drop, for the tiers behind it."""

    def wanted(self, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        """Return which of them a slower tier could take and does not have."""

    def take(self, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> None:
        """Queue blocks, whose bytes do not change any more, for a slower tier; waits for room, but not for long."""


Leaving = Callable[[KvFormat], AbstractContextManager[Offer | None]]
"""Opened by a tier before it looks up what it is going to drop, so that deletions from then on are heard."""


def no_next_tier(kind: KvFormat) -> AbstractContextManager[Offer | None]:
    """Offer blocks to no other tier: the :data:`Leaving` of the last one."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class TierStats:
    """A moment's view of a tier, or its counters; since start, of blocks unless a name says otherwise.

    Attributes:
        capacity_bytes: What ``used_bytes`` may reach; 0: unknown.
        num_segments: Files, of a disk.
        resting: Left alone after failures in a row, or held below its size by a full disk.
    """

    num_blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    num_segments: int = 0
    queued_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    errors: int = 0
    damaged: int = 0
    evictions: int = 0
    resting: bool = False


@dataclass(eq=False)
class Write:
    """Blocks, whose bytes stay as they are until ``done``. ``unwanted`` grows by what is deleted meanwhile."""

    kind: KvFormat
    hashes: Sequence[BlockHash]
    views: Sequence[memoryview]
    done: Callable[[list[bool]], None]
    unwanted: set[BlockHash] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Of all its blocks."""
        return len(self.hashes) * self.kind.block_bytes


@dataclass(eq=False)
class Bury:
    """Blocks (``None``: all of the kind) that must not be found again."""

    kind: KvFormat
    hashes: Sequence[BlockHash] | None
    done: Callable[[bool], None]


@dataclass(eq=False)
class Sync:
    """Asks when everything before it is safe."""

    done: Callable[[bool], None]


Job = Write | Bury | Sync


class JobQueue:
    """Jobs in order, bounded by the bytes of blocks in it; what was taken counts until it is finished.

    Args:
        max_bytes: Of blocks. One larger job is taken when nothing else waits.

    Attributes:
        changed: Held while several steps must be one; notified with every change.
        closing: Nothing is taken in any more.
        queued_bytes: Of blocks that wait or are being written.
    """

    def __init__(self, max_bytes: int) -> None:
        self.changed = threading.Condition()
        self.closing = False
        self.queued_bytes = 0
        self._max_bytes = max_bytes
        self._jobs: deque[Job] = deque()
        self._running: list[Write] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def room(self, num_bytes: int, share: float = 1.0) -> bool:
        """Whether so much could be offered if only a share of the queue might be used."""
        return not self.queued_bytes or self.queued_bytes + num_bytes <= share * self._max_bytes

    def add(self, job: Job) -> bool:
        """Queue a job; ``False``: no room for its blocks, or closing."""
        with self.changed:
            if self.closing:
                return False
            if isinstance(job, Write):
                if not self.room(job.num_bytes):
                    return False
                self.queued_bytes += job.num_bytes
            self._jobs.append(job)
            self.changed.notify_all()
        return True

    def take(self, max_bytes: int) -> list[Job]:
        """Take jobs, the first in any case, until their blocks reach so many bytes."""
        jobs: list[Job] = []
        size = 0
        with self.changed:
            while self._jobs and size < max_bytes:
                job = self._jobs.popleft()
                jobs.append(job)
                if isinstance(job, Write):
                    self._running.append(job)
                    size += job.num_bytes
        return jobs

    def finished(self, job: Write) -> None:
        """Give a job's bytes free; before a caller is told that might have more."""
        with self.changed:
            self.queued_bytes -= job.num_bytes
            self._running.remove(job)
            self.changed.notify_all()

    def writes(self, kind: KvFormat) -> list[Write]:
        """Return a kind's blocks on their way, while ``changed`` is held."""
        return [job for job in (*self._running, *self._jobs) if isinstance(job, Write) and job.kind == kind]

    def wait_room(self, num_bytes: int, timeout_s: float, share: float = 1.0) -> bool:
        """Wait in the calling thread until so much could be offered; ``False``: not in time, or closing."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.room(num_bytes, share), timeout_s)
            return not self.closing and self.room(num_bytes, share)

    def close(self) -> None:
        """Take nothing more in."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()


class LowerTier(ABC):
    """Keeps blocks that memory has no room for. ``done`` callbacks come from a thread of the tier's own.

    Args:
        queue_bytes: Blocks that may wait to be written.

    Attributes:
        name: As in metrics and events.
        exact: The index is the truth: what it holds can be read, and no other node writes here.
        durable: What was synced survives a crash of the host.
        shared: Other nodes write here too, so :meth:`find` may know more than :meth:`holds`.
        resting: Whether the tier is left alone for a while, because it failed.
        leaving: Where blocks go that the tier drops to make room; set before the first write.
    """

    name: str
    exact: bool
    durable: bool
    shared: bool

    def __init__(self, queue_bytes: int) -> None:
        self.leaving: Leaving = no_next_tier
        self._jobs = JobQueue(queue_bytes)

    @property
    def resting(self) -> bool:
        """Whether the tier is left alone for a while, because it failed."""
        return False

    @abstractmethod
    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is there, and then every change; see there."""

    @abstractmethod
    def takes(self, kind: KvFormat) -> bool:
        """Whether blocks of this kind can be kept at all."""

    @abstractmethod
    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block can be read, as far as the tier knows; never waits."""

    def find(self, kind: KvFormat, hashes: Sequence[BlockHash], again: bool = False) -> set[BlockHash]:
        """Look for blocks that others may have written or deleted; blocks the calling thread, but not for long.

        Args:
            kind: What they are.
            hashes: Their names, in their chain's order.
            again: Look also for those that are known, or were looked for in vain a moment ago.

        Returns:
            Those that are there; none of a tier that is not shared.
        """
        return set()

    @abstractmethod
    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Fill page-aligned buffers; blocks the calling thread. ``False``: not there, or damaged and now forgotten."""

    def room(self, num_bytes: int, share: float = 1.0) -> bool:
        """Whether a write would be taken if only a share of the queue might be used."""
        return self._jobs.room(num_bytes, share)

    def wait_room(self, num_bytes: int, timeout_s: float, share: float = 1.0) -> bool:
        """Wait for that in the calling thread."""
        return self._jobs.wait_room(num_bytes, timeout_s, share)

    def write(
        self,
        kind: KvFormat,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> bool:
        """Queue blocks, whose bytes stay as they are until ``done``; ``False``: the queue is full.

        ``done`` is told which of them can be read now.
        """
        return self._jobs.add(Write(kind, hashes, views, done))

    @abstractmethod
    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> list[BlockHash]:
        """Forget blocks (``None``: all of the kind), also those on their way, and return those known.

        ``done`` is told whether none of them can be found again.
        """

    def sync(self, done: Callable[[bool], None]) -> None:
        """Tell whether everything queued so far survives a crash, when it does."""
        if not self._jobs.add(Sync(done)):
            done(False)

    @abstractmethod
    def stats(self) -> TierStats:
        """Return what metrics show."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is queued; no reads may be running."""
