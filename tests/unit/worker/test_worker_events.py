from __future__ import annotations

import asyncio
import time

import pytest

from baton.api.v1 import events_pb2
from baton.errors import UnavailableError
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import BlockHash, Epoch
from baton.worker.context import Admission
from baton.worker.events import KvEventLog, kind_and_tier
from baton_router.indexer.events import EventApplier, IndexState
from baton_router.indexer.prefix_index import PrefixIndex

EPOCH = Epoch(b"e" * 16)


def block(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(32, "little"))


async def no_snapshot() -> tuple[int, list[KVEvent]]:
    raise AssertionError("nobody needs a snapshot")


class Follower:
    """Collects what a router would."""

    def __init__(self, log: KvEventLog, state: list[KVEvent], *, start: int = 0, epoch: bytes = b""):
        self.log, self.state = log, state
        self.stream = log.follow(start, epoch, self.snapshot)
        self.snapshots = 0

    async def snapshot(self):
        self.snapshots += 1
        return self.log.sequence, list(self.state)

    async def take(self, count: int):
        async with asyncio.timeout(240):
            return [await anext(self.stream) for _ in range(count)]


async def test_a_new_follower_gets_a_snapshot_and_then_every_batch():
    log = KvEventLog(EPOCH, gather_s=0)
    log.append([BlocksStored(None, (block(1),))])
    follower = Follower(log, [BlocksStored(None, (block(1),))])
    first = (await follower.take(1))[0]
    assert (first.snapshot, first.sequence, first.epoch) == (True, 1, EPOCH)
    assert first.events[0].stored.block_hashes == [block(1)]
    log.append([BlocksStored(block(1), (block(2), block(3)))])
    log.append([BlocksRemoved((block(3),)), CacheCleared("host")])
    second, third = await follower.take(2)
    assert (second.sequence, third.sequence) == (2, 3)
    assert second.events[0].stored.parent_hash == block(1)
    assert third.events[0].WhichOneof("event") == "cleared"
    assert third.events[1].removed.block_hashes == [block(3)]
    assert not second.snapshot


async def test_a_follower_that_was_away_is_replayed_without_a_snapshot():
    log = KvEventLog(EPOCH, gather_s=0)
    for i in range(5):
        log.append([BlocksStored(None, (block(i),))])
    follower = Follower(log, [], start=3, epoch=EPOCH)
    assert [batch.sequence for batch in await follower.take(3)] == [3, 4, 5]
    assert follower.snapshots == 0


