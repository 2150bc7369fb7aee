"""Which free cached block of a KV pool is evicted next: the least recently used, with two exceptions.

**Tenants have a fair share.** Part of the pool (``share``) is divided equally among the tenants that have cached blocks
and used them lately. A tenant's blocks beyond its part compete with all others' by recency; those within it are evicted
only when there are no others. So a tenant's new prompts evict its own blocks before the few of another one.

**Sessions with long gaps go early.** A session (a conversation) comes back after some gap, which is learnt from its
earlier ones. If that is longer than the tenant's oldest block has been idle, LRU would drop the session before it is
back, so its blocks are evicted first, those at its end before those at its beginning, and their room keeps others. In
other words: the victim is what has the greatest max(idle time, usual gap). Blocks that several sessions used, such as a
system prompt, belong to none. All this happens only while such forecasts are right: in most of the last cases the
session came back so late that LRU would have dropped it. A session can therefore only lose blocks earlier than by
recency, never keep them longer. Without names of sessions this is LRU.

**Hints** of requests: a session's blocks are spared for a time (retention), up to an eighth of its tenant's equal part
of the pool; or the session ends, and its blocks go first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from baton.types import BlockId

IDLE_S = 600.0
"""Seconds without use after which a tenant has no part of its own."""
MAX_SESSIONS = 8192
"""Sessions whose gaps are remembered, divided among the tenants; more than that have blocks at most."""
_MAX_IDLE = 1024
"""Number of tenants from which on those without blocks are removed."""
_GAP_WEIGHT = 0.3
"""Weight of the last gap in a session's usual one."""
_TRUST_WEIGHT = 0.05
"""Weight of the last forecast in a tenant's trust."""
_TRUSTED = 0.5
"""Share of right forecasts from which on gaps count."""
_KEPT_SHARE = 0.125
"""Share of a tenant's equal part of the pool up to which hints keep blocks."""
_MIN_LIST = 64
"""Entries from which on a list is cleared of void ones."""
_TICK_S = 1e-6
"""Least time between two releases, so that times order them."""


class _Session:
    __slots__ = ("blocks", "gap_s", "kept_until", "listed_s", "num_kept", "retention_s", "turn_blocks", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockId, None] = OrderedDict()
        """Its free cached blocks, the least recently used first."""
        self.gap_s = 0.0
        """Usual time between its requests; 0: unknown."""
        self.retention_s = 0.0
        """For how long its blocks are to be spared after their release; below 0: it has ended."""
        self.kept_until = -math.inf
        self.num_kept = 0
        """Number of its blocks that count as kept by its tenant."""
        self.listed_s = 0.0
        """The gap under which its tenant lists it; 0: it doesn't."""
        self.turn_blocks = 0
        """Blocks of its last request that have been released."""
        self.used_at = 0.0

    def is_listed(self, gap_s: float) -> bool:
        """Whether a list's entry with this gap is valid; one without blocks must be listed again when it has some."""
        if gap_s != self.listed_s:
            return False
        if not self.blocks:
            self.listed_s = 0.0
        return bool(self.blocks)


class _PlainLru:
    """What plain LRU would hold, in whole sessions: those used last, up to the size of the pool."""

    def __init__(self, num_blocks: int) -> None:
        self._users: OrderedDict[object, tuple[int, float]] = OrderedDict()
        self._room = num_blocks
        self._full = False

    def __contains__(self, user: object) -> bool:
        return user in self._users

    def life_s(self, now: float) -> float:
        """Return the time without use after which a session is dropped, as of now."""
        return now - next(iter(self._users.values()))[1] if self._full and self._users else math.inf

    def use(self, user: object, num_blocks: int, now: float) -> None:
        """Note a use of ``num_blocks`` blocks."""
        before, _ = self._users.pop(user, (0, 0.0))
        self._users[user] = num_blocks, now
        self._room += before - num_blocks
        while self._room < 0:
            self._room += self._users.popitem(last=False)[1][0]
            self._full = True


