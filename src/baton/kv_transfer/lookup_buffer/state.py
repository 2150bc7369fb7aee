"""The lookup buffer's bookkeeping: who holds what, who waits for what. No lock, no waiting: its owner does both.

Life of an entry: *pending* while its inserter waits for room -> *stored* -> *claimed* by a waiting consumer -> gone.
A query sees pending entries too, so a full buffer can never keep a consumer from the entry it waits for. An entry
claimed for a waiting consumer stays accounted until the consumer has it in hand; one that left gives it back.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.errors import BatonError, CancelledError, NotFoundError, PipeClosedError, QueueFullError
from baton.kv_transfer.lookup_buffer.index import PrefixIndex, TokenQuery, Tokens
from baton.types import RequestId

log = logging.getLogger(__name__)
V = TypeVar("V")
Wake = Callable[[], object]
"""Wakes a waiting call; must not block. ``RuntimeError``: its event loop is closed, nobody is there any more."""


@dataclass(eq=False, slots=True)
class Entry(Generic[V]):
    """What was inserted. ``wake`` is there while its inserter waits, ``error`` says why it waited in vain."""

    key: RequestId
    tokens: Tokens
    start: int
    stop: int
    value: V
    nbytes: int
    lease_until: float
    seq: int = -1
    prefix_hash: int = 0
    stored: bool = False
    claimed: bool = False
    gone: bool = False
    wake: Wake | None = None
    error: BatonError | None = None


@dataclass(eq=False, slots=True)
class Waiter(Generic[V]):
    """A call that wants an entry, by key or by tokens; ``consume``: for itself alone."""

    key: RequestId | None
    start: int | None
    query: TokenQuery | None
    consume: bool
    wake: Wake
    seq: int = -1
    entry: Entry[V] | None = None
    error: BatonError | None = None

    @property
    def done(self) -> bool:
        """Whether the wait is over."""
        return self.entry is not None or self.error is not None

    def matches(self, entry: Entry[V]) -> bool:
        """Whether this is an entry it wants."""
        if self.query is not None:
            return self.query.matches(entry)
        return self.key == entry.key and (self.start is None or entry.start <= self.start < entry.stop)


@dataclass(eq=False)
class LookupState(Generic[V]):
    """Entries and waiters within bounds.

    Attributes:
        clock: Seconds, for leases.
        num_bytes: Sum of the stored entries' sizes.
        stored: Them, by number of arrival.
        dropped: Entries nobody will get, for the owner to tell whoever cares.
    """

    max_bytes: int
    max_entries: int
    max_waiting: int
    clock: Callable[[], float]
    num_bytes: int = 0
    closed: bool = False
    dropped: list[Entry[V]] = field(default_factory=list)
    stored: dict[int, Entry[V]] = field(default_factory=dict)
    pending: dict[int, Entry[V]] = field(default_factory=dict)
    waiters: dict[int, Waiter[V]] = field(default_factory=dict)
    _by_key: dict[RequestId, dict[int, Entry[V]]] = field(default_factory=dict)
    _index: PrefixIndex[Entry[V]] = field(default_factory=PrefixIndex)
    _leases: list[tuple[float, int, Entry[V]]] = field(default_factory=list)
    _key_waiters: dict[RequestId, dict[int, Waiter[V]]] = field(default_factory=dict)
    _token_waiters: dict[int, Waiter[V]] = field(default_factory=dict)
    _seq: itertools.count[int] = field(default_factory=itertools.count)

    def query(self, tokens: Tokens, start: int) -> TokenQuery:
        """Prepare a query by tokens."""
        return self._index.query(tokens, start)

    def insert(self, entry: Entry[V], wake: Wake | None) -> None:
        """Take an entry; afterwards it is gone (a waiting consumer has it), stored, or pending if ``wake`` is given.

        Raises:
            PipeClosedError: The buffer is closed.
            QueueFullError: No room, and nobody who would wait for it; or too many wait already.
        """
        self._check_open()
        entry.seq = next(self._seq)
        self._by_key.setdefault(entry.key, {})[entry.seq] = entry
        self._index.add(entry)
        self.pending[entry.seq] = entry
        self._offer(entry)
        if entry.claimed:
            if len(self.pending) == 1 and self._fits(entry.nbytes):
                self._store(entry)
            else:
                entry.wake = wake  # over the bounds until its consumer has it: the inserter holds it till then
            return
        self.admit()
        if entry.stored:
            return
        if wake is None or len(self.pending) > self.max_waiting:
            self._remove(entry)
            what = "the lookup buffer is full" if wake is None else "too many inserts wait for room"
            raise QueueFullError(what, retry_after_s=1.0)
        entry.wake = wake

    def ask(self, waiter: Waiter[V]) -> None:
        """Give a waiter its entry at once, or keep it until there is one.

        Raises:
            PipeClosedError: The buffer is closed.
            QueueFullError: Too many wait already.
        """
        self._check_open()
        entry = self._find(waiter)
        if entry is not None:
            waiter.entry = entry
            if waiter.consume:
                entry.claimed = True
            return
        if len(self.waiters) >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} queries wait already", retry_after_s=1.0)
        waiter.seq = next(self._seq)
        self.waiters[waiter.seq] = waiter
        if waiter.key is not None:
            self._key_waiters.setdefault(waiter.key, {})[waiter.seq] = waiter
        else:
            self._index.hash_fresh()
            self._token_waiters[waiter.seq] = waiter

    def collect(self, waiter: Waiter[V]) -> V:
        """End a wait that is done: the entry is its consumer's now, and its room is free.

        Raises:
            BatonError: Why there is none.
        """
        if waiter.entry is None:
            raise waiter.error or CancelledError("the wait was given up")
        if waiter.consume:
            self._remove(waiter.entry)
            self._release(waiter.entry)
            self.admit()
        return waiter.entry.value

    def leave(self, waiter: Waiter[V]) -> None:
        """End a wait without result; an entry claimed for it goes to the next who wants it."""
        self._forget(waiter)
        entry = waiter.entry
        if entry is None or not waiter.consume or not entry.claimed:
            return
        waiter.entry, entry.claimed = None, False
        if entry.gone:
            self._release(entry)
            self.dropped.append(entry)
            self._wake_inserter(entry, CancelledError(f"{entry.key} was withdrawn, or the buffer closed"))
            return
        if entry.stored:
            self._push_lease(entry)
        self._offer(entry)
        self.admit()
        if not entry.claimed and not entry.stored and entry.wake is None:
            # Its inserter was told that it is delivered, and there is no room to keep it.
            self._remove(entry)
            self.dropped.append(entry)

    def stop_insert(self, entry: Entry[V]) -> bool:
        """End a wait for room; ``True``: too late, the entry is stored, or in a consumer's hands."""
        entry.wake = None
        if entry.error is None and not entry.stored and not entry.claimed and not entry.gone:
            self._remove(entry)
            return False
        return entry.error is None

    def withdraw(self, key: RequestId) -> list[V]:
        """Remove a key's unclaimed entries and return their values; end the waits of its inserters and queries."""
        found = list(self._by_key.get(key, {}).values())
        for entry in found:
            self._remove(entry)
            if not entry.claimed:
                self._release(entry)
                self._wake_inserter(entry, CancelledError(f"{key} was withdrawn"))
        for waiter in list(self._key_waiters.get(key, {}).values()):
            self._end(waiter, None, NotFoundError(f"{key} was withdrawn"))
        self.admit()
        return [entry.value for entry in found if not entry.claimed]

    def close(self) -> None:
        """End everything."""
        self.closed = True
        error = PipeClosedError("the lookup buffer was closed")
        for entry in [entry for group in self._by_key.values() for entry in group.values()]:
            self._remove(entry)
            if not entry.claimed:
                self._release(entry)
                self.dropped.append(entry)
                self._wake_inserter(entry, error)
        for waiter in list(self.waiters.values()):
            self._end(waiter, None, error)

    def admit(self) -> None:
        """Store pending entries in order of arrival as far as there is room, dropping those past their lease."""
        for entry in list(self.pending.values()):
            if entry.claimed:
                continue  # on its way to a consumer
            if not self._make_room(entry.nbytes):
                return  # nobody overtakes: a big entry would wait for ever
            self._store(entry)
            self._wake_inserter(entry, None)

    def next_lease_end(self) -> float | None:
        """When the next entry may be dropped for room; ``None``: nothing is held."""
        self._skip_gone()
        return self._leases[0][0] if self._leases else None

    def check(self) -> None:
        """Check that the books agree (for tests).

        Raises:
            AssertionError: They don't.
        """
        entries = [entry for group in self._by_key.values() for entry in group.values()]
        if self.num_bytes != sum(entry.nbytes for entry in self.stored.values()):
            raise AssertionError(f"{self.num_bytes} bytes are not those of {len(self.stored)} entries")
        if self.num_bytes > self.max_bytes or len(self.stored) > self.max_entries:
            raise AssertionError("the buffer is over its bounds")
        if any(e.gone for e in entries) or any((e.seq in self.stored) == (e.seq in self.pending) for e in entries):
            raise AssertionError("an entry is neither stored nor pending")
        for waiter in self.waiters.values():
            if waiter.done or any(waiter.matches(e) and not e.claimed for e in entries):
                raise AssertionError("a query waits for what is there")

    def _find(self, waiter: Waiter[V]) -> Entry[V] | None:
        if waiter.query is not None:
            return next((entry for entry in self._index.find(waiter.query) if not entry.claimed), None)
        if waiter.key is None:
            return None
        entries = self._by_key.get(waiter.key, {}).values()
        return next((entry for entry in entries if not entry.claimed and waiter.matches(entry)), None)

    def _offer(self, entry: Entry[V]) -> None:
        """Show an entry to those who wait: to all who only look, then to the first consumer."""
        waiting = list(self._key_waiters.get(entry.key, {}).values())
        if self._token_waiters:
            self._index.hash_fresh()
            waiting += self._token_waiters.values()
            waiting.sort(key=lambda waiter: waiter.seq)
        for waiter in sorted(waiting, key=lambda waiter: waiter.consume):
            if not waiter.matches(entry):
                continue
            if self._end(waiter, entry, None) and waiter.consume:
                entry.claimed = True
                return

    def _end(self, waiter: Waiter[V], entry: Entry[V] | None, error: BatonError | None) -> bool:
        """End a wait; ``False``: there was nobody any more."""
        self._forget(waiter)
        try:
            waiter.wake()
        except RuntimeError:
            log.warning("a consumer's event loop was closed while it waited")
            return False
        waiter.entry, waiter.error = entry, error
        return True

    def _forget(self, waiter: Waiter[V]) -> None:
        if self.waiters.pop(waiter.seq, None) is None:
            return
        self._token_waiters.pop(waiter.seq, None)
        if waiter.key is not None:
            group = self._key_waiters[waiter.key]
            del group[waiter.seq]
            if not group:
                del self._key_waiters[waiter.key]

    def _remove(self, entry: Entry[V]) -> None:
        """Take an entry out of the indices; its room is freed by ``_release``."""
        if entry.gone:
            return
        entry.gone = True
        self.pending.pop(entry.seq, None)
        group = self._by_key[entry.key]
        del group[entry.seq]
        if not group:
            del self._by_key[entry.key]
        self._index.remove(entry)

    def _release(self, entry: Entry[V]) -> None:
        if self.stored.pop(entry.seq, None) is not None:
            entry.stored = False
            self.num_bytes -= entry.nbytes
        if entry.claimed:
            self._wake_inserter(entry, None)

    def _wake_inserter(self, entry: Entry[V], error: BatonError | None) -> None:
        wake, entry.wake, entry.error = entry.wake, None, error
        if wake is None:
            return
        try:
            wake()
        except RuntimeError:
            log.warning("an inserter's event loop was closed while it waited")

    def _make_room(self, nbytes: int) -> bool:
        """Drop entries past their lease until an entry fits; ``False``: it does not."""
        now = self.clock()
        while not self._fits(nbytes):
            self._skip_gone()
            if not self._leases or self._leases[0][0] > now:
                return False
            entry = heapq.heappop(self._leases)[2]
            self._remove(entry)
            self._release(entry)
            self.dropped.append(entry)
        return True

    def _fits(self, nbytes: int) -> bool:
        return self.num_bytes + nbytes <= self.max_bytes and len(self.stored) < self.max_entries

    def _store(self, entry: Entry[V]) -> None:
        del self.pending[entry.seq]
        entry.stored = True
        self.stored[entry.seq] = entry
        self.num_bytes += entry.nbytes
        self._push_lease(entry)

    def _push_lease(self, entry: Entry[V]) -> None:
        heapq.heappush(self._leases, (entry.lease_until, next(self._seq), entry))

    def _skip_gone(self) -> None:
        """Forget the leases of entries that are gone or claimed; a claimed one that comes back is pushed again."""
        while self._leases and (self._leases[0][2].claimed or not self._leases[0][2].stored):
            heapq.heappop(self._leases)

    def _check_open(self) -> None:
        if self.closed:
            raise PipeClosedError("the lookup buffer was closed")
