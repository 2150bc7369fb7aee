"""What waits for a tier's own thread: blocks to write, deletions, and questions whether all that is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.types import BlockHash
from baton_kvstore.types import KvFormat


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

    def offer(self, job: Write) -> bool:
        """Queue blocks; ``False``: the queue is full or closing."""
        with self.changed:
            if self.closing or not self.room(job.num_bytes):
                return False
            self.queued_bytes += job.num_bytes
            self._jobs.append(job)
            self.changed.notify_all()
        return True

    def add(self, job: Bury | Sync) -> bool:
        """Queue what has no bytes; ``False``: closing."""
        with self.changed:
            if self.closing:
                return False
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