class _Tenant:
    # An ``OrderedDict`` is a linked list with a hash index in C: to remove the oldest entry, to add the youngest and to
    # remove one from the middle (a prefix hit) are each O(1) and about 0.1 us.
    __slots__ = ("blocks", "by_gap", "num_kept", "sessions", "trust", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockId, float] = OrderedDict()
        """Free cached blocks, the least recently used first, each with the time of its release."""
        self.sessions: OrderedDict[bytes, _Session] = OrderedDict()
        """By key, the least recently used first; without those that were forgotten."""
        self.by_gap: list[tuple[float, int, _Session]] = []
        """Heap of sessions, the longest gap first; an entry whose gap is not the listed one is void."""
        self.trust = 0.0
        """Share of right forecasts among the last ones."""
        self.num_kept = 0
        """Number of blocks that hints keep."""
        self.used_at = 0.0

    def enlist(self, session: _Session, number: int) -> None:
        """List a session that has blocks under its gap; of equal gaps the highest ``number`` comes first."""
        if len(self.by_gap) >= _MIN_LIST + 2 * len(self.sessions) + len(self.blocks):
            self.by_gap = [entry for entry in self.by_gap if entry[2].is_listed(-entry[0])]
            heapq.heapify(self.by_gap)
        session.listed_s = session.gap_s
        heapq.heappush(self.by_gap, (-session.gap_s, -number, session))

    def longest(self) -> _Session | None:
        """Return the session with the longest usual gap of those that have blocks."""
        while self.by_gap:
            gap_s, _, session = self.by_gap[0]
            if session.is_listed(-gap_s):
                return session
            heapq.heappop(self.by_gap)
        return None


