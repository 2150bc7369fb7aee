"""Holds KV, or offers of KV, until its consumer asks: matched by key or by tokens, not by order of arrival.

A pipe is a FIFO and requests are not: the consumer of the second message may ask first. Hence this buffer, bounded in
bytes and entries. It cannot deadlock: a query also finds entries that still wait for room, an insert that can never fit
is an error at once, and every wait has a deadline. Room is made by consumers, by ``withdraw`` and, when an insert needs
it, by dropping entries whose lease ended before they were consumed; as every lease ends, so does every wait for room.

Life of an entry: *pending* while its inserter waits for room -> *stored* -> gone: consumed, withdrawn or dropped. A
query that waits is woken by every entry that matches it and looks again; the first to look gets the entry, so a
consumer that was cancelled meanwhile takes nothing with it.

One lock, held for dictionary operations only. Thread safe; waits are coroutines, of any event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PipeClosedError,
    QueueFullError,
)
from baton.hashing import as_token_array
from baton.types import RequestId

Tokens = npt.NDArray[np.uint32]
_DIGEST_BYTES = 16


class Indexed(Protocol):
    """An entry: its number, and the region ``[start, stop)`` of ``tokens`` that it holds."""

    seq: int
    start: int
    stop: int
    tokens: Tokens


E = TypeVar("E", bound=Indexed)


class TokenIndex(Generic[E]):
    """Entries by a digest of all tokens up to their end.

    A look-up digests the query's tokens once, stopping at each length that some entry has: O(tokens + lengths),
    whatever the number of entries.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, bytes], dict[int, E]] = {}
        self._digests: dict[int, bytes] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, entry: E) -> None:
        """Add an entry to the index."""
        digest = next(_prefix_digests(entry.tokens, [entry.stop]))
        self._digests[entry.seq] = digest
        self._entries.setdefault((entry.stop, digest), {})[entry.seq] = entry
        self._lengths[entry.stop] += 1

    def discard(self, entry: E) -> None:
        """Remove an entry, if it is there."""
        digest = self._digests.pop(entry.seq, None)
        if digest is None:
            return
        entries = self._entries[entry.stop, digest]
        del entries[entry.seq]
        if not entries:
            del self._entries[entry.stop, digest]
        self._lengths[entry.stop] -= 1
        if not self._lengths[entry.stop]:
            del self._lengths[entry.stop]

    def find(self, tokens: Tokens, start: int) -> Iterator[E]:
        """Yield entries that hold token ``start`` and whose tokens are a prefix of the query's.

        Those that reach furthest come first, equal ones in order of arrival.
        """
        lengths = sorted(n for n in self._lengths if start < n <= len(tokens))
        digests = _prefix_digests(tokens, lengths)
        for length, digest in reversed(list(zip(lengths, digests, strict=True))):
            for entry in self._entries.get((length, digest), {}).values():
                if matches(entry, tokens, start):
                    yield entry


def matches(entry: Indexed, tokens: Tokens, start: int) -> bool:
    """Return whether an entry holds token ``start`` and depends on nothing but a prefix of ``tokens``."""
    if not entry.start <= start < entry.stop <= len(tokens):
        return False
    return bool(np.array_equal(tokens[: entry.stop], entry.tokens[: entry.stop]))


def _prefix_digests(tokens: Tokens, lengths: list[int]) -> Iterator[bytes]:
    """Yield the digests of ``tokens[:n]`` for each of some ascending lengths, in one pass over the tokens."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    data = np.ascontiguousarray(tokens).data
    at = 0
    for length in lengths:
        state.update(data[at:length])
        at = length
        yield state.copy().digest()


def region(roi: slice | None, num_tokens: int) -> tuple[int, int]:
    """Read a region of interest: (start, stop) within the tokens; ``None``: all of them.

    Raises:
        InvalidRequestError: It has a step, or lies outside.
    """
    if roi is None:
        return 0, num_tokens
    start = 0 if roi.start is None else roi.start
    stop = num_tokens if roi.stop is None else roi.stop
    if roi.step not in (None, 1) or not 0 <= start <= stop <= num_tokens:
        raise InvalidRequestError(f"roi {roi} does not lie within {num_tokens} tokens", field="roi")
    return start, stop


def token_array(tokens: npt.ArrayLike) -> Tokens:
    """Return tokens as uint32 [n], without a copy where they are.

    Raises:
        InvalidRequestError: They are not a list of token ids.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError("tokens must be a list of token ids", field="tokens")
    if array.dtype != np.uint32 and array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 32):
        raise InvalidRequestError("a token id is not in [0, 2^32)", field="tokens")
    return as_token_array(array)


