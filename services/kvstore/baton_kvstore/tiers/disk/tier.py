"""The disk tier: reads in the caller's thread, everything else in a writer thread.

Writes and deletions are processed in order and in batches, appended together and synced together: at the latest
``sync_interval_s`` after they were written, at once if a caller waits for it. The queue is bounded by bytes; a full
queue rejects writes. Reads never wait for the queue. After a failure the disk gets no writes for a few seconds; its
blocks can still be read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from baton.background import BackgroundThread
from baton.circuit_breaker import CircuitBreaker
from baton.types import BlockHash
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.tier import Delete, Job, LowerTier, Sync, TierStats, Write
from baton_kvstore.types import MAX_BLOCK_BYTES, KvFormat, LogLimit, TierListener

log = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20
_COOLDOWN_S = 5.0


class DiskTier(LowerTier):
    """A bounded store of blocks in files.

    Args:
        disk: The log of segments; closed with this.
        queue_bytes: Maximum size of the blocks waiting to be written.
        sync_interval_s: Longest time until a written block is synced, in seconds.
        checkpoint_interval_s: Time between two checkpoints of the index, in seconds.
    """

    name = "disk"
    exact = True
    durable = True
    shared = False

    def __init__(
        self,
        disk: DiskLog,
        *,
        queue_bytes: int,
        sync_interval_s: float,
        checkpoint_interval_s: float,
    ) -> None:
        super().__init__(queue_bytes)
        self._log = disk
        disk.leaving = lambda kind: self.leaving(kind)
        self._sync_interval_s = sync_interval_s
        self._checkpoint_interval_s = checkpoint_interval_s
        self._dirty_since: float | None = None
        self._checkpoint_due: float | None = time.monotonic() + checkpoint_interval_s
        self.counters = disk.index.counters
        self.breaker = CircuitBreaker(1, _COOLDOWN_S)
        self._written = False  # whether a write succeeded since the last failure
        self._upkeep = LogLimit()
        self._unanswered: list[Job] = []
        self._thread = BackgroundThread(
            "kvstore disk",
            self._run,
            is_closing=lambda: self._jobs.closing and not self._jobs,
            on_failure=self._answer_after_failure,
        )
        self._thread.start()

    @property
    def resting(self) -> bool:
        return self.breaker.open

    def listen(self, listener: TierListener) -> None:
        self._log.index.listen(listener)

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        return self._log.index.find(kind, block_hash) is not None

    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        results = self._log.index.read(kind, hashes, into)
        if not all(results):
            with self._jobs.changed:  # so that the deletion is queued before a new write of the block
                for damaged, name in self._log.index.forget_damaged():
                    self._jobs.add(Delete(damaged, [name], lambda right: None))
        return results

    def takes(self, kind: KvFormat) -> bool:
        return kind.block_bytes <= min(MAX_BLOCK_BYTES, self._log.max_bytes // 8)

    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> list[BlockHash]:
        with self._jobs.changed:
            writes = self._jobs.writes(kind)
            queued = {name for job in writes for name in job.hashes}
            removed = self._log.index.hide(kind, hashes, [job.unwanted for job in writes])
            if hashes is None:
                for job in writes:
                    job.unwanted.update(job.hashes)
                deleted = None
            else:
                known = queued | set(removed)
                deleted = [name for name in hashes if name in known]
            is_needed = deleted is None or bool(deleted)
            if is_needed and self._jobs.add(Delete(kind, deleted, done)):
                return removed
        done(not is_needed)
        return removed

    def stats(self) -> TierStats:
        counters = self.counters
        return TierStats(
            num_blocks=len(self._log.index),
            used_bytes=self._log.used_bytes,
            capacity_bytes=self._log.max_bytes,
            num_segments=self._log.num_segments,
            queued_bytes=self._jobs.queued_bytes,
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            errors=counters.read_errors + counters.write_errors,
            damaged=counters.checksum_failures,
            evictions=counters.evictions,
            resting=self.breaker.tripped or self._log.full,
        )

    def close(self) -> None:
        """Write and sync queued blocks, write a checkpoint, and close; no reads may be running."""
        self._jobs.close()
        self._thread.join()
        self._log.close()

    # The writer's thread

    def _run(self) -> None:
        jobs = self._jobs
        while True:
            with jobs.changed:
                while not jobs and not jobs.closing and not self._due():
                    jobs.changed.wait(self._wait_s())
                self._unanswered = jobs.pop_batch(_BATCH_BYTES)
                ending = jobs.closing and not jobs
            self._process_jobs(self._unanswered)
            if ending:
                self._finish()
                return

    def _answer_after_failure(self, error: BaseException) -> None:
        """Leave the disk alone for a while, and answer the jobs of the batch in which the thread failed."""
        self._failed("the writer's thread", error)
        while self._unanswered:
            job = self._unanswered.pop()
            if isinstance(job, Write):
                self._jobs.finish(job)
                job.done([self.holds(job.kind, name) for name in job.hashes])
            else:
                job.done(False)

    def _process_jobs(self, jobs: list[Job]) -> None:
        """Process a batch, and remove each job from it when it is answered."""
        had_jobs = bool(jobs)
        waiting: list[tuple[Delete | Sync, bool]] = []
        for job in list(jobs):
            if isinstance(job, Write):
                results = self._write(job)
                jobs.remove(job)
                self._jobs.finish(job)
                job.done(results)
            elif isinstance(job, Delete):
                waiting.append((job, self._delete(job)))
            else:
                waiting.append((job, True))
        if had_jobs and self._dirty_since is None:
            self._dirty_since = time.monotonic()
        now = time.monotonic()
        synced = True
        if waiting or (self._dirty_since is not None and now - self._dirty_since >= self._sync_interval_s):
            synced = self._sync()
        for item, right in waiting:
            jobs.remove(item)
            item.done(right and synced)
        self._run_maintenance(now)

    def _write(self, job: Write) -> list[bool]:
        try:
            results = self._log.write(job.kind, job.hashes, job.views, job.unwanted)
            self._written = True
            return results
        except OSError as error:
            self._failed("writing blocks", error)
            return [self.holds(job.kind, name) for name in job.hashes]

    def _delete(self, job: Delete) -> bool:
        try:
            if job.hashes is None:
                self._log.clear(job.kind)
            else:
                self._log.append_tombstones(job.kind, job.hashes)
        except OSError as error:
            self._failed("writing a deletion", error)
            return False
        return True

    def _sync(self) -> bool:
        try:
            self._log.sync()
        except OSError as error:
            self._failed("syncing", error)
            self._dirty_since = time.monotonic()  # retry after another interval
            return False
        self._dirty_since = None
        if self._checkpoint_due is None:
            self._checkpoint_due = time.monotonic() + self._checkpoint_interval_s
        if self._written and self.breaker.succeeded():
            log.warning("the disk tier works again")
        return True

    def _failed(self, what: str, error: BaseException) -> None:
        self.counters.write_errors += 1
        self._written = False
        if self.breaker.failed():
            log.error("the disk tier fails, and gets no writes for a while (%s: %s)", what, error)

    def _run_maintenance(self, now: float) -> None:
        if self._checkpoint_due is None or now < self._checkpoint_due:
            return
        self._checkpoint_due = None
        try:
            while not self._jobs and self._log.compact():
                pass
            self._log.checkpoint()
        except OSError as error:
            self.counters.write_errors += 1
            if (more := self._upkeep.due()) is not None:
                log.error("upkeep of the disk tier failed: %s%s", error, more)

    def _finish(self) -> None:
        self._sync()
        try:
            self._log.checkpoint()
        except OSError as error:
            log.error("the last checkpoint of the disk tier failed: %s", error)

    def _due(self) -> bool:
        wait_s = self._wait_s()
        return wait_s is not None and wait_s <= 0

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        ends: list[float] = []
        if self._dirty_since is not None:
            ends.append(self._dirty_since + self._sync_interval_s - now)
        if self._checkpoint_due is not None:
            ends.append(self._checkpoint_due - now)
        return max(0.0, min(ends)) if ends else None