class EvictionQueue:
    """The free cached blocks of a pool.

    Args:
        num_blocks: Number of blocks in the pool.
        share: Part of the pool that is divided among tenants, 0 to 1.
        clock: Monotonic clock in seconds.

    Attributes:
        early_evictions: Number of blocks evicted before older ones since their session's usual gap is long.
        spared_blocks: Number of times that a hint spared a block that was to be evicted.
    """

    def __init__(self, num_blocks: int, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._num_shared = int(share * num_blocks)
        self._clock = clock
        no_tenant = _Tenant()
        self._tenants = {"": no_tenant}
        self._owner_of = [no_tenant] * num_blocks
        self._session_of: list[_Session | None] = [None] * num_blocks
        self._plain_lru = _PlainLru(num_blocks)
        self._num = self._num_listed = self._num_nameless = 0
        self._released_at = -math.inf
        self._max_tenants = _MAX_IDLE
        self.early_evictions = self.spared_blocks = 0
        self._names: tuple[str, bytes] | None = None
        self._owner: tuple[_Tenant, _Session | None] = no_tenant, None

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[BlockId]:
        return (block_id for tenant in self._tenants.values() for block_id in tenant.blocks)

    def set_owner(self, block_id: BlockId, tenant: str, session: bytes = b"") -> None:
        """Set the tenant and the session that own a block in use; an empty key: no session."""
        if self._names != (tenant, session):  # blocks come in runs
            owner = self._tenant(tenant)
            self._owner = owner, self._session(owner, session) if session else None
            self._names = tenant, session
        self._owner_of[block_id], self._session_of[block_id] = self._owner
        if not session:
            self._num_nameless += 1

    def begin_turn(self, block_ids: Sequence[BlockId], tenant: str, session: bytes, retention_s: float = 0.0) -> None:
        """Begin a request: learn its session's gap, and take the blocks that it found from all other sessions.

        Args:
            block_ids: Blocks that it found.
            tenant: Tenant of the request; empty: no tenant.
            session: Key of the request's conversation; empty: none, then its hint has no effect.
            retention_s: Seconds for which the session's blocks are to be spared; below 0: this is its last request.
        """
        own = None
        if session:
            owner = self._tenant(tenant)
            own = self._session(owner, session)
            owner.sessions.move_to_end(session)
            self._names = None  # it may have been forgotten, and is another one now
            self._learn_gap(owner, own)
            _end_keeping(owner, own)
            own.retention_s = retention_s
            if retention_s < 0:
                _put_first(owner, own)
        session_of = self._session_of
        for block_id in block_ids:
            other = session_of[block_id]
            if other is not own and other is not None:
                other.blocks.pop(block_id, None)
                _end_keeping(self._owner_of[block_id], other)
                session_of[block_id] = None

    def _learn_gap(self, tenant: _Tenant, session: _Session) -> None:
        now = self._clock()
        if session.used_at:
            gap_s = now - session.used_at
            if session.gap_s >= self._plain_lru.life_s(now):  # the forecast was: LRU drops it before it is back
                tenant.trust += _TRUST_WEIGHT * ((session not in self._plain_lru) - tenant.trust)
            session.gap_s += (_GAP_WEIGHT if session.gap_s else 1.0) * (gap_s - session.gap_s)
        session.used_at = now
        session.turn_blocks = 0

    def add(self, block_ids: Sequence[BlockId]) -> None:
        """Add blocks that are not in use any more, the one to evict first in front."""
        if not block_ids:
            return
        self._released_at = now = max(self._clock(), self._released_at + _TICK_S)
        owner_of = self._owner_of
        session_of = self._session_of
        had: dict[_Session, tuple[_Tenant, int]] = {}
        last: _Session | None = None
        for block_id in block_ids:
            owner_of[block_id].blocks[block_id] = now
            session = session_of[block_id]
            if session is not None:
                if session is not last:
                    had.setdefault(session, (owner_of[block_id], len(session.blocks)))
                    last = session
                session.blocks[block_id] = None
        owner_of[block_ids[0]].used_at = now
        self._num += len(block_ids)
        for session, (tenant, num_before) in had.items():
            session.used_at = now
            session.turn_blocks += len(session.blocks) - num_before
            self._plain_lru.use(session, session.turn_blocks, now)
            if session.retention_s < 0:
                _put_first(tenant, session)
            elif session.retention_s > 0 and self._keep_session(tenant, session, now):
                session.listed_s = 0.0
            elif session.gap_s != session.listed_s:
                self._num_listed += 1
                tenant.enlist(session, self._num_listed)
        if self._num_nameless:
            self._plain_lru.use(object(), self._num_nameless, now)
            self._num_nameless = 0

    def remove(self, block_id: BlockId) -> None:
        """Remove a block that is used again."""
        del self._owner_of[block_id].blocks[block_id]
        session = self._session_of[block_id]
        if session is not None:
            del session.blocks[block_id]
        self._num -= 1

    def pop(self, count: int) -> list[BlockId]:
        """Remove and return the ``count`` blocks to evict first; there must be that many."""
        out: list[BlockId] = []
        while len(out) < count:
            if len(self._tenants) == 1:
                popped = self._pop_of(self._tenants[""], count)
            else:
                popped = self._pop_beyond_parts(count - len(out))
            self._num -= len(popped)
            out += popped
        return out

    def _pop_of(self, tenant: _Tenant, count: int) -> list[BlockId]:
        """Remove and return ``count`` blocks of a tenant, which must have so many."""
        blocks = tenant.blocks
        session_of = self._session_of
        longest = tenant.longest() if tenant.trust >= _TRUSTED else None
        now = self._clock()
        out: list[BlockId] = []
        num_spared = 0
        while len(out) < count:
            if longest is None or longest.listed_s <= now - _oldest(tenant):
                block_id, _ = blocks.popitem(last=False)
            else:
                block_id = next(iter(longest.blocks))
                del blocks[block_id]
                self.early_evictions += 1
            session = session_of[block_id]
            if session is not None:
                if session.num_kept and session.kept_until > now and num_spared < len(blocks):
                    blocks[block_id] = now
                    num_spared += 1
                    self.spared_blocks += 1
                    continue
                del session.blocks[block_id]
                if session.num_kept:
                    _end_keeping(tenant, session)
                if session is longest and not session.blocks:
                    longest = tenant.longest()
            out.append(block_id)
        return out

    def _pop_beyond_parts(self, count: int) -> list[BlockId]:
        """Remove and return the oldest blocks beyond their tenants' parts, between 1 and ``count``; O(tenants)."""
        lately = self._clock() - IDLE_S
        tenants = [tenant for tenant in self._tenants.values() if tenant.blocks]
        num_active = sum(tenant.used_at > lately for tenant in tenants)
        part = self._num_shared // num_active if num_active > 1 else 0
        heap = []
        for index, tenant in enumerate(tenants):
            protected = part if tenant.used_at > lately else 0
            if len(tenant.blocks) > protected:
                heap.append((_oldest(tenant), index, protected))
        if not heap:  # none is beyond its part: evict from the tenant with most blocks, of several the latest user
            most = max(tenants, key=lambda tenant: (len(tenant.blocks), next(reversed(tenant.blocks.values()))))
            return self._pop_of(most, 1)
        heapq.heapify(heap)
        out: list[BlockId] = []
        while heap and len(out) < count:
            _, index, protected = heap[0]
            tenant = tenants[index]
            out += self._pop_of(tenant, 1)
            if len(tenant.blocks) > protected:
                heapq.heapreplace(heap, (_oldest(tenant), index, protected))
            else:
                heapq.heappop(heap)
        return out

    def clear(self) -> list[BlockId]:
        """Remove and return all blocks."""
        everything = list(self)
        for tenant in self._tenants.values():
            tenant.blocks.clear()
        for block_id in everything:
            session = self._session_of[block_id]
            if session is not None:
                session.blocks.clear()
                _end_keeping(self._owner_of[block_id], session)
        self._num = 0
        return everything

    def check_integrity(self) -> None:
        """Check that counts add up, and every block is in its tenant's queue and its session's.

        Raises:
            AssertionError: They don't.
        """
        if self._num != sum(1 for _ in self):
            raise AssertionError("the free cached blocks are counted wrongly")
        for tenant in self._tenants.values():
            if any(self._owner_of[block_id] is not tenant for block_id in tenant.blocks):
                raise AssertionError("a cached block lies with another tenant")
        for block_id, session in enumerate(self._session_of):
            free = BlockId(block_id) in self._owner_of[block_id].blocks
            if session is not None and (BlockId(block_id) in session.blocks) != free:
                raise AssertionError("a cached block is not in its session's queue, or one in use is")
        sessions = {session for session in self._session_of if session is not None}
        if sum(session.num_kept for session in sessions) != sum(each.num_kept for each in self._tenants.values()):
            raise AssertionError("the blocks that hints keep are counted wrongly")

    def _keep_session(self, tenant: _Tenant, session: _Session, now: float) -> bool:
        """Keep a session's blocks for the time that it asked for; return whether its tenant may keep so many."""
        lately = now - IDLE_S
        num_active = max(1, sum(other.used_at > lately for other in self._tenants.values()))
        _end_keeping(tenant, session)
        if tenant.num_kept + len(session.blocks) > _KEPT_SHARE * len(self._owner_of) / num_active:
            return False
        session.num_kept = len(session.blocks)
        tenant.num_kept += session.num_kept
        session.kept_until = now + session.retention_s
        return True

    def _tenant(self, tenant: str) -> _Tenant:
        owner = self._tenants.get(tenant if self._share else "")
        if owner is None:
            if len(self._tenants) >= self._max_tenants:
                self._remove_idle_tenants()
            owner = self._tenants[tenant] = _Tenant()
        return owner

    def _session(self, tenant: _Tenant, key: bytes) -> _Session:
        session = tenant.sessions.get(key)
        if session is None:
            session = tenant.sessions[key] = _Session()
            while len(tenant.sessions) > max(1, MAX_SESSIONS // len(self._tenants)):
                _end_keeping(tenant, tenant.sessions.popitem(last=False)[1])
        return session

    def _remove_idle_tenants(self) -> None:
        """Remove tenants that have no blocks, cached or in use, so that names alone cannot fill the memory."""
        used = {id(tenant) for tenant in self._owner_of}
        self._tenants = {name: each for name, each in self._tenants.items() if not name or id(each) in used}
        self._max_tenants = max(_MAX_IDLE, 2 * len(self._tenants))
        self._names = None


def _end_keeping(tenant: _Tenant, session: _Session) -> None:
    tenant.num_kept -= session.num_kept
    session.num_kept = 0


def _put_first(tenant: _Tenant, session: _Session) -> None:
    """Have a session's free blocks evicted before all others, those at its end first."""
    for block_id in reversed(session.blocks):
        tenant.blocks[block_id] = -math.inf
        tenant.blocks.move_to_end(block_id, last=False)


def _oldest(tenant: _Tenant) -> float:
    return next(iter(tenant.blocks.values()))