log = logging.getLogger(__name__)
V = TypeVar("V")
Wake = Callable[[], object]
"""Wakes a waiting call; must not block. ``RuntimeError``: its event loop is closed."""
_MAX_GONE = 64
"""Leases of entries that are gone, beyond as many as there are entries, before they are thrown away."""


@dataclass(eq=False, slots=True)
class _Entry(Generic[V]):
    """What was inserted. ``wake`` is set while its inserter waits; ``error`` says why it ended without being stored."""

    key: RequestId
    tokens: Tokens
    start: int
    stop: int
    value: V
    nbytes: int
    lease_s: float
    seq: int = -1
    gone: bool = False
    wake: Wake | None = None
    error: BatonError | None = None


@dataclass(eq=False, slots=True)
class _Query(Generic[V]):
    """What a consumer wants: by key, or else by tokens. ``start`` of ``None``: any token."""

    key: RequestId | None
    tokens: Tokens
    start: int | None
    consume: bool
    wake: Wake
    seen: tuple[V, ...] = ()
    """Of a query that does not consume: what matched, which another may have consumed by now."""
    error: BatonError | None = None

    def matches(self, entry: _Entry[V]) -> bool:
        if self.key is None:
            return matches(entry, self.tokens, self.start or 0)
        return self.key == entry.key and (self.start is None or entry.start <= self.start < entry.stop)


