"""KV events: order, gaps, restarts, age."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.api.v1 import events_pb2
from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash, Epoch
from baton_router.indexer.events import EventApplier, EventGapError, EventSubscriber, IndexMetrics, IndexState
from baton_router.indexer.prefix_index import PrefixIndex

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
def feed(clock: Clock) -> EventApplier:
    return EventApplier(PrefixIndex(), now=clock, stale_limit_s=10)


def test_life(feed: EventApplier, clock: Clock) -> None:
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


def test_a_repeated_batch_proves_that_nothing_was_missed(feed: EventApplier) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    feed.broken()
    assert feed.state is IndexState.STALE
    assert feed.resume_from(A) == 1
    assert not feed.apply(batch(1, stored(HASHES[:2])))
    assert feed.state is IndexState.EXACT
    assert feed.num_blocks == 2


def test_gap(feed: EventApplier) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    with pytest.raises(EventGapError):
        feed.apply(batch(3, stored(HASHES[3:4])))
    assert feed.state is IndexState.STALE
    assert (feed.num_gaps, feed.num_blocks, feed.resume_from(A)) == (1, 2, 1)
    feed.apply(batch(2, stored(HASHES[2:3])))
    feed.apply(batch(3, stored(HASHES[3:4])))
    assert (feed.state, feed.num_blocks) == (IndexState.EXACT, 4)


def test_events_before_any_snapshot_are_a_gap(feed: EventApplier) -> None:
    with pytest.raises(EventGapError):
        feed.apply(batch(1, stored(HASHES[:2])))
    assert (feed.state, feed.resume_from(A)) == (IndexState.OFF, 0)


def test_another_process(feed: EventApplier) -> None:
    feed.apply(batch(9, stored(HASHES[:2]), snapshot=True))
    assert feed.resume_from(B) == 0
    with pytest.raises(EventGapError):
        feed.apply(batch(10, stored(HASHES[2:3]), epoch=B))
    assert feed.state is IndexState.OFF
    feed.apply(batch(1, stored(HASHES[5:6]), epoch=B, snapshot=True))
    assert (feed.state, feed.num_blocks, feed.resume_from(B)) == (IndexState.EXACT, 1, 1)


def test_restart_forgets_at_once(feed: EventApplier) -> None:
    feed.apply(batch(9, stored(HASHES[:2]), snapshot=True))
    assert not feed.restarted(A)
    assert feed.num_blocks == 2
    assert feed.restarted(B)
    assert (feed.state, feed.num_blocks) == (IndexState.OFF, 0)


def test_age(feed: EventApplier, clock: Clock) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    feed.broken()
    clock.now = 4
    feed.broken()
    clock.now = 9
    assert (feed.state, feed.age_s, feed.usable) == (IndexState.STALE, 9, True)
    clock.now = 10.5
    assert (feed.state, feed.usable) == (IndexState.OFF, False)


def test_only_the_instances_own_memory_counts(feed: EventApplier) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), stored(HASHES[2:4], tier="host"), snapshot=True))
    assert feed.num_blocks == 2


def test_hashes_of_another_length_are_ignored(feed: EventApplier) -> None:
    feed.apply(batch(1, stored([BlockHash(b"short"), HASHES[0]]), snapshot=True))
    assert feed.num_blocks == 1


def test_hashes_in_one_string(feed: EventApplier) -> None:
    pieces = [b"".join(HASHES[:2]), b"".join(HASHES[2:4]) + b"rest", b"short"]
    told = [events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(packed_hashes=x)) for x in pieces]
    feed.apply(batch(1, *told, stored(HASHES[4:6]), snapshot=True))
    assert (feed.num_blocks, feed.num_events) == (6, 4)
    gone = events_pb2.KvBlocksRemoved(packed_hashes=b"".join(HASHES[1:5]))
    feed.apply(batch(2, events_pb2.KvEvent(removed=gone)))
    assert feed.num_blocks == 2


def test_a_full_index_is_not_exact(clock: Clock) -> None:
    feed = EventApplier(PrefixIndex(max_blocks=3), now=clock)
    feed.apply(batch(1, stored(HASHES[:5]), snapshot=True))
    assert (feed.state, feed.num_blocks) == (IndexState.STALE, 3)
    feed.apply(batch(2, stored(HASHES[:2]), snapshot=True))
    assert feed.state is IndexState.EXACT


def beat(sequence: int, epoch: bytes = A) -> events_pb2.KvEventBatch:
    return events_pb2.KvEventBatch(epoch=epoch, sequence=sequence, heartbeat=True)


def test_silence_after_heartbeats_is_stale(feed: EventApplier, clock: Clock) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    clock.now = 5
    assert feed.state is IndexState.EXACT, "who never sent a heartbeat may be silent"
    feed.heartbeat(beat(1), 0.875)
    clock.now = 5.8
    assert (feed.state, feed.age_s) == (IndexState.EXACT, 0)
    clock.now = 5.9
    assert feed.state is IndexState.STALE
    assert feed.age_s == pytest.approx(0.9)
    feed.stood_still(0.5)
    assert feed.state is IndexState.EXACT, "the router itself did not listen"
    clock.now = 7
    assert feed.age_s == pytest.approx(1.5)
    feed.broken()
    assert feed.age_s == pytest.approx(1.5), "it broke when it fell silent"
    feed.apply(batch(1, stored(HASHES[:2])))
    assert (feed.state, feed.age_s) == (IndexState.EXACT, 0)
    clock.now = 8
    assert feed.state is IndexState.STALE, "the next stream is silent from its first batch on"
    assert feed.restarted(B)
    feed.apply(batch(1, epoch=B, snapshot=True))
    clock.now = 20
    assert feed.state is IndexState.EXACT, "another process, which may send no heartbeats"


def test_a_heartbeat_tells_of_events_that_did_not_come(feed: EventApplier) -> None:
    with pytest.raises(EventGapError):
        feed.heartbeat(beat(3), 1)
    feed.apply(batch(3, stored(HASHES[:2]), snapshot=True))
    feed.heartbeat(beat(3), 1)
    with pytest.raises(EventGapError):
        feed.heartbeat(beat(5), 1)
    assert (feed.state, feed.num_gaps, feed.resume_from(A)) == (IndexState.STALE, 2, 3)
    with pytest.raises(EventGapError):
        feed.heartbeat(beat(3, B), 1)
    assert (feed.state, feed.num_blocks) == (IndexState.OFF, 0)


def test_what_is_too_old_goes(feed: EventApplier, clock: Clock) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    feed.broken()
    clock.now = 9
    feed.tick()
    assert feed.num_blocks == 2
    clock.now = 11
    feed.tick()
    assert (feed.state, feed.usable, feed.num_blocks, feed.resume_from(A)) == (IndexState.OFF, True, 0, 0)


def depth(feed: EventApplier, hashes: list[BlockHash]) -> int:
    return feed._index.match(hashes, 1 << feed.slot).get(feed.slot, 0)


def place(feed: EventApplier, hashes: list[BlockHash]) -> None:
    """A request came and ended."""
    expectation = feed.add_pending(hashes)
    assert expectation is not None
    expectation.release()


def chain_of(first: int, length: int) -> list[BlockHash]:
    return block_hashes([first] * length, 1, root_hash(b"test"))


def test_own_decisions_stand_in_for_events(feed: EventApplier, clock: Clock) -> None:
    feed.restarted(A, num_blocks=10)
    place(feed, chain_of(1, 4))
    assert (feed.state, depth(feed, chain_of(1, 6)), feed.num_decided) == (IndexState.OFF, 4, 1)
    clock.now = 119
    place(feed, chain_of(2, 4))
    clock.now = 121
    feed.tick()
    assert (depth(feed, chain_of(1, 4)), depth(feed, chain_of(2, 4))) == (0, 4), "the first one's time is up"
    for first in (3, 2, 4):
        place(feed, chain_of(first, 4))
    found = [depth(feed, chain_of(first, 4)) for first in (1, 2, 3, 4)]
    assert found == [0, 4, 0, 4], "the one sent longest ago makes room; one sent again is young"
    feed.apply(batch(1, stored(chain_of(5, 2)), snapshot=True))
    assert [depth(feed, chain_of(first, 4)) for first in (2, 4, 5)] == [0, 0, 2], "events are better"
    place(feed, chain_of(6, 4))
    assert (depth(feed, chain_of(6, 4)), feed.num_decided) == (0, 0)


def test_own_decisions_end_with_a_process_that_never_told_anything(feed: EventApplier) -> None:
    assert not feed.restarted(A)
    place(feed, chain_of(1, 4))
    assert not feed.restarted(A)
    assert depth(feed, chain_of(1, 4)) == 4
    assert feed.restarted(B)
    assert (depth(feed, chain_of(1, 4)), feed.num_decided) == (0, 0)
    assert not feed.restarted(B)


def test_own_decisions_end_with_the_process(feed: EventApplier) -> None:
    feed.apply(batch(1, snapshot=True))
    feed.apply(batch(1, epoch=B, snapshot=True))
    feed.restarted(A)
    place(feed, chain_of(1, 4))
    assert depth(feed, chain_of(1, 4)) == 4
    feed.apply(batch(1, epoch=A, snapshot=True))
    feed.restarted(B)
    assert depth(feed, chain_of(1, 4)) == 0
    feed.close()
    assert feed._index._pending._root.children == {}


def test_a_request_in_flight_is_expected_across_a_snapshot(feed: EventApplier) -> None:
    feed.apply(batch(1, snapshot=True))
    expectation = feed.add_pending(HASHES)
    assert expectation is not None
    feed.apply(batch(7, stored(HASHES[:2]), snapshot=True))
    assert depth(feed, HASHES) == len(HASHES)
    expectation.release()
    assert depth(feed, HASHES) == 2


def test_tiers(feed: EventApplier) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), stored(HASHES[2:5], tier="host"), snapshot=True))
    feed.apply(batch(2, stored(HASHES[4:7], tier="remote"), stored(HASHES, tier="no such tier")))

    def found() -> dict[str, int]:
        names, slots = zip(*feed.tiers, strict=True)
        return dict(zip(names, feed._index.match_any(HASHES, slots), strict=True))

    assert found() == {"device": 2, "host": 5, "remote": 7}
    assert depth(feed, HASHES) == 2
    removed = events_pb2.KvEvent(removed=events_pb2.KvBlocksRemoved(block_hashes=HASHES[2:4], tier="host"))
    feed.apply(batch(3, removed, stored(HASHES[2:3])))
    assert found() == {"device": 3, "host": 3, "remote": 3}
    feed.apply(batch(4, events_pb2.KvEvent(cleared=events_pb2.KvCleared(tier="remote"))))
    assert found() == {"device": 3, "host": 3}
    feed.apply(batch(5, events_pb2.KvEvent(cleared=events_pb2.KvCleared())))
    assert found() == {"device": 0}


def test_a_snapshot_in_parts_counts_when_it_is_whole(feed: EventApplier) -> None:
    def part(*events: events_pb2.KvEvent, first: bool = False, more: bool = True) -> events_pb2.KvEventBatch:
        return events_pb2.KvEventBatch(epoch=A, sequence=7, events=events, snapshot=first, more=more)

    feed.apply(part(stored(HASHES[:2]), first=True))
    assert (feed.state, feed.resume_from(A)) == (IndexState.STALE, 0)  # broken off now, it begins anew
    with pytest.raises(EventGapError):
        feed.apply(batch(8, stored(HASHES[5:])))
    feed.apply(part(stored(HASHES[:2]), first=True))
    feed.apply(part(stored(HASHES[2:4])))
    feed.apply(part(stored(HASHES[4:6], tier="disk"), more=False))
    assert (feed.state, feed.resume_from(A), feed.num_blocks) == (IndexState.EXACT, 7, 4)
    assert not feed.apply(part(more=False))
    assert feed.apply(batch(8, stored(HASHES[6:])))


def test_a_silence_that_is_too_long_makes_matches_worthless(feed: EventApplier, clock: Clock) -> None:
    feed.apply(batch(1, stored(HASHES[:2]), snapshot=True))
    feed.heartbeat(beat(1), 0.875)
    clock.now = 9.9
    assert feed.usable, "stale, but not for long"
    clock.now = 10.1
    assert (feed.usable, feed.state) == (False, IndexState.OFF)


class Stream:
    """An event stream that brings what it was given, and ends."""

    def __init__(self, *batches: events_pb2.KvEventBatch) -> None:
        self.batches = batches

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self.batches:
            yield SimpleNamespace(batch=item)

    def cancel(self) -> None:
        pass


async def test_events_of_a_tier_that_is_not_known_are_told(
    feed: EventApplier, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    follower = EventSubscriber(feed, IndexMetrics(registry), 0.0)
    removed = events_pb2.KvEvent(removed=events_pb2.KvBlocksRemoved(block_hashes=HASHES[:1], tier="tape"))
    cleared = events_pb2.KvEvent(cleared=events_pb2.KvCleared(tier="tape"))
    with caplog.at_level(logging.WARNING):
        await follower.follow(
            "d0",
            Stream(
                batch(1, stored(HASHES[:2]), stored(HASHES[2:4], "tape"), snapshot=True),
                batch(2, removed, cleared, stored(HASHES[4:5], "disk")),
                batch(3, *(stored(HASHES[:1], f"made-up-{i}" * 1000) for i in range(100))),
            ),
        )
    assert (feed.num_blocks, feed.num_lower_blocks) == (2, {"disk": 1})
    assert registry.get_sample_value("baton_router_index_unknown_tier_events_total", {"instance": "d0"}) == 103
    assert registry.get_sample_value("baton_router_index_events_total", {"instance": "d0"}) == 2
    told = [record.getMessage() for record in caplog.records]
    assert sum("tape" in line for line in told) == 1, "once, not for each event"
    assert sum(map(len, told)) < 10_000, "names are bounded"
    assert feed.state is not IndexState.OFF


def test_a_burst_of_snapshots_does_not_widen_the_index(clock: Clock) -> None:
    """Each takes new slots, and what the old ones held is swept in the background; a burst must not wait for that."""
    index = PrefixIndex()
    other = index.add()
    index.stored(other, HASHES)
    feed = EventApplier(index, now=clock, stale_limit_s=10)
    for number in range(2000):
        epoch = Epoch(number.to_bytes(16, "big"))
        feed.apply(batch(1, stored(HASHES), stored(HASHES, "host"), epoch=epoch, snapshot=True))
    assert index._table._words <= 2
    assert feed.num_blocks == len(HASHES)
    assert index.match(HASHES, 1 << other | 1 << feed.slot) == {other: len(HASHES), feed.slot: len(HASHES)}
