"""What an instance that tells nothing probably holds: the prompts that this router sent there.

An approximation, and treated as one: it ends after a time, and the prompts sent longest ago go first when they would
not fit into the instance's memory any more. A prompt that is sent again is young again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.types import BlockHash
from baton_router.indexer.prefix_index import PendingChain, PrefixIndex


class ApproxIndex:
    """The latest prompts of one instance, kept in the index as expected.

    Args:
        index: The index.
        now: Monotonic clock, in seconds.
        ttl_s: How long a prompt counts.

    Attributes:
        capacity: Blocks of the instance; 0: unknown, no limit.
    """

    def __init__(self, index: PrefixIndex, *, now: Callable[[], float], ttl_s: float) -> None:
        self._index = index
        self._now = now
        self._ttl_s = ttl_s
        self._kept: deque[tuple[float, PendingChain]] = deque()
        self.capacity = 0

    def __len__(self) -> int:
        return len(self._kept)

    def remember(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        """Count a chain as held from now on."""
        pending = self._index.add_pending(slot, hashes) if self._ttl_s > 0 else None
        if pending is None:
            return
        self._kept.append((self._now() + self._ttl_s, pending))
        self.expire()
        while self.capacity and len(self._kept) > 1 and self._index.num_pending(slot) > self.capacity:
            self._drop_oldest()

    def expire(self) -> None:
        """Let go of prompts whose time is up."""
        while self._kept and self._kept[0][0] <= self._now():
            self._drop_oldest()

    def clear(self) -> None:
        """Let go of all."""
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._kept.popleft()[1].release()
