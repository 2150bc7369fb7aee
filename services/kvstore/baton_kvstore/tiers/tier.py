"""The interface of lower tiers (those below memory), and the job queue of their writer threads."""

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
    """Passes blocks that a tier is about to drop on to the slower tiers."""

    def wanted(self, hashes: Sequence[BlockHash]) -> set[BlockHash]:
        """Return the blocks that a slower tier can store and does not hold."""

    def hand_over(self, hashes: Sequence[BlockHash], views: Sequence[memoryview]) -> None:
        """Queue blocks for a slower tier; waits for room in its queue for a limited time.

        Args:
            hashes: Hashes of the blocks.
            views: Bytes of the blocks, which must not change any more.
        """


Leaving = Callable[[KvFormat], AbstractContextManager[Offer | None]]
"""Context that a tier opens before it looks up blocks to drop, so that deletions from then on are not missed."""


def no_next_tier(kind: KvFormat) -> AbstractContextManager[Offer | None]:
    """Offer dropped blocks to no other tier: the :data:`Leaving` of the last tier."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class TierStats:
    """Snapshot of a tier, or its counters since start; numbers of blocks unless a name says otherwise.

    Attributes:
        capacity_bytes: Upper bound of ``used_bytes``; 0: unknown.
        num_segments: Number of files of the disk tier.
        resting: Not used for a while after repeated failures, or limited by a full disk.
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
    """Blocks to write, whose bytes do not change until ``done`` is called.

    Attributes:
        unwanted: Blocks that were deleted since the write was queued.
    """

    kind: KvFormat
    hashes: Sequence[BlockHash]
    views: Sequence[memoryview]
    done: Callable[[list[bool]], None]
    unwanted: set[BlockHash] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Total size of the blocks."""
        return len(self.hashes) * self.kind.block_bytes


@dataclass(eq=False)
class Delete:
    """Blocks to delete for good (``hashes=None``: all of the KV format)."""

    kind: KvFormat
    hashes: Sequence[BlockHash] | None
    done: Callable[[bool], None]


@dataclass(eq=False)
class Sync:
    """A request to be called when all earlier jobs are durable."""

    done: Callable[[bool], None]


Job = Write | Delete | Sync


class JobQueue:
    """A FIFO queue of jobs, bounded by the bytes of their blocks; a popped write counts until it is finished.

    Args:
        max_bytes: Maximum size of queued blocks. A larger write is accepted only by an empty queue.

    Attributes:
        changed: Lock and condition of the queue: acquire it for atomic steps; notified of every change.
        closing: Whether :meth:`close` was called; no more jobs are accepted.
        queued_bytes: Total size of the blocks that are waiting or being written.
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
        """Whether ``num_bytes`` fit into the given share of the queue."""
        return not self.queued_bytes or self.queued_bytes + num_bytes <= share * self._max_bytes

    def add(self, job: Job) -> bool:
        """Queue a job; ``False`` if its blocks do not fit, or the queue is closing."""
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

    def pop_batch(self, max_bytes: int) -> list[Job]:
        """Pop jobs, at least one if there is any, until their blocks reach ``max_bytes``."""
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

    def finish(self, job: Write) -> None:
        """Free the queue space of a write; call this before the write's ``done``, whose caller may write more."""
        with self.changed:
            self.queued_bytes -= job.num_bytes
            self._running.remove(job)
            self.changed.notify_all()

    def writes(self, kind: KvFormat) -> list[Write]:
        """Return the unfinished writes of a KV format; ``changed`` must be acquired."""
        return [job for job in (*self._running, *self._jobs) if isinstance(job, Write) and job.kind == kind]

    def wait_room(self, num_bytes: int, timeout_s: float, share: float = 1.0) -> bool:
        """Block until ``num_bytes`` fit into the share of the queue; ``False`` on timeout or if closing."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.room(num_bytes, share), timeout_s)
            return not self.closing and self.room(num_bytes, share)

    def close(self) -> None:
        """Accept no more jobs and wake all waiting threads."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()


class LowerTier(ABC):
    """A tier below memory. Calls ``done`` callbacks from a thread of its own.

    Args:
        queue_bytes: Maximum size of the blocks waiting to be written.

    Attributes:
        name: Name in metrics and events.
        exact: The index is authoritative: blocks in it can be read, and no other node writes to the tier.
        durable: Synced blocks survive a crash of the host.
        shared: Other nodes write to the tier too, so :meth:`find` may know more than :meth:`holds`.
        leaving: Opens the hand-over of blocks that the tier drops to make room; set before the first write.
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
        """Whether the tier is not used for a while, because it failed."""
        return False

    @abstractmethod
    def listen(self, listener: TierListener) -> None:
        """Report all present blocks to a listener, and then every change."""

    @abstractmethod
    def takes(self, kind: KvFormat) -> bool:
        """Whether the tier can store blocks of this KV format."""

    @abstractmethod
    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block can be read, as far as the tier knows; does not block."""

    def find(self, kind: KvFormat, hashes: Sequence[BlockHash], again: bool = False) -> set[BlockHash]:
        """Look up blocks that other nodes may have written or deleted; blocks the calling thread for a limited time.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks, in the order of their chain.
            again: Also look up blocks that are known, or were missing a moment ago.

        Returns:
            The blocks that are present; an empty set for a tier that is not shared.
        """
        return set()

    @abstractmethod
    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks into page-aligned buffers; blocks the calling thread.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks.
            into: One buffer of ``kind.block_bytes`` per block.

        Returns:
            One flag per block; ``False``: missing, or damaged and therefore dropped.
        """

    def room(self, num_bytes: int, share: float = 1.0) -> bool:
        """Whether a write of ``num_bytes`` fits into the given share of the queue."""
        return self._jobs.room(num_bytes, share)

    def wait_room(self, num_bytes: int, timeout_s: float, share: float = 1.0) -> bool:
        """Block until :meth:`room` is true; ``False`` on timeout or if closing."""
        return self._jobs.wait_room(num_bytes, timeout_s, share)

    def write(
        self,
        kind: KvFormat,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> bool:
        """Queue blocks to be written.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks.
            views: Bytes of the blocks, which must not change until ``done`` is called.
            done: Called with one flag per block: whether it can be read now.

        Returns:
            ``False`` if the queue is full; ``done`` is not called then.
        """
        return self._jobs.add(Write(kind, hashes, views, done))

    @abstractmethod
    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> list[BlockHash]:
        """Delete blocks, including those waiting to be written, and return those that were known.

        Args:
            kind: KV format of the blocks.
            hashes: Hashes of the blocks; ``None``: all of the KV format.
            done: Called with whether the deletion is final: no block can be found again.
        """

    def sync(self, done: Callable[[bool], None]) -> None:
        """Call ``done`` once all jobs queued so far are finished, with whether they survive a crash."""
        if not self._jobs.add(Sync(done)):
            done(False)

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a snapshot for metrics."""

    @abstractmethod
    def close(self) -> None:
        """Finish queued jobs and close; no reads may be running."""
