"""The log of KV events that routers follow: numbered batches in a bounded ring, snapshots for those who fell behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from baton.api.v1 import events_pb2
from baton.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent
from baton.types import Epoch

TIER = "device"
_AT_ONCE_S = 0.001
Snapshot = Callable[[], Awaitable[tuple[int, list[KVEvent]]]]


class KvEventLog:
    """Keeps the last ``capacity`` batches and serves them to any number of followers. Lives in one event loop.

    Args:
        epoch: Of this process.
        capacity: Batches kept for replay.
    """

    def __init__(self, epoch: Epoch, *, capacity: int = 8192) -> None:
        self._epoch = epoch
        self._ring: deque[events_pb2.KvEventBatch] = deque(maxlen=capacity)
        self._changed = asyncio.Event()
        self.sequence = 0

    def append(self, events: list[KVEvent]) -> None:
        """Add what one engine step did as the next batch."""
        self.sequence += 1
        self._ring.append(self._batch(self.sequence, events))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(
        self, from_sequence: int, epoch: bytes, snapshot: Snapshot, *, heartbeat_s: float = 0.0
    ) -> AsyncIterator[events_pb2.KvEventBatch]:
        """Yield batches from ``from_sequence`` on, for ever.

        A snapshot comes first when the follower knows another process, asks from the start, or wants batches that the
        ring has already dropped; the same happens when it falls behind later.

        Args:
            from_sequence: First sequence number wanted; 0: begin with a snapshot.
            epoch: The process the follower knew.
            snapshot: Returns the sequence number it stands for, and the events that rebuild the cache.
            heartbeat_s: A heartbeat is sent when the follower has caught up, and then without news for so long: who
                hears none knows that the stream is cut, also where no connection broke. 0: none.
        """
        position, silence_s = from_sequence, min(heartbeat_s, _AT_ONCE_S)
        if from_sequence == 0 or epoch != self._epoch or not self._reaches(from_sequence):
            position = 0
        while True:
            if position == 0 or not self._reaches(position):
                sequence, events = await snapshot()
                batch = self._batch(sequence, events)
                batch.snapshot = True
                yield batch
                position = sequence + 1
            changed = self._changed
            while position <= self.sequence and self._reaches(position):
                yield self._ring[position - self.sequence - 1]
                position += 1
            while position > self.sequence and not await _set_within(changed, silence_s):
                silence_s = heartbeat_s
                yield events_pb2.KvEventBatch(epoch=self._epoch, sequence=self.sequence, heartbeat=True)

    def _reaches(self, sequence: int) -> bool:
        return self.sequence - len(self._ring) < sequence <= self.sequence + 1

    def _batch(self, sequence: int, events: Iterable[KVEvent]) -> events_pb2.KvEventBatch:
        batch = events_pb2.KvEventBatch(epoch=self._epoch, sequence=sequence)
        batch.events.extend(_to_pb(event) for event in events)
        return batch


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, for ever if ``seconds`` is 0; ``False``: the time is up."""
    try:
        async with asyncio.timeout(seconds or None):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _to_pb(event: KVEvent) -> events_pb2.KvEvent:
    match event:
        case BlocksStored(parent, hashes):
            stored = events_pb2.KvBlocksStored(parent_hash=parent or b"", block_hashes=hashes, tier=TIER)
            return events_pb2.KvEvent(stored=stored)
        case BlocksRemoved(hashes):
            return events_pb2.KvEvent(removed=events_pb2.KvBlocksRemoved(block_hashes=hashes, tier=TIER))
        case CacheCleared():
            return events_pb2.KvEvent(cleared=events_pb2.KvCleared())
