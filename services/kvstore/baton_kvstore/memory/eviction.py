"""Eviction policies: which block leaves memory next. ``EVICTION_POLICIES`` in ``baton.config.kvstore`` lists them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from baton.config.kvstore import EVICTION_POLICIES
from baton.plugins import import_object
from baton.types import BlockHash
from baton_kvstore.memory.pool import Entry

POLICIES = tuple(EVICTION_POLICIES)
"""Names that ``--eviction`` accepts."""


def make_policy(name: str, *, behind: bool) -> Eviction:
    """Create a policy of :data:`POLICIES`; with ``behind``, it evicts only blocks saved to a lower tier."""
    policy: Eviction = import_object(EVICTION_POLICIES[name])(behind=behind)
    return policy


class Eviction(ABC):
    """The order in which unpinned blocks would be evicted. Every call takes constant time.

    The store calls :meth:`pin` for an entry's first pin and :meth:`unpin` for its last unpin. An entry is evictable
    from its last unpin until it is pinned, discarded or popped. A chain is unpinned from its end to its head, so of
    otherwise equal blocks the tail, which is useless without the head, is evicted first.

    With a lower tier, only saved entries are evicted; :attr:`unsaved` lists what to save next.

    Attributes:
        saved_bytes: Total size of the evictable entries that are saved, in bytes.
    """

    saved_bytes: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of evictable entries."""

    @abstractmethod
    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the evictable entries, in no particular order."""

    @property
    @abstractmethod
    def unsaved(self) -> Collection[Entry]:
        """Evictable entries that no lower tier holds; the one to save next comes first."""

    @property
    @abstractmethod
    def in_order(self) -> bool:
        """Whether the next victim is the policy's first choice, not only the first that is saved."""

    def pin(self, entry: Entry) -> None:
        """Make an entry unevictable. A policy may keep its place in the order."""
        self.discard(entry)

    @abstractmethod
    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Make an entry evictable; ``used``: it was read or written."""

    @abstractmethod
    def touch(self, entry: Entry) -> None:
        """Record a use of an entry that stays pinned."""

    @abstractmethod
    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        """Check that the next victims are still in a lower tier; those that are not become unsaved.

        Args:
            count: Maximum number of entries to check.
            still: Returns whether a lower tier still holds an entry.
        """

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """Remove an entry that is deleted, if the policy knows it."""

    @abstractmethod
    def pop(self) -> Entry | None:
        """Remove and return the next victim, or ``None`` if no entry may be evicted."""


def insert_by_age(queue: OrderedDict[Entry, None], entry: Entry) -> None:
    """Append an entry to a queue, or prepend it if it is older than the first entry."""
    first = next(iter(queue), None)
    queue[entry] = None
    if first is not None and entry.stamp < first.stamp:
        queue.move_to_end(entry, last=False)


def is_in_order(saved: OrderedDict[Entry, None], unsaved: OrderedDict[Entry, None]) -> bool:
    """Whether the oldest saved entry is older than every unsaved one."""
    first_saved = next(iter(saved), None)
    first_unsaved = next(iter(unsaved), None)
    return first_unsaved is None or (first_saved is not None and first_saved.stamp <= first_unsaved.stamp)


class Lru(Eviction):
    """Least recently used first. Saved and unsaved entries are in separate queues.

    An entry that was saved but not used meanwhile keeps its age.

    Args:
        behind: Whether the store has a lower tier; then only saved entries are evicted.
    """

    def __init__(self, *, behind: bool = False) -> None:
        self._behind = behind
        self._saved: OrderedDict[Entry, None] = OrderedDict()
        self._unsaved: OrderedDict[Entry, None] = OrderedDict()
        self._now = 0
        self.saved_bytes = 0

    def __len__(self) -> int:
        return len(self._saved) + len(self._unsaved)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._saved
        yield from self._unsaved

    @property
    def unsaved(self) -> Collection[Entry]:
        return self._unsaved.keys()

    @property
    def in_order(self) -> bool:
        return is_in_order(self._saved, self._unsaved)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        if used:
            self.touch(entry)
        insert_by_age(self._saved if entry.saved else self._unsaved, entry)
        if entry.saved:
            self.saved_bytes += entry.pool.block_bytes

    def touch(self, entry: Entry) -> None:
        self._now += 1
        entry.stamp = self._now

    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        lost = [entry for entry in itertools.islice(self._saved, count) if not still(entry)]
        for entry in reversed(lost):
            self.discard(entry)
            entry.saved = False
            self.unpin(entry, used=False)

    def discard(self, entry: Entry) -> None:
        if entry in self._saved:
            del self._saved[entry]
            self.saved_bytes -= entry.pool.block_bytes
        else:
            self._unsaved.pop(entry, None)

    def pop(self) -> Entry | None:
        if self._saved:
            entry, _ = self._saved.popitem(last=False)
            self.saved_bytes -= entry.pool.block_bytes
            return entry
        if self._behind or not self._unsaved:
            return None
        return self._unsaved.popitem(last=False)[0]


SMALL_SHARE = 0.6
"""Share of the bytes in the small queue above which it loses entries first."""
USES = 1
"""Uses in the small queue that move an entry to the main one."""
MAX_USES = 3
"""Upper bound of an entry's use count; each counted use is one more round in the main queue."""


