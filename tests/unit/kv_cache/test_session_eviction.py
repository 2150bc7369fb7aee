"""Sessions with long gaps lose their blocks early, but only while forecasts are right; without names it is LRU."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.kv_cache.test_block_pool import chain

from baton.kv_cache import eviction
from baton.kv_cache.block_pool import BlockPool
from baton.kv_cache.eviction import EvictionQueue
from baton.types import BlockHash, BlockId


class Pool:
    """A pool that serves one request at a time, and its clock."""

    def __init__(self, num_blocks: int, share: float = 0.0) -> None:
        self.now_s = 1000.0
        self.pool = BlockPool(num_blocks, np.zeros(num_blocks, np.uint64), tenant_share=share, clock=lambda: self.now_s)

    def serve(self, hashes: Sequence[BlockHash], session: str = "", tenant: str = "", retention_s: float = 0.0) -> int:
        """Serve a request; return how many of its blocks were found."""
        self.now_s += 1.0
        found = self.pool.match(hashes)
        self.pool.begin_turn(found, tenant, session.encode(), retention_s)
        self.pool.acquire(found)
        new = self.pool.allocate(len(hashes) - len(found))
        assert new is not None
        for i, block in enumerate(new, len(found)):
            parent = hashes[i - 1] if i else None
            self.pool.commit(block, hashes[i], parent, tenant=tenant, session=session.encode())
        self.pool.release([*found, *new])
        self.pool.check_integrity(idle=True)
        return len(found)


PROMPTS = [chain(*range(100 * i, 100 * i + 10)) for i in range(12)]


def cycle(pool: Pool, rounds: int, tenant: str = "", named: bool = True) -> int:
    """Twelve conversations of ten blocks take turns; return the hits of the last round."""
    hits = 0
    for _ in range(rounds):
        hits = sum(pool.serve(PROMPTS[i], f"s{i}" if named else "", tenant) for i in range(12))
    return hits


def test_a_cycle_that_flushes_lru_leaves_most_sessions_their_blocks() -> None:
    assert cycle(Pool(80), 40, named=False) == 0
    pool = Pool(80)
    assert cycle(pool, 40) >= 60
    assert pool.pool.early_evictions > 500


def test_where_all_fits_nothing_changes() -> None:
    assert cycle(Pool(120), 5) == cycle(Pool(120), 5, named=False) == 120


def test_a_prefix_that_sessions_share_stays() -> None:
    pool = Pool(80)
    prompts = [chain(*range(5), *range(100 * i + 50, 100 * i + 59)) for i in range(12)]
    for _ in range(40):
        for i in range(12):
            pool.serve(prompts[i], f"s{i}")
    assert len(pool.pool.match(prompts[0][:5])) == 5


def test_forecasts_that_turn_out_wrong_make_it_lru() -> None:
    """Regular gaps become random ones: two of three times LRU would have kept the session, so gaps stop counting."""
    named, plain = Pool(80), Pool(80)
    cycle(named, 40)
    cycle(plain, 40, named=False)
    tenant = named.pool._cached._tenants[""]
    assert tenant.trust > 0.9
    order = random.Random(0).choices(range(12), k=800)
    hits = [(named.serve(PROMPTS[i], f"s{i}"), plain.serve(PROMPTS[i])) for i in order][400:]
    assert tenant.trust < 0.5
    assert sum(mine for mine, _ in hits) >= 0.98 * sum(theirs for _, theirs in hits)


def test_a_tenants_sessions_are_its_own() -> None:
    """The same names in another tenant's requests neither take its blocks nor teach it gaps."""
    pool = Pool(200, share=0.5)
    mine = chain(*range(5000, 5020))
    pool.serve(mine, "s0", "mine")
    cycle(pool, 20, "other")
    assert len(pool.pool.match(mine)) == 20
    sessions = pool.pool._cached._tenants["mine"].sessions
    assert [session.gap_s for session in sessions.values()] == [0.0]


def test_names_of_sessions_do_not_add_up() -> None:
    queue = EvictionQueue(4, 0.5)
    for at in range(3 * eviction.MAX_SESSIONS):
        for _ in range(2):
            queue.begin_turn([], "a", at.to_bytes(8, "big"))
            queue.set_owner(BlockId(at % 4), "a", at.to_bytes(8, "big"))
            queue.add([BlockId(at % 4)])
            queue.remove(BlockId(at % 4))
    tenant = queue._tenants["a"]
    assert len(tenant.sessions) <= eviction.MAX_SESSIONS
    assert len(tenant.by_gap) <= 2 * eviction.MAX_SESSIONS + 64 + 4
    assert len(queue._plain_lru._users) <= 4
    queue.check_integrity()


