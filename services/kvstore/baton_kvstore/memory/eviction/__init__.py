"""Which block goes next: one small protocol, a file per policy; ``EVICTION_POLICIES`` in ``config.py`` names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from baton.config.kvstore import EVICTION_POLICIES
from baton.plugins import import_object
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
