"""KV events: order, gaps, restarts, age."""

from __future__ import annotations

import pytest

from baton.api.v1 import events_pb2
from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash, Epoch
from baton_router.feed import EventFeed, EventGapError, IndexState
from baton_router.index import PrefixIndex

A, B = Epoch(b"a" * 16), Epoch(b"b" * 16)
HASHES = block_hashes(list(range(8)), 1, root_hash(b"test"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(hashes: list[BlockHash], tier: str = "device") -> events_pb2.KvEvent:
    return events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=hashes, tier=tier))


def batch(
    sequence: int, *events: events_pb2.KvEvent, epoch: bytes = A, snapshot: bool = False
) -> events_pb2.KvEventBatch:
    return events_pb2.KvEventBatch(epoch=epoch, sequence=sequence, events=events, snapshot=snapshot)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def feed(clock: Clock) -> EventFeed:
    return EventFeed(PrefixIndex(), now=clock, stale_limit_s=10)


def test_life(feed: EventFeed, clock: Clock) -> None:
    assert feed.state is IndexState.OFF
    assert feed.resume_from(A) == 0
    feed.apply(batch(3, stored(HASHES[:2]), snapshot=True))
    assert feed.state is IndexState.EXACT
    assert feed.apply(batch(4, stored(HASHES[2:5])))
    assert feed.num_blocks == 5
    feed.apply(batch(5, events_pb2.KvEvent(removed=events_pb2.KvBlocksRemoved(block_hashes=HASHES[4:5]))))
    assert feed.num_blocks == 4
    feed.apply(batch(6, events_pb2.KvEvent(cleared=events_pb2.KvCleared())))
    assert feed.num_blocks == 0
    assert feed.num_events == 4


def test_a_repeated_batch_proves_that_nothing_was_missed(feed: EventFeed) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    feed.broken()
    assert feed.state is IndexState.STALE
    assert feed.resume_from(A) == 1
    assert not feed.apply(batch(1, stored(HASHES[:2])))
    assert feed.state is IndexState.EXACT
    assert feed.num_blocks == 2


def test_gap(feed: EventFeed) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    with pytest.raises(EventGapError):
        feed.apply(batch(3, stored(HASHES[3:4])))
    assert feed.state is IndexState.STALE
    assert (feed.num_gaps, feed.num_blocks, feed.resume_from(A)) == (1, 2, 1)
    feed.apply(batch(2, stored(HASHES[2:3])))
    feed.apply(batch(3, stored(HASHES[3:4])))
    assert (feed.state, feed.num_blocks) == (IndexState.EXACT, 4)


def test_events_before_any_snapshot_are_a_gap(feed: EventFeed) -> None:
    with pytest.raises(EventGapError):
        feed.apply(batch(1, stored(HASHES[:2])))
    assert (feed.state, feed.resume_from(A)) == (IndexState.OFF, 0)


def test_another_process(feed: EventFeed) -> None:
    feed.apply(batch(9, stored(HASHES[:2]), snapshot=True))
    assert feed.resume_from(B) == 0
    with pytest.raises(EventGapError):
        feed.apply(batch(10, stored(HASHES[2:3]), epoch=B))
    assert feed.state is IndexState.OFF
    feed.apply(batch(1, stored(HASHES[5:6]), epoch=B, snapshot=True))
    assert (feed.state, feed.num_blocks, feed.resume_from(B)) == (IndexState.EXACT, 1, 1)


def test_restart_forgets_at_once(feed: EventFeed) -> None:
    feed.apply(batch(9, stored(HASHES[:2]), snapshot=True))
    assert not feed.restarted(A)
    assert feed.num_blocks == 2
    assert feed.restarted(B)
    assert (feed.state, feed.num_blocks) == (IndexState.OFF, 0)


def test_age(feed: EventFeed, clock: Clock) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    feed.broken()
    clock.now = 4
    feed.broken()
    clock.now = 9
    assert (feed.state, feed.age_s, feed.usable) == (IndexState.STALE, 9, True)
    clock.now = 10.5
    assert (feed.state, feed.usable) == (IndexState.OFF, False)


def test_only_the_instances_own_memory_counts(feed: EventFeed) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), stored(HASHES[2:4], tier="host"), snapshot=True))
    assert feed.num_blocks == 2


def test_hashes_of_another_length_are_ignored(feed: EventFeed) -> None:
    feed.apply(batch(1, stored([BlockHash(b"short"), HASHES[0]]), snapshot=True))
    assert feed.num_blocks == 1


def test_a_full_index_is_not_exact(clock: Clock) -> None:
    feed = EventFeed(PrefixIndex(max_blocks=3), now=clock)
    feed.apply(batch(1, stored(HASHES[:5]), snapshot=True))
    assert (feed.state, feed.num_blocks) == (IndexState.STALE, 3)
    feed.apply(batch(2, stored(HASHES[:2]), snapshot=True))
    assert feed.state is IndexState.EXACT
