"""Which cached blocks go first: the least recently used, but nobody pushes another tenant below its fair share.

Part of the pool (``share``) is divided equally among the tenants that have cached blocks and used them lately. A
tenant's blocks beyond its part compete with all others' by recency; those within it go only when there are no others.
So one tenant's new prompts evict its own blocks before they evict what little another one has. With one tenant, or a
share of 0, it is plain LRU.

Every tenant has an ``OrderedDict``, in C a linked list with a hash index: to take the oldest, to add the youngest and
to take one from the middle (a prefix hit) are each O(1) and about 0.1 us. Choosing whose oldest go is O(tenants)
once per allocation.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from baton.types import BlockId

IDLE_S = 600.0
"""A tenant that has used nothing for so long has no part of its own any more."""
_MAX_IDLE = 1024
"""Tenants from which on those without blocks are forgotten."""


class _Tenant:
    __slots__ = ("blocks", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockId, int] = OrderedDict()
        """Free cached blocks, the least recently used first, each with the number of the release that freed it."""
        self.used_at = 0.0


class EvictionQueue:
    """The free cached blocks of a pool.

    Args:
        num_blocks: Blocks in the pool.
        share: Part of the pool that is divided among tenants, 0 to 1.
        clock: Seconds, monotonic.
    """

    def __init__(self, num_blocks: int, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._room, self._clock = share, int(share * num_blocks), clock
        nobody = _Tenant()
        self._tenants = {"": nobody}
        self._of = [nobody] * num_blocks
        self._num = self._releases = 0
        self._most = _MAX_IDLE

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[BlockId]:
        return (block_id for tenant in self._tenants.values() for block_id in tenant.blocks)

    def own(self, block_id: BlockId, tenant: str) -> None:
        """Say whose a block is that is in use."""
        found = self._tenants.get(tenant if self._share else "")
        if found is None:
            if len(self._tenants) >= self._most:
                self._forget_idle()
            found = self._tenants[tenant] = _Tenant()
        self._of[block_id] = found

    def add(self, block_ids: Sequence[BlockId]) -> None:
        """Take blocks that are not in use any more, the one that goes first in front."""
        if not block_ids:
            return
        self._releases = now = self._releases + 1
        of = self._of
        for block_id in block_ids:
            of[block_id].blocks[block_id] = now
        of[block_ids[0]].used_at = self._clock()
        self._num += len(block_ids)

    def remove(self, block_id: BlockId) -> None:
        """Give back a block that is used again."""
        del self._of[block_id].blocks[block_id]
        self._num -= 1

    def pop(self, count: int) -> list[BlockId]:
        """Take out those that go first; there must be so many."""
        if len(self._tenants) == 1:
            popitem = self._tenants[""].blocks.popitem
            out = [popitem(last=False)[0] for _ in range(count)]
            self._num -= count
            return out
        out = []
        while len(out) < count:
            taken = self._pop_beyond_parts(count - len(out))
            self._num -= len(taken)
            out += taken
        return out

    def _pop_beyond_parts(self, count: int) -> list[BlockId]:
        """Take out the oldest of those that are beyond their tenants' parts: one at least, ``count`` at most."""
        lately = self._clock() - IDLE_S
        having = [tenant for tenant in self._tenants.values() if tenant.blocks]
        num_active = sum(tenant.used_at > lately for tenant in having)
        part = self._room // num_active if num_active > 1 else 0
        heap = []
        for at, tenant in enumerate(having):
            kept = part if tenant.used_at > lately else 0
            if len(tenant.blocks) > kept:
                heap.append((_oldest(tenant), at, kept))
        if not heap:  # none is beyond its part: who has most gives one, of several the one that was here last
            most = max(having, key=lambda tenant: (len(tenant.blocks), next(reversed(tenant.blocks.values()))))
            return [most.blocks.popitem(last=False)[0]]
        heapq.heapify(heap)
        out: list[BlockId] = []
        while heap and len(out) < count:
            _, at, kept = heap[0]
            blocks = having[at].blocks
            out.append(blocks.popitem(last=False)[0])
            if len(blocks) > kept:
                heapq.heapreplace(heap, (_oldest(having[at]), at, kept))
            else:
                heapq.heappop(heap)
        return out

    def clear(self) -> list[BlockId]:
        """Take out all."""
        everything = list(self)
        for tenant in self._tenants.values():
            tenant.blocks.clear()
        self._num = 0
        return everything

    def check_integrity(self) -> None:
        """Check that counts add up and every block lies with its tenant.

        Raises:
            AssertionError: They don't.
        """
        if self._num != sum(1 for _ in self):
            raise AssertionError("the free cached blocks are counted wrongly")
        for tenant in self._tenants.values():
            if any(self._of[block_id] is not tenant for block_id in tenant.blocks):
                raise AssertionError("a cached block lies with another tenant")

    def _forget_idle(self) -> None:
        """Forget tenants that have no blocks, cached or in use, so that names alone cannot fill the memory."""
        used = {id(tenant) for tenant in self._of}
        self._tenants = {name: each for name, each in self._tenants.items() if not name or id(each) in used}
        self._most = max(_MAX_IDLE, 2 * len(self._tenants))


def _oldest(tenant: _Tenant) -> int:
    return next(iter(tenant.blocks.values()))