async def test_a_follower_that_is_up_to_date_waits_for_news():
    log = KvEventLog(EPOCH, gather_s=0)
    log.append([CacheCleared()])
    follower = Follower(log, [], start=2, epoch=EPOCH)
    waiting = asyncio.ensure_future(follower.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.append([CacheCleared()])
    assert [batch.sequence for batch in await waiting] == [2]


@pytest.mark.parametrize(("start", "epoch"), [(7, b"other"), (5, EPOCH), (99, EPOCH)])
async def test_who_cannot_be_replayed_gets_a_snapshot(start, epoch):
    log = KvEventLog(EPOCH, capacity=3, gather_s=0)
    for i in range(8):
        log.append([BlocksStored(None, (block(i),))])
    follower = Follower(log, [BlocksStored(None, (block(7),))], start=start, epoch=epoch)
    batch = (await follower.take(1))[0]
    assert batch.snapshot
    assert batch.sequence == 8


async def test_the_ring_is_bounded_by_blocks():
    """Batches of long prompts have hundreds of blocks: by their number alone, the ring would have gigabytes."""
    log = KvEventLog(EPOCH, capacity_blocks=20, gather_s=0)
    for i in range(10):
        log.append([BlocksStored(None, tuple(block(8 * i + j) for j in range(8)))])
    follower = Follower(log, [], start=9, epoch=EPOCH)
    assert [batch.sequence for batch in await follower.take(2)] == [9, 10]
    late = Follower(log, [BlocksStored(None, (block(79),))], start=8, epoch=EPOCH)
    assert (await late.take(1))[0].snapshot
    log.append([BlocksStored(None, tuple(block(100 + j) for j in range(40)))])
    assert [batch.sequence for batch in await follower.take(1)] == [11], "the last one is always kept"


async def test_a_follower_that_falls_behind_the_ring_gets_a_snapshot_and_goes_on():
    log = KvEventLog(EPOCH, capacity=2, gather_s=0)
    follower = Follower(log, [])
    await follower.take(1)
    for i in range(6):
        log.append([BlocksStored(None, (block(i),))])
    batches = await follower.take(1)
    assert batches[0].snapshot
    assert batches[0].sequence == 6
    log.append([CacheCleared()])
    assert [batch.sequence for batch in await follower.take(1)] == [7]


async def test_admission_counts_and_drains():
    admission = Admission()
    with admission.admit():
        assert await admission.drain(0.01) == 1
        with pytest.raises(UnavailableError), admission.admit():
            pass
        waiting = asyncio.ensure_future(admission.drain(5))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == 0
    assert admission.active == 0


async def test_silence_is_filled_with_heartbeats():
    log = KvEventLog(EPOCH, gather_s=0)
    log.append([BlocksStored(None, (block(1),))])
    stream = log.follow(2, EPOCH, Follower(log, []).snapshot, heartbeat_s=0.01)
    async with asyncio.timeout(240):
        beat = await anext(stream)
        assert (beat.heartbeat, beat.sequence, beat.epoch, len(beat.events)) == (True, 1, EPOCH, 0)
        assert (await anext(stream)).heartbeat
        log.append([BlocksStored(block(1), (block(2),))])
        news = await anext(stream)
        assert (news.heartbeat, news.sequence) == (False, 2)
        beat = await anext(stream)
        assert (beat.heartbeat, beat.sequence) == (True, 2)


async def test_large_snapshots_and_batches_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.events._PART_BLOCKS", 4)
    log = KvEventLog(EPOCH, gather_s=0)
    names = tuple(block(i) for i in range(11))
    state: list[KVEvent] = [BlocksStored(None, names[:6]), BlocksStored(None, names[6:], "disk")]
    follower = Follower(log, state)
    parts = await follower.take(3)
    assert [(batch.snapshot, batch.more, batch.sequence) for batch in parts] == [
        (True, True, 0),
        (False, True, 0),
        (False, False, 0),
    ]
    assert [(bytes(e.stored.parent_hash), list(e.stored.block_hashes)) for batch in parts for e in batch.events] == [
        (b"", list(names[:4])),
        (names[3], list(names[4:6])),
        (b"", list(names[6:8])),
        (names[7], list(names[8:])),
    ]
    log.append([BlocksRemoved(names[:5], "disk"), CacheCleared("host")])
    first, second = await follower.take(2)
    assert (first.sequence, second.sequence) == (1, 2)
    assert first.events[0].cleared.tier == "host"
    removed = [event.removed.block_hashes for batch in (first, second) for event in batch.events]
    assert [len(names) for names in removed if names] == [4, 1]


async def test_closing_the_log_ends_every_stream() -> None:
    log = KvEventLog(EPOCH, gather_s=0)
    streams = [log.follow(0, b"", Follower(log, []).snapshot, heartbeat_s=seconds) for seconds in (0.0, 60.0)]
    for stream in streams:
        assert (await anext(stream)).snapshot
    assert (await anext(streams[1])).heartbeat
    waiting = [asyncio.ensure_future(anext(stream, None)) for stream in streams]
    await asyncio.sleep(0)
    log.close()
    async with asyncio.timeout(240):
        assert await asyncio.gather(*waiting) == [None, None]


async def test_behind_the_first_heartbeat_they_come_as_seldom_as_asked_for() -> None:
    log = KvEventLog(EPOCH, gather_s=0)
    stream = log.follow(1, EPOCH, no_snapshot, heartbeat_s=3600)
    async with asyncio.timeout(240):
        assert (await anext(stream)).heartbeat  # at once: who hears it knows that it has all there is
        following = asyncio.ensure_future(anext(stream))
        await asyncio.wait([following], timeout=0.05)  # fifty times as long as to the first one
        assert not following.done()
        log.append([CacheCleared()])
        assert (await following).sequence == 1


async def test_a_heartbeat_names_no_batch_that_was_not_sent() -> None:
    """A batch may be appended when the silence is over and the heartbeat is not yet on its way."""
    log = KvEventLog(EPOCH, gather_s=0)
    log.append([BlocksStored(None, (block(1),))])
    stream = log.follow(2, EPOCH, Follower(log, []).snapshot, heartbeat_s=0.01)
    applier = EventApplier(PrefixIndex(), now=time.monotonic)
    snapshot = events_pb2.KvEventBatch(epoch=EPOCH, sequence=1, snapshot=True)
    assert applier.apply(snapshot)
    async with asyncio.timeout(240):
        assert (await anext(stream)).heartbeat
        for number in range(2, 6):
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.01, log.append, [BlocksStored(None, (block(number),))])
            time.sleep(0.03)  # noqa: ASYNC251 - both are due now, the heartbeat first
            for batch in (await waiting, await anext(stream)):
                if batch.heartbeat:
                    applier.heartbeat(batch, 1.0)
                else:
                    applier.apply(batch)
    assert applier.num_gaps == 0
    assert applier.state is IndexState.EXACT


async def test_who_asks_where_blocks_are_gets_few_events_and_strings() -> None:
    log = KvEventLog(EPOCH, gather_s=0)
    names = [block(i) for i in range(9)]
    state: list[KVEvent] = [BlocksStored(None, tuple(names[:2])), BlocksStored(None, tuple(names[2:3]), "disk")]
    snapshot = Follower(log, state).snapshot
    stream = log.follow(0, b"", snapshot, packed=True)
    plain = log.follow(0, b"", snapshot)
    async with asyncio.timeout(240):
        first, first_whole = await anext(stream), await anext(plain)
        log.append(
            [BlocksRemoved((names[0],)), BlocksStored(None, tuple(names[3:5])), BlocksStored(names[1], (names[5],))]
        )
        log.append([CacheCleared("disk"), BlocksRemoved((names[3],)), BlocksRemoved((names[4],), "host")])
        batches = [first, await anext(stream), await anext(stream)]
        whole = [first_whole, await anext(plain), await anext(plain)]
    assert [[kind_and_tier(x) for x in batch.events] for batch in batches] == [
        [("stored", "device"), ("stored", "disk")],
        [("removed", "device"), ("stored", "device")],
        [("cleared", "disk"), ("removed", "device"), ("removed", "host")],
    ]
    assert [x.packed_hashes for x in (first.events[0].stored, batches[1].events[1].stored)] == [
        b"".join(names[:2]),
        b"".join(names[3:6]),
    ]
    assert first.snapshot
    assert not any(x.stored.block_hashes or x.removed.block_hashes for batch in batches for x in batch.events)
    told = [EventApplier(PrefixIndex(), now=time.monotonic) for _ in range(2)]
    for applier, messages in zip(told, (batches, whole), strict=True):
        assert all(map(applier.apply, messages))
        assert (applier.num_blocks, applier.num_lower_blocks, applier.num_gaps) == (3, {}, 0)
