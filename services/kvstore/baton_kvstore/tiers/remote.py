"""A tier that other nodes share: reads in the caller's thread, writes in a thread of its own.

Nothing that comes from the other side is believed: a value that is not the very block, with the right checksum, is a
miss, and is deleted. A backend that fails three times in a row is left alone for five seconds at a time. Which blocks
are there is known from a scan at the start, from what this node writes, reads and looks for; misses correct it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash

from baton.background import BackgroundThread
from baton.circuit_breaker import CircuitBreaker
from baton.types import BlockHash
from baton_kvstore.tiers.tier import Delete, Job, LowerTier, TierStats, Write
from baton_kvstore.types import MAX_BLOCK_BYTES, KvFormat, Listeners, LogLimit, TierListener, by_kind, digest_of

log = logging.getLogger(__name__)
T = TypeVar("T")

_FAILURES = 3
_COOLDOWN_S = 5.0
_CLOSE_S = 30.0
_DELETED_AT_ONCE = 256
"""More blocks are several calls, each with its own time."""


class RemoteError(Exception):
    """A backend is away, too slow, or answered with an error."""


WriteValues = Callable[[KvFormat, Sequence[BlockHash], Sequence[bytes]], list[bool]]
"""Type of :meth:`Backend.write`."""


class Backend(Protocol):
    """Values by kind and block hash. Every method may be called from any thread, blocks it, but not for ever.

    Attributes:
        on_new_server: Called, in any thread, when another server answers than before: blocks may be lost.

    Raises:
        RemoteError: By every method.
    """

    on_new_server: Callable[[], None]

    def get(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """Return values; ``None``: there is none."""

    def write(self, kind: KvFormat, hashes: Sequence[BlockHash], values: Sequence[bytes]) -> list[bool]:
        """Write values, replacing existing ones atomically, and return for each whether it was accepted.

        A backend may name this method ``put`` instead, its older name.
        """

    def has(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Return which are there. ``None``: not looked for, because an earlier block of the chain is not there."""

    def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> None:
        """Delete values (``None``: all of the kind)."""

    def scan(self) -> Iterator[tuple[KvFormat, list[BlockHash]]]:
        """Yield what is there, little by little, in any order."""

    def used_bytes(self) -> int | None:
        """Return the memory that everything there takes; ``None``: unknown."""

    def close(self) -> None:
        """Close connections; running calls fail."""


VERSION = 1
_HEADER = struct.Struct("<4sHHQ32s32s32s16s")
_MAGIC = b"BBLK"
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size


def encode_header(kind: KvFormat, block_hash: BlockHash, payload: memoryview) -> bytes:
    """Return what comes before a block's bytes."""
    body = _HEADER.pack(_MAGIC, VERSION, 0, len(payload), kind.key, kind.content_key, block_hash, digest_of(payload))
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_kind(header: bytes) -> KvFormat | None:
    """Return what kind of block a value is, from its first bytes; ``None``: it is none."""
    body = header[: _HEADER.size]
    if len(header) < HEADER_BYTES or _SUM.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    magic, version, _, num_bytes, key, content_key, _, _ = _HEADER.unpack(body)
    if magic != _MAGIC or version != VERSION or not 0 < num_bytes <= MAX_BLOCK_BYTES:
        return None
    return KvFormat(key, content_key, num_bytes)


def decode_block(value: bytes, kind: KvFormat, block_hash: BlockHash) -> memoryview | None:
    """Return a block's bytes; ``None``: the value is not that very block, whole."""
    if len(value) != HEADER_BYTES + kind.block_bytes or decode_kind(value[:HEADER_BYTES]) != kind:
        return None
    *_, name, digest = _HEADER.unpack_from(value)
    payload = memoryview(value)[HEADER_BYTES:]
    return payload if name == block_hash and digest_of(payload) == digest else None


@dataclass(frozen=True)
class RemoteOptions:
    """What differs between tiers.

    Attributes:
        name: As in metrics and events.
        durable: What was written survives a crash of this host.
        queue_bytes: Blocks that may wait to be written.
        index_blocks: Blocks that this node knows of.
        batch_bytes: Of blocks in one round trip, as values in memory on top of the blocks themselves.
        max_block_bytes: Larger blocks are not taken.
        max_bytes: What the backend may use before blocks are deleted, the coldest this node knows of; 0: no matter.
        absent_s: Time for which a missing block is not looked up again, in seconds.
    """

    name: str
    durable: bool
    queue_bytes: int
    index_blocks: int
    batch_bytes: int = 8 << 20
    max_block_bytes: int = MAX_BLOCK_BYTES
    max_bytes: int = 0
    absent_s: float = 1.0


