"""KV that an instance has, by the names of blocks: what runs holds it, what ran before may be forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.bench.core.traces import BLOCK_TOKENS

Changed = Callable[[Sequence[int], Sequence[int]], None]
"""Is told of names of blocks that came, and of those that went."""


class PrefixCache:
    """The pool of one instance, as far as it matters: tokens in use, and named blocks of 512 tokens that it keeps.

    Sequences that run share what has one name. What nobody uses stays, least recently used first to go, while there is
    room for it.

    Args:
        capacity: Tokens that the pool holds.
        changed: Is told of what came and went.

    Attributes:
        held: Tokens of sequences that run, what they share counted once.
    """

    def __init__(self, capacity: int, changed: Changed) -> None:
        self.capacity = capacity
        self.held = 0.0
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._changed = changed

    @property
    def free(self) -> float:
        """Tokens that sequences can still take."""
        return self.capacity - self.held

    def matched(self, names: Sequence[int]) -> int:
        """Return how many leading blocks are there."""
        kept = self._kept
        return next((at for at, name in enumerate(names) if name not in kept), len(names))

    def missing(self, names: Sequence[int]) -> int:
        """Return the tokens of those blocks that no sequence holds."""
        return BLOCK_TOKENS * sum(name not in self._users for name in names)

    def hold(self, names: Sequence[int]) -> None:
        """Hold blocks for a sequence."""
        users = self._users
        for name in names:
            count = users.get(name, 0)
            users[name] = count + 1
            if not count:
                self.held += BLOCK_TOKENS

    def release(self, names: Sequence[int]) -> None:
        """Give a sequence's blocks back."""
        users = self._users
        for name in names:
            if users[name] == 1:
                del users[name]
                self.held -= BLOCK_TOKENS
            else:
                users[name] -= 1

    def store(self, names: Sequence[int]) -> None:
        """Note that blocks were computed, or came; forget others if there are too many."""
        kept, new = self._kept, []
        for name in names:
            if name in kept:
                kept.move_to_end(name)
            else:
                kept[name] = None
                new.append(name)
        private = self.held - BLOCK_TOKENS * len(self._users)
        room = max(len(self._users), int((self.capacity - private) // BLOCK_TOKENS))
        gone = []
        while len(kept) > room:
            gone.append(kept.popitem(last=False)[0])
        if new or gone:
            self._changed(new, gone)
