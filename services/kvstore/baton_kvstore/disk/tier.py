"""The disk tier as the store uses it: reads in the caller's thread, everything else in a thread of its own.

Writes and deletions are taken in order, many at a time, appended together and synced together: at the latest
``sync_interval_s`` after they were written, at once if somebody waits for it. The queue is bounded by bytes; who finds
it full comes back later. Nobody who reads ever waits for the queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.types import BlockHash
from baton_kvstore.disk.format import MAX_BLOCK_BYTES, Kind
from baton_kvstore.disk.log import DiskLog

log = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20


@dataclass(eq=False)
class _Write:
    kind: Kind
    hashes: Sequence[BlockHash]
    views: Sequence[memoryview]
    done: Callable[[list[bool]], None]
    unwanted: set[BlockHash] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return len(self.hashes) * self.kind.block_bytes


@dataclass(eq=False)
class _Bury:
    kind: Kind
    hashes: Sequence[BlockHash] | None
    done: Callable[[bool], None]


@dataclass(eq=False)
class _Sync:
    done: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A moment's view of the tier."""

    num_blocks: int
    used_bytes: int
    capacity_bytes: int
    num_segments: int
    queued_bytes: int


class DiskTier:
    """A bounded store of blocks in files.

    Args:
        disk: The log; closed with this.
        capacity_bytes: What the log was bounded to.
        queue_bytes: Blocks that may wait to be written.
        sync_interval_s: Longest time that a written block may be lost to a loss of power.
        checkpoint_interval_s: Between two checkpoints of the index.
    """

    def __init__(
        self,
        disk: DiskLog,
        *,
        capacity_bytes: int,
        queue_bytes: int,
        sync_interval_s: float,
        checkpoint_interval_s: float,
    ) -> None:
        self._log = disk
        self._capacity, self._queue_bytes = capacity_bytes, queue_bytes
        self._sync_interval_s, self._checkpoint_interval_s = sync_interval_s, checkpoint_interval_s
        self._changed = threading.Condition()
        self._queue: deque[_Write | _Bury | _Sync] = deque()
        self._running: list[_Write] = []
        self._queued_bytes = 0
        self._closing = False
        self._dirty_since: float | None = None
        self._checkpoint_due: float | None = time.monotonic() + checkpoint_interval_s
        self.counters = disk.index.counters
        self._thread = threading.Thread(target=self._run, name="kvstore disk", daemon=True)
        self._thread.start()

    def holds(self, kind: Kind, block_hash: BlockHash) -> bool:
        """Whether a block can be read; never waits."""
        return self._log.index.find(kind.key, block_hash) is not None

    def read(self, kind: Kind, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        """Fill page-aligned buffers, in the calling thread. ``False``: a block is not there or was damaged."""
        results = self._log.read(kind, hashes, into)
        if not all(results):
            with self._changed:  # before anybody can queue them to be written again
                for damaged, name in self._log.forget_damaged():
                    self._queue.append(_Bury(damaged, [name], lambda right: None))
                self._changed.notify_all()
        return results

    def takes(self, kind: Kind) -> bool:
        """Whether blocks of this size can be kept at all."""
        return kind.block_bytes <= min(MAX_BLOCK_BYTES, self._capacity // 8)

    def write(
        self,
        kind: Kind,
        hashes: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[list[bool]], None],
    ) -> bool:
        """Queue blocks to be written; ``False`` if the queue is full.

        Args:
            kind: What they are.
            hashes: Their names.
            views: Their bytes, which stay as they are until ``done``.
            done: Told, in the writer's thread, which can be read now.
        """
        job = _Write(kind, hashes, views, done)
        with self._changed:
            if self._closing or (self._queued_bytes and self._queued_bytes + job.num_bytes > self._queue_bytes):
                return False
            self._queued_bytes += job.num_bytes
            self._queue.append(job)
            self._changed.notify_all()
        return True

    def delete(self, kind: Kind, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]) -> list[BlockHash]:
        """Forget blocks (``None``: all of the kind) at once, also those on their way to the disk.

        Args:
            kind: What they are.
            hashes: Their names.
            done: Told, in the writer's thread, whether no restart will find them again.

        Returns:
            Those that could be found.
        """
        with self._changed:
            writes = [job for job in (*self._running, *self._queue) if isinstance(job, _Write) and job.kind == kind]
            under_way = {name for job in writes for name in job.hashes}
            found = self._log.hide(kind, hashes, [job.unwanted for job in writes])
            if hashes is None:
                for job in writes:
                    job.unwanted.update(job.hashes)
                buried = None
            else:
                there = under_way | set(found)
                buried = [name for name in hashes if name in there]
            if (buried is None or buried) and not self._closing:
                self._queue.append(_Bury(kind, buried, done))
                self._changed.notify_all()
                return found
        done(True)
        return found

    def sync(self, done: Callable[[bool], None]) -> None:
        """Have everything queued so far synced, and ``done`` told (in the writer's thread) whether it was."""
        with self._changed:
            if not self._closing:
                self._queue.append(_Sync(done))
                self._changed.notify_all()
                return
        done(False)

    def stats(self) -> DiskStats:
        """Return what metrics show."""
        return DiskStats(
            num_blocks=len(self._log.index),
            used_bytes=self._log.used_bytes,
            capacity_bytes=self._capacity,
            num_segments=self._log.num_segments,
            queued_bytes=self._queued_bytes,
        )

    def close(self) -> None:
        """Write and sync what is queued, checkpoint, and close; nobody reads any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._log.close()

    # The writer's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing and not self._due():
                    self._changed.wait(self._wait_s())
                jobs = self._take()
                ending = self._closing and not self._queue
            self._work(jobs)
            if ending:
                self._end()
                return

    def _take(self) -> list[_Write | _Bury | _Sync]:
        jobs: list[_Write | _Bury | _Sync] = []
        size = 0
        while self._queue and size < _BATCH_BYTES:
            job = self._queue.popleft()
            jobs.append(job)
            if isinstance(job, _Write):
                self._running.append(job)
                size += job.num_bytes
        return jobs

    def _work(self, jobs: Sequence[_Write | _Bury | _Sync]) -> None:
        waiting: list[tuple[Callable[[bool], None], bool]] = []
        for job in jobs:
            if isinstance(job, _Write):
                results = self._write(job)
                with self._changed:  # room first: whoever is told may have more
                    self._queued_bytes -= job.num_bytes
                    self._running.remove(job)
                job.done(results)
            elif isinstance(job, _Bury):
                waiting.append((job.done, self._bury(job)))
            else:
                waiting.append((job.done, True))
        if jobs and self._dirty_since is None:
            self._dirty_since = time.monotonic()
        now = time.monotonic()
        synced = True
        if waiting or (self._dirty_since is not None and now - self._dirty_since >= self._sync_interval_s):
            synced = self._sync()
        for done, right in waiting:
            done(right and synced)
        self._keep_up(now)

    def _write(self, job: _Write) -> list[bool]:
        try:
            return self._log.write(job.kind, job.hashes, job.views, job.unwanted)
        except OSError as error:
            self.counters.write_errors += 1
            log.error("writing %d blocks to disk failed: %s", len(job.hashes), error)
            return [self.holds(job.kind, name) for name in job.hashes]

    def _bury(self, job: _Bury) -> bool:
        try:
            if job.hashes is None:
                self._log.clear(job.kind.key)
            else:
                self._log.bury(job.kind, job.hashes)
        except OSError as error:
            self.counters.write_errors += 1
            log.error("a deletion could not be written to disk: %s", error)
            return False
        return True

    def _sync(self) -> bool:
        try:
            self._log.sync()
        except OSError as error:
            self.counters.write_errors += 1
            log.error("syncing the disk tier failed: %s", error)
            self._dirty_since = time.monotonic()  # again after another interval
            return False
        self._dirty_since = None
        if self._checkpoint_due is None:
            self._checkpoint_due = time.monotonic() + self._checkpoint_interval_s
        return True

    def _keep_up(self, now: float) -> None:
        if self._checkpoint_due is None or now < self._checkpoint_due:
            return
        self._checkpoint_due = None
        try:
            while not self._queue and self._log.compact():
                pass
            self._log.checkpoint()
        except OSError as error:
            self.counters.write_errors += 1
            log.error("upkeep of the disk tier failed: %s", error)

    def _end(self) -> None:
        self._sync()
        try:
            self._log.checkpoint()
        except OSError as error:
            log.error("the last checkpoint of the disk tier failed: %s", error)

    def _due(self) -> bool:
        wait_s = self._wait_s()
        return wait_s is not None and wait_s <= 0

    def _wait_s(self) -> float | None:
        now, ends = time.monotonic(), []
        if self._dirty_since is not None:
            ends.append(self._dirty_since + self._sync_interval_s - now)
        if self._checkpoint_due is not None:
            ends.append(self._checkpoint_due - now)
        return max(0.0, min(ends)) if ends else None
