"""What other routers expect of instances, counted here like this one's own expectations.

A chain lies in the index under its instance until the other router says that it is over, falls silent, leaves or
restarts, until the instance restarts or leaves, or ``LIFETIME_S`` have passed. What an entry says of an instance that
is not known here, or only as another process, is passed over; a full entry may say it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.hashing import HashChain
from baton.types import Epoch
from baton_router.indexer.event_applier import EventApplier
from baton_router.indexer.prefix_index import PendingChain
from baton_router.registry.instance import epochs_by_applier
from baton_router.registry.registry import Registry
from baton_router.replication.wire import LIFETIME_S, MAX_BYTES, MAX_CHAINS, Entry


@dataclass(slots=True, eq=False)
class _Taken:
    """One chain; without ``expectation`` its time is up, and it isn't counted again."""

    expectation: PendingChain | None
    events: EventApplier
    epoch: Epoch
    size: int
    until: float

    def end(self) -> None:
        if self.expectation is not None:
            self.expectation.release()
            self.expectation = None


@dataclass(slots=True, eq=False)
class _Book:
    """The chains of one replica's process, by their numbers, the oldest first."""

    epoch: str
    taken: dict[int, _Taken] = field(default_factory=dict)
    size: int = 0

    def forget(self, number: int) -> None:
        item = self.taken.pop(number, None)
        if item is not None:
            item.end()
            self.size -= item.size


class RemotePending:
    """The books of all other replicas.

    Args:
        registry: Has the index and the instances.
        now: Monotonic clock.
    """

    def __init__(self, registry: Registry, now: Callable[[], float]) -> None:
        self._registry, self._index, self._now = registry, registry.index, now
        self._books: dict[str, _Book] = {}

    def __len__(self) -> int:
        """Chains that count."""
        return sum(map(self.count, self._books))

    def count(self, replica: str) -> int:
        """Return how many chains of a replica count."""
        book = self._books.get(replica)
        return 0 if book is None else sum(x.expectation is not None for x in book.taken.values())

    def take(self, entry: Entry) -> None:
        """Follow an entry; it must be newer than the last one of its replica."""
        book = self._books.get(entry.replica)
        if book is not None and (entry.left or book.epoch != entry.epoch):
            self.drop(entry.replica)
            book = None
        if entry.left:
            return
        if book is not None:
            ended = book.taken.keys() - set(entry.expected.live) if entry.full else entry.expected.over
            for number in ended:
                book.forget(number)
        if entry.expected.new:
            self._add(entry, book or self._books.setdefault(entry.replica, _Book(entry.epoch)))

    def drop(self, replica: str) -> None:
        """Forget what a replica expects."""
        book = self._books.pop(replica, None)
        if book is not None:
            for item in book.taken.values():
                item.end()

    def clear(self) -> None:
        """Forget what anybody else expects."""
        for replica in list(self._books):
            self.drop(replica)

    def tick(self) -> None:
        """Forget what lasted too long, and what instances were to hold that restarted or left."""
        now = self._now()
        epochs = epochs_by_applier(self._registry.instances())
        for book in self._books.values():
            for number, item in list(book.taken.items()):
                if epochs.get(item.events) != item.epoch:
                    book.forget(number)
                elif item.until <= now:
                    item.end()

    def _add(self, entry: Entry, book: _Book) -> None:
        appliers = {(x.instance_id, x.info.epoch): x.events for x in self._registry.instances() if x.info is not None}
        until = self._now() + LIFETIME_S
        for told in sorted(entry.expected.new, key=lambda x: x.number):
            events, size = appliers.get((told.instance, told.epoch)), len(told.chain)
            if events is None or told.number in book.taken:
                continue
            if len(book.taken) >= MAX_CHAINS or book.size + size > MAX_BYTES:
                break
            expectation = self._index.add_pending(events.slot, HashChain(told.chain))
            if expectation is not None:
                book.taken[told.number] = _Taken(expectation, events, told.epoch, size, until)
                book.size += size
