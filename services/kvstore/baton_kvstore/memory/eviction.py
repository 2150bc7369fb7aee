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
"""The names that ``--eviction`` takes."""


def make_policy(name: str, *, behind: bool) -> Eviction:
    """Make one of :data:`POLICIES`; ``behind``: there is a tier behind, which blocks must reach first."""
    policy: Eviction = import_object(EVICTION_POLICIES[name])(behind=behind)
    return policy


class Eviction(ABC):
    """The order in which unpinned blocks would be evicted. Every call takes constant time.

    The store tells of every pin and of the last unpin. An entry is evictable from its last unpin on until it is
    pinned, discarded or popped. A chain is unpinned from its end to its head: of blocks that are otherwise alike the
    tail, worthless without the head, is evicted first.

    With a tier behind, only saved entries are evicted; :attr:`unsaved` says what should be saved next.

    Attributes:
        saved_bytes: Of evictable entries that are saved.
    """

    saved_bytes: int

    @abstractmethod
    def __len__(self) -> int:
        """Evictable entries."""

    @abstractmethod
    def __iter__(self) -> Iterator[Entry]:
        """Evictable entries, in no promised order."""

    @abstractmethod
    def __contains__(self, entry: Entry) -> bool:
        """Whether an entry is evictable."""

    @property
    @abstractmethod
    def unsaved(self) -> Collection[Entry]:
        """Evictable entries that would be lost if they were evicted; the one to be saved next comes first."""

    @property
    @abstractmethod
    def in_order(self) -> bool:
        """Whether what would be evicted next is what the policy wants gone, not just what is saved."""

    def pin(self, entry: Entry) -> None:
        """An entry is needed: it is not evictable any more, if it was. A policy may keep its place."""
        self.discard(entry)

    @abstractmethod
    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Take note that an entry is evictable; ``used``: it was read or written."""

    @abstractmethod
    def touch(self, entry: Entry) -> None:
        """Note that an entry was used that others still need."""

    @abstractmethod
    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        """Ask of the next entries to be evicted whether the tier behind still has them; those it lost are unsaved."""

    @abstractmethod
    def discard(self, entry: Entry) -> None:
        """Forget an entry, if it is known: it is deleted."""

    @abstractmethod
    def pop(self) -> Entry | None:
        """Take out what is to be evicted next; ``None``: nothing may be."""


def insert_by_age(queue: OrderedDict[Entry, None], entry: Entry) -> None:
    """Put an entry at a queue's end, or at its beginning if it is older than what is there."""
    first = next(iter(queue), None)
    queue[entry] = None
    if first is not None and entry.stamp < first.stamp:
        queue.move_to_end(entry, last=False)


def is_in_order(saved: OrderedDict[Entry, None], unsaved: OrderedDict[Entry, None]) -> bool:
    """Whether the oldest saved entry is older than every unsaved one."""
    first, waiting = next(iter(saved), None), next(iter(unsaved), None)
    return waiting is None or (first is not None and first.stamp <= waiting.stamp)