def test_many_names_keep_nothing_longer_than_recency_would() -> None:
    """A flood of new names: each has no gap, so what was there before goes as with LRU, and no later."""
    for named in (False, True):
        pool = Pool(80)
        for i in range(8):
            pool.serve(PROMPTS[i])
        for at in range(30):
            pool.serve(chain(9000 + 2 * at, 9001 + 2 * at), f"n{at}" if named else "")
        assert [len(pool.pool.match(PROMPTS[i])) for i in range(8)] == [0] * 6 + [10] * 2


def test_a_retention_hint_spares_a_session_until_its_time_is_over() -> None:
    pool = Pool(80)
    pool.serve(PROMPTS[0], "kept", retention_s=60.0)
    for at in range(20):
        pool.serve(PROMPTS[1 + at % 11])
    assert len(pool.pool.match(PROMPTS[0])) == 10
    assert pool.pool.spared_blocks >= 10
    pool.now_s += 60.0
    for at in range(8):
        pool.serve(PROMPTS[1 + at])
    assert pool.pool.match(PROMPTS[0]) == []
    assert pool.pool._cached._tenants[""].num_kept == 0


def test_hints_keep_an_eighth_of_a_tenants_part_and_stop_nobody() -> None:
    pool = Pool(160, share=0.5)
    for i in range(8):
        pool.serve(PROMPTS[i], f"s{i}", "greedy", retention_s=1e6)
    assert pool.pool._cached._tenants["greedy"].num_kept == 20  # an eighth of 160
    assert pool.serve(chain(*range(9000, 9150)), tenant="other") == 0  # all but ten blocks
    pool.serve(chain(*range(8000, 8160)), tenant="other")  # even kept ones go where there are no others
    assert pool.pool._cached._tenants["greedy"].num_kept == 0


def test_a_session_that_ends_goes_first_and_one_that_goes_on_does_not() -> None:
    for last, tenant in ((-1.0, ""), (-1.0, "t"), (0.0, "")):
        pool = Pool(80, share=0.5)
        for i in range(7):
            pool.serve(PROMPTS[i], f"s{i}", tenant)
        pool.serve(PROMPTS[7], "sub-agent", tenant, retention_s=last)
        pool.serve(PROMPTS[8], "s8", tenant)
        assert (len(pool.pool.match(PROMPTS[7])) == 0) == (last < 0)
        assert (len(pool.pool.match(PROMPTS[0])) == 10) == (last < 0)


def test_the_end_of_a_session_may_come_with_a_request_of_its_own() -> None:
    pool = Pool(80)
    for i in range(7):
        pool.serve(PROMPTS[i], f"s{i}")
    pool.pool.begin_turn([], "", b"s5", -1.0)
    pool.serve(PROMPTS[8])
    pool.serve(PROMPTS[9])
    assert [len(pool.pool.match(PROMPTS[i])) for i in (0, 5, 6)] == [10, 0, 10]


class PlainLru:
    """A pool in which cached blocks go by recency, as one would write it down."""

    def __init__(self, num_blocks: int) -> None:
        self.size = num_blocks
        self.held: OrderedDict[BlockHash, None] = OrderedDict()

    def serve(self, hashes: Sequence[BlockHash]) -> int:
        found = next((i for i, name in enumerate(hashes) if name not in self.held), len(hashes))
        for name in hashes[:found]:
            del self.held[name]
        while len(self.held) + len(hashes) > self.size:
            self.held.popitem(last=False)
        for name in reversed(hashes):
            if name not in self.held:
                self.held[name] = None
        return found


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.sampled_from(["", "a", "b", "c"])), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(requests=REQUESTS, size=st.integers(5, 16))
def test_without_names_it_is_lru(requests: list[tuple[list[int], str]], size: int) -> None:
    pool, plain = Pool(size), PlainLru(size)
    for tokens, _ in requests:
        hashes = chain(*tokens)
        assert pool.serve(hashes) == plain.serve(hashes)
        assert {name for name in plain.held if pool.pool.find([name], 0) != [None]} == set(plain.held)


@settings(max_examples=200, deadline=None)
@given(requests=REQUESTS, size=st.integers(5, 16), share=st.sampled_from([0.0, 0.5]), trusted=st.booleans())
def test_with_names_the_books_are_right(
    requests: list[tuple[list[int], str]], size: int, share: float, trusted: bool
) -> None:
    hints = itertools.cycle([0.0, 5.0, 0.0, -1.0, 100.0])
    pool = Pool(size, share)
    for at, (tokens, session) in enumerate(requests):
        if trusted:
            for tenant in pool.pool._cached._tenants.values():
                tenant.trust = 1.0
        pool.serve(chain(*tokens), session, "tu"[at % 2], next(hints))
        pool.now_s += len(tokens)