class _Queue:
    """Entries in order of arrival, pinned ones included; saved and unsaved entries are in separate queues."""

    def __init__(self) -> None:
        self.saved: OrderedDict[Entry, None] = OrderedDict()
        self.unsaved: OrderedDict[Entry, None] = OrderedDict()
        self.num_bytes = 0

    def add(self, entry: Entry) -> None:
        (self.saved if entry.saved else self.unsaved)[entry] = None
        self.num_bytes += entry.pool.block_bytes

    def remove(self, entry: Entry) -> None:
        del (self.saved if entry in self.saved else self.unsaved)[entry]
        self.num_bytes -= entry.pool.block_bytes

    def sort_in(self, entry: Entry) -> None:
        """Move an entry to the queue that matches its ``saved`` flag, at about its age."""
        side, other = (self.saved, self.unsaved) if entry.saved else (self.unsaved, self.saved)
        if entry in other:
            del other[entry]
            insert_by_age(side, entry)

    def victims(self, *, behind: bool) -> OrderedDict[Entry, None]:
        """Return the entries of which an unpinned one may be evicted."""
        return self.saved if self.saved or behind else self.unsaved


class S3Fifo(Eviction):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for new entries, a main queue for reused ones, and ghosts.

    A use moves no entry: it is only counted, so a pinned entry keeps its place. An entry that is pinned when it would
    be evicted is set aside and joins the main queue with its last unpin. The names of entries evicted from the small
    queue are remembered; a block that comes back while its name is remembered starts in the main queue.

    Two defaults differ from the paper's: the small queue has 60 % of the bytes instead of 10 %, and one use in it is
    enough for the main queue, not two. A prompt's blocks are used again minutes later, with the conversation's next
    turn; the paper's small queue would have evicted them by then. docs/benchmarks.md compares both on a trace.

    Args:
        behind: Whether the store has a lower tier; then only saved entries are evicted.
        small_share: See ``SMALL_SHARE``.
        uses: See ``USES``.
    """

    def __init__(self, *, behind: bool = False, small_share: float = SMALL_SHARE, uses: int = USES) -> None:
        self._behind = behind
        self._small_share = small_share
        self._uses = uses
        self._small = _Queue()
        self._main = _Queue()
        self._where: dict[Entry, _Queue] = {}
        self._aside: set[Entry] = set()
        self._ghosts: OrderedDict[tuple[bytes, BlockHash], None] = OrderedDict()
        self._waiting: OrderedDict[Entry, None] = OrderedDict()  # evictable, but not saved yet
        self._num_saved = 0
        self._now = 0
        self.saved_bytes = 0

    def __len__(self) -> int:
        return self._num_saved + len(self._waiting)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in self._where if not entry.pins)

    @property
    def unsaved(self) -> Collection[Entry]:
        return self._waiting.keys()

    @property
    def in_order(self) -> bool:
        queue = self._queues()[0]
        return is_in_order(queue.saved, queue.unsaved)

    def pin(self, entry: Entry) -> None:
        if entry in self._where:
            self._count(entry, -1)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        queue = self._where.get(entry)
        if queue is not None:
            entry.uses = min(MAX_USES, entry.uses + used)
            queue.sort_in(entry)
        elif entry in self._aside:
            self._aside.remove(entry)
            self._add(self._main, entry)
        else:
            known = (entry.pool.key, entry.block_hash) in self._ghosts
            self._ghosts.pop((entry.pool.key, entry.block_hash), None)
            entry.uses = 0
            self._add(self._main if known else self._small, entry)
        self._count(entry, +1)

    def touch(self, entry: Entry) -> None:
        if entry in self._where:
            entry.uses = min(MAX_USES, entry.uses + 1)

    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        heads = [itertools.islice(queue.saved, count) for queue in self._queues()]
        lost = [entry for entry in itertools.chain(*heads) if not entry.pins and not still(entry)]
        for entry in reversed(lost):
            self._count(entry, -1)
            entry.saved = False
            self._where[entry].sort_in(entry)
            self._count(entry, +1)

    def discard(self, entry: Entry) -> None:
        self._aside.discard(entry)
        if entry in self._where:
            if not entry.pins:
                self._count(entry, -1)
            self._remove(entry)

    def pop(self) -> Entry | None:
        while len(self) if not self._behind else self._num_saved:
            queue = next(queue for queue in self._queues() if queue.victims(behind=self._behind))
            entry = next(iter(queue.victims(behind=self._behind)))
            if entry.pins:
                self._remove(entry)
                self._aside.add(entry)
            elif queue is self._small and entry.uses >= self._uses:
                entry.uses = 0
                self._remove(entry)
                self._add(self._main, entry)
            elif queue is self._main and entry.uses:
                entry.uses -= 1
                self._remove(entry)
                self._add(self._main, entry)
            else:
                self._count(entry, -1)
                self._remove(entry)
                if queue is self._small:
                    self._remember(entry)
                return entry
        return None

    def _queues(self) -> tuple[_Queue, _Queue]:
        """Return the queue to evict from first, then the other one."""
        small = self._small
        main = self._main
        if small.num_bytes >= self._small_share * (small.num_bytes + main.num_bytes):
            return small, main
        return main, small

    def _add(self, queue: _Queue, entry: Entry) -> None:
        self._now += 1
        entry.stamp = self._now
        self._where[entry] = queue
        queue.add(entry)

    def _remove(self, entry: Entry) -> None:
        self._where.pop(entry).remove(entry)

    def _count(self, entry: Entry, by: int) -> None:
        """Count an entry that becomes evictable (``by=1``) or stops being evictable (``by=-1``)."""
        if entry in self._waiting:
            del self._waiting[entry]
        elif by < 0:
            self._num_saved -= 1
            self.saved_bytes -= entry.pool.block_bytes
        if by > 0 and entry.saved:
            self._num_saved += 1
            self.saved_bytes += entry.pool.block_bytes
        elif by > 0:
            insert_by_age(self._waiting, entry)

    def _remember(self, entry: Entry) -> None:
        """Remember the name of an evicted block; at most as many names as there are blocks."""
        self._ghosts[entry.pool.key, entry.block_hash] = None
        while len(self._ghosts) > len(self._where) + 1:
            self._ghosts.popitem(last=False)