class Lru(Eviction):
    """Evictable entries, the one unused for longest first; those that the tier behind has are kept apart.

    An entry that was saved without having been used meanwhile keeps its age.

    Args:
        behind: Whether there is a tier behind.
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

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._saved or entry in self._unsaved

    @property
    def unsaved(self) -> Collection[Entry]:
        """Entries to be saved, the one unused for longest first."""
        return self._unsaved.keys()

    @property
    def in_order(self) -> bool:
        """Whether what would be evicted next is really what was unused for longest."""
        return is_in_order(self._saved, self._unsaved)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Make an entry evictable: the last one, or, if it was not used, at about its age."""
        if used:
            self.touch(entry)
        insert_by_age(self._saved if entry.saved else self._unsaved, entry)
        if entry.saved:
            self.saved_bytes += entry.pool.block_bytes

    def touch(self, entry: Entry) -> None:
        """Note that an entry was used."""
        self._now += 1
        entry.stamp = self._now

    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        """Ask of the next entries to be evicted whether the tier behind still has them; those it lost are unsaved."""
        lost = [entry for entry in itertools.islice(self._saved, count) if not still(entry)]
        for entry in reversed(lost):
            self.discard(entry)
            entry.saved = False
            self.unpin(entry, used=False)

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is in."""
        if entry in self._saved:
            del self._saved[entry]
            self.saved_bytes -= entry.pool.block_bytes
        else:
            self._unsaved.pop(entry, None)

    def pop(self) -> Entry | None:
        """Take out what is to be evicted next; ``None``: nothing may be."""
        if self._saved:
            entry, _ = self._saved.popitem(last=False)
            self.saved_bytes -= entry.pool.block_bytes
            return entry
        if self._behind or not self._unsaved:
            return None
        return self._unsaved.popitem(last=False)[0]


SMALL_SHARE = 0.6
"""Share of the bytes above which newcomers go first."""
USES = 1
"""Uses in the small queue that lead to the main one."""
MAX_USES = 3
"""More are not counted; each of them is a round in the main queue."""


class _Queue:
    """Entries in the order in which they came, pinned ones included; those that the tier behind has are kept apart."""

    def __init__(self) -> None:
        self.saved: OrderedDict[Entry, None] = OrderedDict()
        self.unsaved: OrderedDict[Entry, None] = OrderedDict()
        self.num_bytes = 0

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        (self.saved if entry.saved else self.unsaved)[entry] = None
        self.num_bytes += entry.pool.block_bytes

    def remove(self, entry: Entry) -> None:
        """Take an entry out, wherever it is."""
        del (self.saved if entry in self.saved else self.unsaved)[entry]
        self.num_bytes -= entry.pool.block_bytes

    def sort_in(self, entry: Entry) -> None:
        """Put an entry on the side where it belongs now, at about its age."""
        side, other = (self.saved, self.unsaved) if entry.saved else (self.unsaved, self.saved)
        if entry in other:
            del other[entry]
            insert_by_age(side, entry)

    def victims(self, *, behind: bool) -> OrderedDict[Entry, None]:
        """Return those of which one could be evicted, if it is not pinned."""
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
        behind: Whether there is a tier behind.
        small_share: See ``SMALL_SHARE``.
        uses: See ``USES``.
    """

    def __init__(self, *, behind: bool = False, small_share: float = SMALL_SHARE, uses: int = USES) -> None:
        self._behind, self._small_share, self._uses = behind, small_share, uses
        self._small, self._main = _Queue(), _Queue()
        self._where: dict[Entry, _Queue] = {}
        self._aside: set[Entry] = set()
        self._ghosts: OrderedDict[tuple[bytes, BlockHash], None] = OrderedDict()
        self._waiting: OrderedDict[Entry, None] = OrderedDict()  # evictable, but to be saved before
        self._num_saved = 0
        self._now = 0
        self.saved_bytes = 0

    def __len__(self) -> int:
        return self._num_saved + len(self._waiting)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entry in self._where if not entry.pins)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._where and not entry.pins

    @property
    def unsaved(self) -> Collection[Entry]:
        """Entries to be saved, the one that waits for longest first."""
        return self._waiting.keys()

    @property
    def in_order(self) -> bool:
        """Whether what would be evicted next is really what should go."""
        queue = self._queues()[0]
        return is_in_order(queue.saved, queue.unsaved)

    def pin(self, entry: Entry) -> None:
        """Leave an entry where it is, but do not evict it."""
        if entry in self._where:
            self._count(entry, -1)

    def unpin(self, entry: Entry, *, used: bool) -> None:
        """Make an entry evictable at its old place; new ones come last."""
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
        """Note that an entry was used."""
        if entry in self._where:
            entry.uses = min(MAX_USES, entry.uses + 1)

    def recheck(self, count: int, still: Callable[[Entry], bool]) -> None:
        """Ask of the next entries to be evicted whether the tier behind still has them; those it lost are unsaved."""
        heads = [itertools.islice(queue.saved, count) for queue in self._queues()]
        lost = [entry for entry in itertools.chain(*heads) if not entry.pins and not still(entry)]
        for entry in reversed(lost):
            self._count(entry, -1)
            entry.saved = False
            self._where[entry].sort_in(entry)
            self._count(entry, +1)

    def discard(self, entry: Entry) -> None:
        """Forget an entry, if it is known."""
        self._aside.discard(entry)
        if entry in self._where:
            if not entry.pins:
                self._count(entry, -1)
            self._remove(entry)

    def pop(self) -> Entry | None:
        """Take out what is to be evicted next; ``None``: nothing may be."""
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
        """Return the queue whose turn it is to give something up, and the other one."""
        small, main = self._small, self._main
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
        """An entry becomes evictable (1), or is not any more (-1)."""
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
        """Keep the name of an evicted block; as many as there are blocks."""
        self._ghosts[entry.pool.key, entry.block_hash] = None
        while len(self._ghosts) > len(self._where) + 1:
            self._ghosts.popitem(last=False)
