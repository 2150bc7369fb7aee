"""Tenants in the store's memory: quotas, pins by request, times to live. Real arenas, a clock of the test's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.transport.named_blocks import names
from tests.support.transport.store_check import check_store
from tests.unit.kvstore.test_kvstore_store import KIND, Clock, fingerprint

from baton.errors import QueueFullError
from baton.types import BlockHash, Tenant
from baton_kvstore.memory.pool import NO_TENANT, Quotas
from baton_kvstore.memory.store import BlockStore

BLOCK = 4096
A, B = Tenant("a", kv_bytes=3 * BLOCK), Tenant("b", kv_bytes=4 * BLOCK)


def make(blocks: int = 8, *, behind: bool = False, tenant_bytes: int = 0) -> tuple[BlockStore, Clock]:
    clock = Clock()
    quotas = Quotas(tenant_bytes)
    store = BlockStore(blocks * BLOCK, max_pools=4, max_leases=8, clock=clock, behind=behind, quotas=quotas)
    return store, clock


def put(store: BlockStore, tenant: Tenant | None, *labels: int, ttl_s: float = 0.0) -> list[bool]:
    reservation = store.reserve(KIND, names(*labels), tenant)
    return store.commit(reservation, [True] * len(reservation.missing), ttl_s=ttl_s)


def there(store: BlockStore, labels: Sequence[int]) -> list[int]:
    return [label for label, name in zip(labels, names(*labels), strict=True) if store.has(KIND.digest(), name)]


def test_above_its_quota_a_tenant_loses_its_own_coldest_blocks() -> None:
    store, _ = make(8)
    put(store, B, 10, 11, 12)
    put(store, A, 1)
    put(store, A, 2)
    put(store, A, 3)
    lease = store.lease(KIND, names(1), 5.0)
    assert lease is not None
    store.release(lease.lease_id)  # 2 is the coldest now
    put(store, A, 4)
    assert there(store, [1, 2, 3, 4, 10, 11, 12]) == [1, 3, 4, 10, 11, 12]
    share = store.quotas.find("a")
    assert share is not None
    assert (share.used_bytes, share.evictions) == (3 * BLOCK, 1)
    assert store.used_bytes == 6 * BLOCK, "room that nobody uses is not for those above their quota"
    check_store(store)


def test_a_chain_longer_than_the_quota_keeps_its_head() -> None:
    store, _ = make(8)
    assert put(store, A, *range(1, 6)) == [True, True, True, False, False]
    assert there(store, range(1, 6)) == [1, 2, 3]
    lease = store.lease(KIND, names(1, 2, 3), 5.0)
    assert lease is not None
    with pytest.raises(QueueFullError, match="tenant a's quota"):
        put(store, A, 7)
    check_store(store)


def test_quotas_that_add_up_keep_tenants_apart() -> None:
    store, _ = make(7)
    put(store, B, 10, 11, 12, 13)
    for label in range(100):
        put(store, A, label + 100)
    assert there(store, [10, 11, 12, 13]) == [10, 11, 12, 13]
    check_store(store)


def test_a_smaller_quota_counts_from_the_next_put_on_and_a_default_for_all() -> None:
    store, _ = make(8, tenant_bytes=2 * BLOCK)
    put(store, A, 1, 2, 3)
    put(store, Tenant("a", kv_bytes=2 * BLOCK), 4)
    share = store.quotas.find("a")
    assert share is not None
    assert share.used_bytes == 2 * BLOCK
    put(store, Tenant("c"), 20, 21, 22)
    assert there(store, [20, 21, 22]) == [20, 21]
    put(store, None, 30, 31, 32)  # what is nobody's has no quota
    assert there(store, [30, 31, 32]) == [30, 31, 32]
    check_store(store)


def test_with_a_tier_behind_saved_blocks_go_first() -> None:
    store, _ = make(8, behind=True)
    put(store, A, 1)
    put(store, A, 2)
    put(store, A, 3)
    saved = store.pin(KIND.digest(), names(2))
    store.end_save(saved)
    put(store, A, 4)
    assert there(store, [1, 2, 3, 4]) == [1, 3, 4]
    check_store(store)


def test_what_a_tenant_will_lose_is_written_behind_in_time() -> None:
    store, _ = make(100, behind=True)
    put(store, A, 1, 2, 3)
    put(store, B, 10)
    assert {e.block_hash for e in store.begin_save(2 * BLOCK)} <= set(names(1, 2, 3))
    store.close()


def test_to_be_saved_makes_a_block_no_older() -> None:
    store, _ = make(8, behind=True)
    for label in (1, 2, 3):
        put(store, A, label)
        store.end_save(store.pin(KIND.digest(), names(label)))
    put(store, A, 4)
    assert there(store, [1, 2, 3, 4]) == [2, 3, 4]
    check_store(store)


def test_a_tenant_is_forgotten_in_every_kind_of_kv() -> None:
    store, _ = make(8)
    other = fingerprint("other")
    put(store, A, 1, 2)
    put(store, B, 3)
    reservation = store.reserve(other, names(4), A)
    lease = store.lease(KIND, names(1), 5.0)
    assert lease is not None
    assert {kind.key: found for kind, found in store.forget_tenant("a").items()} == {
        KIND.digest(): set(names(1, 2)),
        other.digest(): set(names(4)),
    }
    assert store.commit(reservation, [True]) == [False]
    assert there(store, [1, 2, 3]) == [3]
    assert store.release(lease.lease_id)
    assert store.used_bytes == BLOCK
    assert store.forget_tenant("a") == store.forget_tenant("nobody knows") == {}
    check_store(store)


def test_pinned_blocks_stay_until_they_are_unpinned_or_deleted() -> None:
    store, _ = make(4)
    put(store, None, 1, 2)
    assert store.pin_for_client(KIND, names(1, 2, 9)) == [True, True, False]
    assert store.pin_for_client(KIND, names(1)) == [True]
    for label in range(10, 30):
        put(store, None, label)
    assert there(store, [1, 2]) == [1, 2]
    put(store, None, 3)
    with pytest.raises(QueueFullError, match="pinned"):
        store.pin_for_client(KIND, names(3))  # half the memory is pinned already
    check_store(store)
    store.unpin_for_client(KIND, names(1, 3, 9))
    assert store.delete(KIND, names(2)) == 1
    assert store.client_pins.pinned_bytes == 0
    for label in range(30, 40):
        put(store, None, label)
    assert there(store, [1, 2]) == []
    check_store(store)


def test_a_tenant_may_pin_half_its_quota() -> None:
    store, _ = make(8)
    put(store, B, 1, 2, 3)
    with pytest.raises(QueueFullError, match="tenant"):
        store.pin_for_client(KIND, names(1, 2, 3))
    assert [share.pinned_bytes for share in store.quotas if share.name == "b"] == [2 * BLOCK]
    check_store(store)


def test_blocks_are_forgotten_when_their_time_is_up() -> None:
    store, clock = make(4, behind=True)
    put(store, A, 1, ttl_s=10.0)
    put(store, A, 2)
    assert [e.block_hash for e in store.begin_save(1 << 30)] == names(2)  # the other one is for memory alone
    lease = store.lease(KIND, names(1), 60.0)
    assert lease is not None
    clock.now += 9.9
    store.expire()
    assert there(store, [1, 2]) == [1, 2]
    clock.now += 0.2
    store.expire()
    assert there(store, [1, 2]) == [2]
    assert store.counters.expired_blocks == 1
    store.release(lease.lease_id)
    assert store.used_bytes == BLOCK


def test_blocks_that_went_before_their_time_are_not_remembered() -> None:
    store, _ = make(4)
    for label in range(3000):
        put(store, None, label, ttl_s=1e6)
    assert len(store.client_pins._ends) < 2000
    check_store(store)


class Tenants(RuleBasedStateMachine):
    """Whatever two tenants and nobody do: everything adds up, and nobody is above a quota."""

    tenants = st.sampled_from([A, B, None])
    labels = st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.store, self.clock = make(6)
        self.leases: list[int] = []
        self.number = itertools.count(1000)

    def named(self, tenant: Tenant | None, labels: list[int]) -> list[BlockHash]:
        start = {None: 0, A: 100, B: 200}[tenant]  # as salts do it: no two tenants share a name
        return names(*(start + label for label in labels))

    @rule(tenant=tenants, labels=labels, arrives=st.booleans(), ttl=st.sampled_from([0.0, 3.0]))
    def put(self, tenant: Tenant | None, labels: list[int], arrives: bool, ttl: float) -> None:
        others = {entry.block_hash for share in self.store.quotas if share.name != "a" for entry in share.entries}
        full = self.store.used_bytes + len(labels) * BLOCK > self.store.capacity_bytes
        try:
            reservation = self.store.reserve(KIND, self.named(tenant, labels), tenant)
        except QueueFullError:
            return
        self.store.commit(reservation, [arrives] * len(reservation.missing), ttl_s=ttl)
        if tenant is A and not full:
            left = {entry.block_hash for share in self.store.quotas if share.name != "a" for entry in share.entries}
            assert left == others

    @rule(tenant=tenants, labels=labels)
    def lease(self, tenant: Tenant | None, labels: list[int]) -> None:
        try:
            lease = self.store.lease(KIND, self.named(tenant, labels), 2.0)
        except QueueFullError:
            return
        if lease is not None:
            self.leases.append(lease.lease_id)

    @rule()
    def release(self) -> None:
        if self.leases:
            self.store.release(self.leases.pop())

    @rule(tenant=tenants, labels=labels, on=st.booleans())
    def pin(self, tenant: Tenant | None, labels: list[int], on: bool) -> None:
        if not on:
            self.store.unpin_for_client(KIND, self.named(tenant, labels))
            return
        try:
            self.store.pin_for_client(KIND, self.named(tenant, labels))
        except QueueFullError:
            return

    @rule(tenant=tenants)
    def forget(self, tenant: Tenant | None) -> None:
        self.store.forget_tenant(NO_TENANT if tenant is None else tenant.id)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.expire()

    @invariant()
    def adds_up(self) -> None:
        check_store(self.store)
        assert sum(share.used_bytes for share in self.store.quotas) == self.store.used_bytes
        assert sum(share.pinned_bytes for share in self.store.quotas) == self.store.client_pins.pinned_bytes
        for share in self.store.quotas:
            assert not share.quota_bytes or share.used_bytes <= share.quota_bytes

    def teardown(self) -> None:
        self.store.close()


TestTenants = Tenants.TestCase
TestTenants.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