class RemoteIndex:
    """What one node knows of the blocks in a tier that others share, the one used last at the end.

    Bounded: those unused for longest are forgotten. Every method may be called from any thread.

    Args:
        tier: Name of the tier.
        max_blocks: Maximum number of known blocks; about 300 bytes of memory each.
        absent_s: Time for which a missing block is not looked up again, in seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self, tier: str, max_blocks: int, *, absent_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max = max_blocks
        self._absent_s = absent_s
        self._clock = clock
        self._blocks: OrderedDict[bytes, KvFormat] = OrderedDict()
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._bytes = 0
        self._mutex = threading.Lock()
        self._listeners = Listeners(tier)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """Of the blocks known, headers left out."""
        return self._bytes

    def listen(self, listener: TierListener) -> None:
        """Tell a listener what is known, and then every change."""
        with self._mutex:
            self._listeners.add(listener, self._by_kind())

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        """Whether a block is known."""
        return kind.key + block_hash in self._blocks

    def add(self, kind: KvFormat, hashes: Sequence[BlockHash], *, unless: Collection[BlockHash] = ()) -> None:
        """Note blocks that are there; those of ``unless`` were deleted meanwhile."""
        with self._mutex:
            new = []
            for name in hashes:
                if name in unless:
                    continue
                key = kind.key + name
                self._absent.pop(key, None)
                if key in self._blocks:
                    self._blocks.move_to_end(key)
                else:
                    self._blocks[key] = kind
                    self._bytes += kind.block_bytes
                    new.append(name)
            self._listeners.notify(kind, new, True)
            while len(self._blocks) > self._max:
                key, oldest = self._blocks.popitem(last=False)
                self._bytes -= oldest.block_bytes
                self._listeners.notify(oldest, [BlockHash(key[len(oldest.key) :])], False)

    def use(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> None:
        """Note that blocks were read."""
        with self._mutex:
            for name in hashes:
                if kind.key + name in self._blocks:
                    self._blocks.move_to_end(kind.key + name)

    def drop(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> list[BlockHash]:
        """Forget blocks (``None``: all of the kind) and return those that were known."""
        with self._mutex:
            if hashes is None:
                size = len(kind.key)
                hashes = [BlockHash(key[size:]) for key, other in self._blocks.items() if other.key == kind.key]
            dropped = [name for name in dict.fromkeys(hashes) if kind.key + name in self._blocks]
            for name in dropped:
                self._bytes -= self._blocks.pop(kind.key + name).block_bytes
            self._listeners.notify(kind, dropped, False)
            return dropped

    def clear(self) -> None:
        with self._mutex:
            kinds = self._by_kind()
            self._blocks.clear()
            self._bytes = 0
            for kind, names in kinds.items():
                self._listeners.notify(kind, list(names), False)

    def coldest(self, num_bytes: int) -> tuple[KvFormat, list[BlockHash]] | None:
        """Return the blocks of one kind, unused for longest, that have so many bytes together; ``None``: none known."""
        chosen: list[BlockHash] = []
        with self._mutex:
            first = next(iter(self._blocks.values()), None)
            if first is None:
                return None
            for key, kind in self._blocks.items():
                if kind != first or len(chosen) * kind.block_bytes >= num_bytes:
                    break
                chosen.append(BlockHash(key[len(kind.key) :]))
        return first, chosen

    def unknown(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return the blocks that are neither known nor were missing in a recent look-up."""
        now = self._clock()
        with self._mutex:
            unknown = []
            for name in hashes:
                key = kind.key + name
                if key not in self._blocks and self._absent.get(key, now) <= now:
                    unknown.append(name)
            return unknown

    def missed(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> None:
        """Record blocks that were missing in a look-up."""
        until = self._clock() + self._absent_s
        with self._mutex:
            for name in hashes:
                self._absent[kind.key + name] = until
                self._absent.move_to_end(kind.key + name)
            while len(self._absent) > self._max:
                self._absent.popitem(last=False)

    def _by_kind(self) -> dict[KvFormat, set[BlockHash]]:
        return by_kind((kind, BlockHash(key[len(kind.key) :])) for key, kind in self._blocks.items())


class RemoteTier(LowerTier):
    """A tier over a :class:`Backend`.

    Args:
        backend: Closed with this.
        options: See there.
    """

    exact = False
    shared = True

    def __init__(self, backend: Backend, options: RemoteOptions) -> None:
        super().__init__(options.queue_bytes)
        self.name = options.name
        self.durable = options.durable
        self.counters = TierStats()
        self.index = RemoteIndex(options.name, options.index_blocks, absent_s=options.absent_s)
        self.breaker = CircuitBreaker(_FAILURES, _COOLDOWN_S)
        self._backend = backend
        self._write_values: WriteValues = getattr(backend, "write", None) or getattr(backend, "put")  # noqa: B009
        self._options = options
        self._unexpected = LogLimit()
        self._broken = LogLimit()
        self.scanned = threading.Event()
        """Set when the last scan that was asked for has ended, whatever with."""
        self._scan_wanted = threading.Event()
        self._scan_wanted.set()
        backend.on_new_server = self._start_over
        self._threads = [
            BackgroundThread(f"kvstore {options.name} {what}", run, is_closing=lambda: self._jobs.closing)
            for run, what in ((self._run, "write"), (self._keep_scanning, "scan"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def resting(self) -> bool:
        return self.breaker.open

    def listen(self, listener: TierListener) -> None:
        self.index.listen(listener)

    def takes(self, kind: KvFormat) -> bool:
        return kind.block_bytes <= self._options.max_block_bytes

    def holds(self, kind: KvFormat, block_hash: BlockHash) -> bool:
        return self.index.holds(kind, block_hash) and not self.breaker.open

    def find(self, kind: KvFormat, hashes: Sequence[BlockHash], again: bool = False) -> set[BlockHash]:
        names = hashes if again else self.index.unknown(kind, hashes)
        flags = self._ask(functools.partial(self._backend.has, kind, names)) if names else None
        if flags is None:
            return set()
        present = [name for name, flag in zip(names, flags, strict=True) if flag]
        absent = [name for name, flag in zip(names, flags, strict=True) if flag is False]
        self.index.add(kind, present)
        self.index.drop(kind, absent)
        self.index.missed(kind, absent)
        return set(present)

    def read(self, kind: KvFormat, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> list[bool]:
        results = [False] * len(hashes)
        for part in self._batches(kind, len(hashes)):
            names = hashes[part]
            values = self._ask(functools.partial(self._backend.get, kind, names))
            if values is None:
                break
            for i, name, value in zip(range(part.start, part.stop), names, values, strict=True):
                payload = None if value is None else decode_block(value, kind, name)
                if payload is not None:
                    into[i][:] = payload
                    results[i] = True
                elif value is not None:
                    self._damaged(kind, name)
            self.counters.read_bytes += sum(results[part]) * kind.block_bytes
            self.index.drop(kind, [name for name, right in zip(names, results[part], strict=True) if not right])
            self.index.use(kind, [name for name, right in zip(names, results[part], strict=True) if right])
        return results

    def delete(
        self, kind: KvFormat, hashes: Sequence[BlockHash] | None, done: Callable[[bool], None]
    ) -> list[BlockHash]:
        with self._jobs.changed:
            writes = self._jobs.writes(kind)
            for job in writes:
                job.unwanted.update(job.hashes if hashes is None else hashes)
            dropped = self.index.drop(kind, hashes)
            queued = self._jobs.add(Delete(kind, hashes, done))
        if not queued:
            done(False)
        return dropped

    def stats(self) -> TierStats:
        return dataclasses.replace(
            self.counters,
            num_blocks=len(self.index),
            used_bytes=self.index.num_bytes,
            queued_bytes=self._jobs.queued_bytes,
            resting=self.resting,
        )

    def close(self) -> None:
        """Write what is queued, unless that takes too long, and close the backend; no reads may be running."""
        self._jobs.close()
        self._scan_wanted.set()
        self._threads[0].join(_CLOSE_S)
        if self._threads[0].is_alive():
            log.warning("tier %s: blocks that were to be written are given up", self.name)
        self._backend.close()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    # The writer's thread

    def _run(self) -> None:
        while True:
            with self._jobs.changed:
                while not self._jobs and not self._jobs.closing:
                    self._jobs.changed.wait()
                jobs = self._jobs.pop_batch(1)
                if not jobs:
                    return
            for job in jobs:
                self._work(job)

    def _work(self, job: Job) -> None:
        if isinstance(job, Write):
            results = [False] * len(job.hashes)
            try:
                for part in self._batches(job.kind, len(job.hashes)):
                    results[part] = self._write(job, part)
            except Exception:
                log.exception("writing to tier %s failed", self.name)
            self._jobs.finish(job)
            job.done(results)
        elif isinstance(job, Delete):
            deleted = False
            try:
                deleted = self._delete_in_batches(job.kind, job.hashes)
            except Exception:
                log.exception("deleting from tier %s failed", self.name)
            job.done(deleted)
        else:
            job.done(True)

    def _write(self, job: Write, part: slice) -> list[bool]:
        """Write a batch and return which of its blocks are there now."""
        kind = job.kind
        at = range(len(job.hashes))[part]
        with self._jobs.changed:
            wanted = [i for i in at if job.hashes[i] not in job.unwanted]
        names = [job.hashes[i] for i in wanted]
        if not names or not self._make_room(len(names) * (kind.block_bytes + HEADER_BYTES)):
            return [False] * len(at)
        values = [encode_header(kind, job.hashes[i], job.views[i]) + job.views[i] for i in wanted]
        taken = self._ask(functools.partial(self._write_values, kind, names, values))
        right = {name for name, ok in zip(names, taken or (), strict=False) if ok}
        self.counters.written_bytes += len(right) * kind.block_bytes
        with self._jobs.changed:  # so that a deletion comes before, and is seen here, or after, and drops them
            self.index.add(kind, [name for name in names if name in right], unless=job.unwanted)
            self.index.drop(kind, [name for name in names if name not in right])
            return [job.hashes[i] in right and job.hashes[i] not in job.unwanted for i in at]

    def _make_room(self, num_bytes: int) -> bool:
        """Delete the coldest blocks until the backend has room; ``False``: it has none, or is away."""
        limit = self._options.max_bytes
        if not limit:
            return True
        used = self._ask(self._backend.used_bytes)
        while used is not None and used + num_bytes > limit:
            victims = self.index.coldest(used + num_bytes - limit)
            if victims is None:
                return False
            kind, names = victims
            names = names[: max(1, self._options.batch_bytes // kind.block_bytes)]
            self._hand_over(kind, names)
            with self._jobs.changed:
                gone = self.index.drop(kind, names)
            if not self._delete(kind, names):
                return False
            self.counters.evictions += len(gone)
            used -= len(names) * (kind.block_bytes + HEADER_BYTES)
        return used is not None

    def _hand_over(self, kind: KvFormat, names: list[BlockHash]) -> None:
        with self.leaving(kind) as offer:
            if offer is None:
                return
            wanted = offer.wanted(names)
            left = [name for name in names if name in wanted]
            values = self._ask(functools.partial(self._backend.get, kind, left)) if left else None
            blocks = [
                (name, view)
                for name, value in zip(left, values or (), strict=False)
                if value is not None and (view := decode_block(value, kind, name)) is not None
            ]
            if blocks:
                offer.hand_over([name for name, _ in blocks], [view for _, view in blocks])

    # Any thread

    def _start_over(self) -> None:
        """Forget everything and scan again: the server may have lost what it had, or some of it."""
        log.warning("tier %s: a server was restarted; what it holds is looked up again", self.name)
        self.index.clear()
        self.scanned.clear()
        self._scan_wanted.set()

    def _keep_scanning(self) -> None:
        while True:
            self._scan_wanted.wait()
            self._scan_wanted.clear()
            if self._jobs.closing:
                return
            self._scan()

    def _scan(self) -> None:
        """Learn what is there, as far as the index reaches; new blocks are not pushed out by old ones."""
        try:
            for kind, names in self._backend.scan():
                if self._jobs.closing or len(self.index) + len(names) > self._options.index_blocks:
                    break
                self.index.add(kind, names)
        except Exception as error:
            self._failed(error)
        finally:
            self.scanned.set()

    def _ask(self, call: Callable[[], T], *, always: bool = False) -> T | None:
        """Call the backend; ``None``: it failed, or is left alone."""
        if not self.breaker.allows() and not always:
            return None
        try:
            answer = call()
        except Exception as error:  # RemoteError, or of a client's library: no reason to lose the thread, or a Get
            self._failed(error)
            return None
        if self.breaker.succeeded():
            log.warning("tier %s is back", self.name)
        return answer

    def _delete_in_batches(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> bool:
        """Delete for good, also from a backend that is left alone; ``False``: some may be left."""
        if hashes is None:
            return self._delete(kind, None, always=True)
        parts = (hashes[at : at + _DELETED_AT_ONCE] for at in range(0, len(hashes), _DELETED_AT_ONCE))
        return all(self._delete(kind, part, always=True) for part in parts)

    def _delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None, *, always: bool = False) -> bool:
        def call() -> bool:
            self._backend.delete(kind, hashes)
            return True

        return self._ask(call, always=always) or False

    def _failed(self, error: Exception) -> None:
        """Count a failure; the log gets a line when the tier is left alone, and one when it is back."""
        self.counters.errors += 1
        expected = isinstance(error, RemoteError)
        if self.breaker.failed():
            log.warning("tier %s is left alone: %s", self.name, error, exc_info=None if expected else error)
        elif not expected and (more := self._unexpected.due()) is not None:
            log.error("tier %s: a call failed unexpectedly%s", self.name, more, exc_info=error)

    def _damaged(self, kind: KvFormat, name: BlockHash) -> None:
        self.counters.damaged += 1
        if (more := self._broken.due()) is not None:
            log.error("tier %s: a block is damaged: %s%s", self.name, name.hex(), more)
        self._jobs.add(Delete(kind, [name], lambda right: None))

    def _batches(self, kind: KvFormat, count: int) -> Iterator[slice]:
        step = max(1, self._options.batch_bytes // kind.block_bytes)
        for at in range(0, count, step):
            yield slice(at, min(count, at + step))