class LookupBuffer(Generic[V]):
    """A bounded buffer in which producers put entries and consumers wait for the entry that matches.

    An entry holds the KV of ``tokens[roi]``, which depends on all of ``tokens[:roi.stop]``. A query names either a key,
    or the tokens of a consumer; then an entry matches if everything up to its end is what the consumer has, too.

    Args:
        max_bytes: Largest sum of the stored entries' ``nbytes``, at least 1.
        max_entries: Largest number of stored entries, at least 1.
        max_waiting: Largest number of waiting inserts, and of waiting queries, at least 1.
        on_drop: Called with (key, value) of entries that no consumer can get any more: those dropped after their
            lease, and those left at ``close``. Called without a lock.
        clock: Returns seconds, as ``time.monotonic``; deadlines and leases are in its time.

    Attributes:
        num_bytes: Bytes of the stored entries.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_entries: int = 65_536,
        max_waiting: int = 65_536,
        on_drop: Callable[[RequestId, V], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_entries", max_entries), ("max_waiting", max_waiting)):
            if value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}", field=name)
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._max_waiting = max_waiting
        self._on_drop = on_drop
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self.num_bytes = 0
        self._seq = itertools.count()
        self._stored: dict[int, _Entry[V]] = {}
        self._pending: dict[int, _Entry[V]] = {}
        self._by_key: dict[RequestId, dict[int, _Entry[V]]] = {}
        self._by_tokens: TokenIndex[_Entry[V]] = TokenIndex()
        self._leases: list[tuple[float, int, _Entry[V]]] = []  # a heap; entries that are gone are skipped
        self._queries: dict[_Query[V], None] = {}
        self._dropped: list[_Entry[V]] = []

    @property
    def num_waiting(self) -> int:
        """Calls that wait: queries, and inserts for room."""
        return len(self._queries) + len(self._pending)

    def __len__(self) -> int:
        """Return the number of stored entries."""
        return len(self._stored)

    def insert(
        self,
        key: RequestId,
        tokens: npt.ArrayLike | None,
        roi: slice | None,
        value: V,
        nbytes: int,
        *,
        lease_s: float,
    ) -> None:
        """Add an entry without waiting for room.

        Args:
            key: Request of the entry. Entries of the same key are consumed in the order of their insertion.
            tokens: Token ids from the start of the sequence; must not change afterwards. ``None``: the entry is found
                by its key alone.
            roi: Range of tokens whose KV the entry holds; ``None``: all.
            value: Value for the consumer.
            nbytes: Size of the value in bytes, counted towards the bound.
            lease_s: Seconds after which the stored entry may be dropped.

        Raises:
            InvalidRequestError: The entry can never fit, or ``tokens`` or ``roi`` are invalid.
            QueueFullError: There is no room for the entry now.
            PipeClosedError: The buffer is closed.
        """
        entry = self._entry(key, tokens, roi, value, nbytes, lease_s)
        with self._locked():
            self._add(entry)
            if entry.seq in self._pending:
                self._remove(entry)
                raise QueueFullError("the lookup buffer is full", retry_after_s=1.0)

    async def insert_when_room(
        self,
        key: RequestId,
        tokens: npt.ArrayLike | None,
        roi: slice | None,
        value: V,
        nbytes: int,
        *,
        lease_s: float,
        deadline: float,
    ) -> None:
        """Add an entry, waiting for room. A consumer may get the entry while it still waits.

        If the task is cancelled after the entry was stored, the entry stays in the buffer. Arguments are those of
        :meth:`insert`; ``deadline`` is the time limit, in seconds of the buffer's clock.

        Raises:
            QueueFullError: ``max_waiting`` inserts wait already.
            DeadlineError: ``deadline`` passed; the entry is not in the buffer.
            CancelledError: The key was withdrawn.
        """
        entry = self._entry(key, tokens, roi, value, nbytes, lease_s)
        event = asyncio.Event()
        with self._locked():
            self._add(entry)
            if entry.seq not in self._pending:
                return
            if len(self._pending) > self._max_waiting:
                self._remove(entry)
                raise QueueFullError("too many inserts wait for room", retry_after_s=1.0)
            entry.wake = _waker(event)
        try:
            while True:
                await self._wait(event, deadline, for_lease=True)
                with self._locked():
                    self._admit()
                    if entry.seq not in self._pending:
                        break
                    if self._clock() >= deadline:
                        raise DeadlineError("deadline passed while waiting for room in the lookup buffer")
        finally:
            with self._locked():
                if entry.seq in self._pending:
                    self._remove(entry)
                    self._admit()
        if entry.error is not None:
            raise entry.error

    async def drop_select(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None = None, *, deadline: float
    ) -> V:
        """Wait for an entry and remove it, so that no other consumer gets it.

        Args:
            tokens_or_key: A key, or the consumer's token ids. Of the entries that match token ids, the one that reaches
                furthest is returned.
            roi: Range of the tokens that the consumer needs; the entry holds the first token of it. Default: from
                token 0 on for token ids, any range for a key.
            deadline: Time limit, in seconds of the buffer's clock.

        Raises:
            NotFoundError: The key was withdrawn during the wait.
            QueueFullError: ``max_waiting`` queries wait already.
            DeadlineError: ``deadline`` passed.
            PipeClosedError: The buffer is closed.
        """
        return await self._select(tokens_or_key, roi, consume=True, deadline=deadline)

    async def select(self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None = None, *, deadline: float) -> V:
        """Return what :meth:`drop_select` returns, but leave the entry in the buffer for other consumers."""
        return await self._select(tokens_or_key, roi, consume=False, deadline=deadline)

    def withdraw(self, key: RequestId) -> list[V]:
        """Remove all entries of a key and return their values; calls that wait for the key or to insert it end."""
        with self._locked():
            entries = list(self._by_key.get(key, {}).values())
            for entry in entries:
                self._remove(entry, CancelledError(f"{key} was withdrawn"))
            for query in [query for query in self._queries if query.key == key]:
                query.error = NotFoundError(f"{key} was withdrawn")
                self._notify(query)
            self._admit()
        return [entry.value for entry in entries]

    def drop_expired(self) -> None:
        """Drop all entries whose lease has ended."""
        with self._locked():
            while (until := self._next_lease_end()) is not None and until <= self._clock():
                self._drop(self._leases[0][2])
            self._admit()

    def close(self) -> None:
        """End all waits and drop all entries; harmless if repeated."""
        error = PipeClosedError("the lookup buffer was closed")
        with self._locked():
            self._closed = True
            for entry in [*self._stored.values(), *self._pending.values()]:
                self._drop(entry, error)
            for query in list(self._queries):
                query.error = error
                self._notify(query)

    def check_integrity(self) -> None:
        """Check the counters against the entries (for tests).

        Raises:
            AssertionError: They do not agree.
        """
        with self._lock:
            entries = [entry for group in self._by_key.values() for entry in group.values()]
            if self.num_bytes != sum(entry.nbytes for entry in self._stored.values()):
                raise AssertionError(f"{self.num_bytes} bytes are not those of {len(self._stored)} entries")
            if self.num_bytes > self._max_bytes or len(self._stored) > self._max_entries:
                raise AssertionError("the buffer is over its bounds")
            if any(e.gone or (e.seq in self._stored) == (e.seq in self._pending) for e in entries):
                raise AssertionError("an entry is neither stored nor pending")
            if len(entries) != len(self._stored) + len(self._pending):
                raise AssertionError("an entry has no key")

    def _entry(
        self, key: RequestId, tokens: npt.ArrayLike | None, roi: slice | None, value: V, nbytes: int, lease_s: float
    ) -> _Entry[V]:
        array = token_array(() if tokens is None else tokens)
        start, stop = region(roi, len(array))
        if not 0 <= nbytes <= self._max_bytes:
            message = f"an entry of {nbytes} bytes can never fit into {self._max_bytes}"
            raise InvalidRequestError(message, field="nbytes")
        return _Entry(key, array, start, stop, value, nbytes, lease_s)

    def _query(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None, consume: bool, event: asyncio.Event
    ) -> _Query[V]:
        if isinstance(tokens_or_key, str):
            start = None if roi is None else roi.start or 0
            return _Query(RequestId(tokens_or_key), token_array(()), start, consume, _waker(event))
        tokens = token_array(tokens_or_key)
        return _Query(None, tokens, region(roi, len(tokens))[0], consume, _waker(event))

    async def _select(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None, *, consume: bool, deadline: float
    ) -> V:
        event = asyncio.Event()
        query = self._query(tokens_or_key, roi, consume, event)
        try:
            while True:
                with self._locked():
                    if query.error is not None:
                        raise query.error
                    if query.seen:
                        return query.seen[0]
                    self._require_open()
                    entry = self._find(query)
                    if entry is not None:
                        return self._consume(entry) if consume else entry.value
                    if self._clock() >= deadline:
                        raise DeadlineError("deadline passed while waiting in the lookup buffer")
                    if query not in self._queries:
                        if len(self._queries) >= self._max_waiting:
                            raise QueueFullError(f"{self._max_waiting} queries wait already", retry_after_s=1.0)
                        self._queries[query] = None
                await self._wait(event, deadline)
        finally:
            with self._lock:
                self._queries.pop(query, None)

    async def _wait(self, event: asyncio.Event, deadline: float, *, for_lease: bool = False) -> None:
        """Wait to be woken, for the deadline or, if wanted, for the end of a lease."""
        left = deadline - self._clock()
        if for_lease:
            with self._lock:
                lease_end = self._next_lease_end()
            if lease_end is not None:
                left = min(left, lease_end - self._clock())
        try:
            async with asyncio.timeout(max(0.0, left)):
                await event.wait()
        except TimeoutError:
            return
        event.clear()

    # With the lock held

    def _add(self, entry: _Entry[V]) -> None:
        """Take an entry; afterwards it is stored, or pending. Queries that match are woken."""
        self._require_open()
        entry.seq = next(self._seq)
        self._by_key.setdefault(entry.key, {})[entry.seq] = entry
        if entry.stop:
            self._by_tokens.add(entry)
        self._pending[entry.seq] = entry
        self._admit()
        for query in [query for query in self._queries if query.matches(entry)]:
            if not query.consume:
                query.seen = (entry.value,)
            self._notify(query)

    def _admit(self) -> None:
        """Store pending entries in order of arrival as far as there is room, dropping those past their lease."""
        for entry in list(self._pending.values()):
            if not self._make_room(entry.nbytes):
                return  # no other entry overtakes: a big one would wait for ever
            del self._pending[entry.seq]
            self._stored[entry.seq] = entry
            self.num_bytes += entry.nbytes
            heapq.heappush(self._leases, (self._clock() + entry.lease_s, entry.seq, entry))
            _wake_inserter(entry)

    def _make_room(self, nbytes: int) -> bool:
        """Drop entries past their lease until an entry fits; ``False``: it does not."""
        while self.num_bytes + nbytes > self._max_bytes or len(self._stored) >= self._max_entries:
            until = self._next_lease_end()
            if until is None or until > self._clock():
                return False
            self._drop(self._leases[0][2])
        return True

    def _next_lease_end(self) -> float | None:
        while self._leases and self._leases[0][2].gone:
            heapq.heappop(self._leases)
        return self._leases[0][0] if self._leases else None

    def _find(self, query: _Query[V]) -> _Entry[V] | None:
        if query.key is None:
            return next(self._by_tokens.find(query.tokens, query.start or 0), None)
        return next((entry for entry in self._by_key.get(query.key, {}).values() if query.matches(entry)), None)

    def _consume(self, entry: _Entry[V]) -> V:
        self._remove(entry)
        self._admit()
        return entry.value

    def _drop(self, entry: _Entry[V], error: BatonError | None = None) -> None:
        self._remove(entry, error)
        self._dropped.append(entry)

    def _remove(self, entry: _Entry[V], error: BatonError | None = None) -> None:
        """Take an entry out; ``error`` is for its inserter, if that waits."""
        entry.gone = True
        if self._pending.pop(entry.seq, None) is None:
            del self._stored[entry.seq]
            self.num_bytes -= entry.nbytes
        group = self._by_key[entry.key]
        del group[entry.seq]
        if not group:
            del self._by_key[entry.key]
        self._by_tokens.discard(entry)
        if len(self._leases) > 2 * len(self._stored) + _MAX_GONE:
            self._leases = [lease for lease in self._leases if not lease[2].gone]
            heapq.heapify(self._leases)
        entry.error = error
        _wake_inserter(entry)

    def _notify(self, query: _Query[V]) -> None:
        try:
            query.wake()
        except RuntimeError:
            log.warning("a consumer's event loop was closed while it waited")
            del self._queries[query]

    def _require_open(self) -> None:
        if self._closed:
            raise PipeClosedError("the lookup buffer was closed")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, then report dropped entries to ``on_drop``."""
        dropped: list[_Entry[V]] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    dropped = self._dropped
                    self._dropped = []
        finally:
            for entry in dropped:
                log.info("dropped an entry of %s that was not consumed", entry.key)
                if self._on_drop is not None:
                    self._on_drop(entry.key, entry.value)


def _waker(event: asyncio.Event) -> Wake:
    loop = asyncio.get_running_loop()
    return lambda: loop.call_soon_threadsafe(event.set)


def _wake_inserter(entry: _Entry[V]) -> None:
    wake = entry.wake
    entry.wake = None
    if wake is None:
        return
    try:
        wake()
    except RuntimeError:
        log.warning("an inserter's event loop was closed while it waited")
