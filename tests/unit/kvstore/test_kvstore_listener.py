"""Listeners hear, in order, what every tier holds and what it lost."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.transport.named_blocks import names

from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.types import BlockHash
from baton_kvstore.memory.store import BlockStore
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.types import KvFormat, kv_format_of

LAYOUT = KVLayout((LayerShape(1, 32, 32),), 16, "float32")
MODEL = Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=LAYOUT)
KIND = kv_format_of(MODEL)


class Ear:
    """Pins what it was told against what must be so."""

    def __init__(self) -> None:
        self.held: dict[str, set[tuple[KvFormat, BlockHash]]] = {"memory": set(), "disk": set()}

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        for name in hashes:
            assert ((kind, name) in self.held[tier]) != present, "told twice"
            (self.held[tier].add if present else self.held[tier].remove)((kind, name))

    def has(self, tier: str) -> set[BlockHash]:
        assert all(kind == KIND for kind, _ in self.held[tier])
        return {name for _, name in self.held[tier]}


@pytest.fixture
def memory() -> Iterator[BlockStore]:
    store = BlockStore(4 * KIND.block_bytes, max_pools=2, max_leases=4, clock=lambda: 0.0)
    yield store
    store.close()


def put(store: BlockStore, *labels: object, arrived: bool = True) -> None:
    reservation = store.reserve(MODEL, names(*labels))
    store.commit(reservation, [arrived] * len(reservation.missing))


def test_memory_tells_what_came_what_was_evicted_and_what_was_deleted(memory: BlockStore) -> None:
    ear, late = Ear(), Ear()
    memory.listen(ear)
    put(memory, 1, 2)
    put(memory, 1, 2, 3)
    put(memory, "torn", arrived=False)
    assert ear.has("memory") == set(names(1, 2, 3))
    memory.listen(late)
    put(memory, 4, 5)  # 2 is the tail of what was used longest ago
    assert ear.has("memory") == late.has("memory") == memory.hashes(KIND.key)
    memory.delete(MODEL, names(4))
    assert ear.has("memory") == late.has("memory") == memory.hashes(KIND.key)
    memory.close()
    assert not ear.has("memory")


def test_a_block_deleted_while_it_came_is_never_told(memory: BlockStore) -> None:
    ear = Ear()
    memory.listen(ear)
    reservation = memory.reserve(MODEL, names(1, 2))
    memory.delete(MODEL, names(1))
    memory.commit(reservation, [True, True])
    assert ear.has("memory") == set(names(2)) == memory.hashes(KIND.key)


def test_a_leased_block_that_is_deleted_is_told_at_once_and_only_once(memory: BlockStore) -> None:
    ear = Ear()
    memory.listen(ear)
    put(memory, 1)
    lease = memory.lease(MODEL, names(1), 5.0)
    assert lease is not None
    memory.delete(MODEL, names(1))
    assert not ear.has("memory")
    memory.release(lease.lease_id)
    assert not ear.has("memory")


def test_the_disk_tells_what_a_restart_found_what_came_and_what_went(tmp_path: Path) -> None:
    def opened() -> DiskLog:
        return DiskLog(str(tmp_path / "kv"), max_bytes=1 << 20, segment_bytes=1 << 17)

    page = memoryview(mmap.mmap(-1, 2 * KIND.block_bytes))
    views = [page[: KIND.block_bytes], page[KIND.block_bytes :]]
    log = opened()
    log.write(KIND, names(1, 2), views[:2], set())
    log.sync()
    log.close()
    log, ear = opened(), Ear()
    log.index.listen(ear)
    assert ear.has("disk") == set(names(1, 2))
    log.write(KIND, names(2, 3), views[:2], set())
    assert ear.has("disk") == set(names(1, 2, 3))
    log.index.hide(KIND, names(3, 4), [])
    assert ear.has("disk") == set(names(1, 2))
    for label in range(10, 400):
        log.write(KIND, names(label), views[:1], set())
    assert log.index.counters.evictions
    assert ear.has("disk") == set(log.index.hashes(KIND))
    log.close()
