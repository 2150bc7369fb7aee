"""Least recently used first."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from baton_kvstore.memory.eviction import Eviction, insert_by_age, is_in_order
from baton_kvstore.memory.pool import Entry


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
