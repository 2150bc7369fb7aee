"""S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main queue for what was used again, and ghosts.

Two of its numbers differ from the paper's: the small queue has 60 % of the bytes instead of 10 %, and one use in it is
enough for the main queue, not two. A prompt's blocks come back minutes later, with the conversation's next turn, not at
once as hot objects do: of the paper's small queue they would be gone by then. docs/benchmarks.md has both on a trace.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from baton.types import BlockHash
from baton_kvstore.memory.eviction import Eviction, insert_by_age, is_in_order
from baton_kvstore.memory.pool import Entry

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
    """Newcomers wait in the small queue; who is used there goes on to the main one, others leave and are remembered.

    A use moves nothing: it only counts, so an entry keeps its place while it is pinned. An entry that is pinned when
    its turn to go comes is set aside, and joins the main queue with its last unpin. A block that was evicted from the
    small queue and comes back while its name is remembered begins in the main queue.

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
