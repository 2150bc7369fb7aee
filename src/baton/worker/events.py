"""The log of KV events that routers follow: numbered batches in a bounded ring, and snapshots for late followers.

A message costs a router more than its content, and a busy engine has events at every step. So events are gathered into
a batch until ``GATHER_BLOCKS`` blocks were stored or removed, or until the shortest gathering time of all followers has
passed since the last batch. Followers that set no time get a batch after ``GATHER_S`` and at the end of each request:
until then they count the request's blocks as cached here. Followers that set a time count them for that time longer, so
that their number of batches does not grow with the number of requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from itertools import chain, groupby

from baton.api.v1 import events_pb2
from baton.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KVEvent, net_events
from baton.types import Epoch

GATHER_S = 0.38
"""Longest delay of an event, in seconds, for followers that set no time: less than the 400 ms after which those want a
heartbeat, which the batch replaces."""
GATHER_BLOCKS = 512
"""The blocks of a prompt of 8192 tokens: other routers should know at once what takes seconds to compute."""
_AT_ONCE_S = 0.001
_PART_BLOCKS = 1 << 16
"""Largest number of blocks in one message: 2 MiB of hashes."""
Snapshot = Callable[[], Awaitable[tuple[int, list[KVEvent]]]]


class KvEventLog:
    """Keeps the last batches and serves them to any number of followers. Used from one event loop.

    Args:
        epoch: Epoch of this process.
        capacity: Largest number of batches kept for replay.
        capacity_blocks: Largest number of blocks in all of these: who has missed more gets a snapshot.
        gather_s: Seconds for which events are gathered into a batch for followers that set no time; 0: each
            :meth:`append` is a batch.

    Attributes:
        sequence: Number of the last batch, from 1.
    """

    def __init__(
        self, epoch: Epoch, *, capacity: int = 8192, capacity_blocks: int = 1 << 17, gather_s: float = GATHER_S
    ) -> None:
        self._epoch = epoch
        self._gather_s = gather_s
        self._gathered: list[KVEvent] = []
        self._num_gathered = 0
        self._flushed_at = -math.inf
        self._gather_times: dict[object, float] = {}
        """Gathering time of every follower, in seconds; 0: not set."""
        self._due: asyncio.TimerHandle | None = None
        self._capacity = capacity
        self._capacity_blocks = capacity_blocks
        self._ring: deque[events_pb2.KvEventBatch] = deque()
        self._sizes: deque[int] = deque()
        """Number of blocks of each batch in the ring."""
        self._ring_blocks = 0
        self._changed = asyncio.Event()
        self._closed = False
        self.sequence = 0

    def append(self, events: list[KVEvent]) -> None:
        """Append the events of one engine step."""
        self._gathered += events
        self._num_gathered += count_blocks(events)
        gather_s = min((time_s or self._gather_s for time_s in self._gather_times.values()), default=self._gather_s)
        wait_s = self._flushed_at + gather_s - time.monotonic()
        if self._num_gathered >= GATHER_BLOCKS or wait_s <= 0:
            self.flush()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush_request(self) -> None:
        """Flush at the end of a request, for followers without a gathering time: they stop counting its blocks now."""
        if not all(self._gather_times.values()):
            self.flush()

    def flush(self) -> int:
        """Turn the gathered events into the next batch, or several if they are too many for one.

        Returns:
            Number of the last batch.
        """
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._gathered:
            events = net_events(self._gathered)
            self._gathered = []
            self._num_gathered = 0
            for part in _parts(events):
                self.sequence += 1
                self._append_batch(self._batch(self.sequence, part), count_blocks(part))
            self._flushed_at = time.monotonic()
            self._changed.set()
            self._changed = asyncio.Event()
        return self.sequence

    def _append_batch(self, batch: events_pb2.KvEventBatch, num_blocks: int) -> None:
        """Add a batch to the ring, and drop the oldest that are too many."""
        self._ring.append(batch)
        self._sizes.append(num_blocks)
        self._ring_blocks += num_blocks
        while len(self._ring) > 1 and (len(self._ring) > self._capacity or self._ring_blocks > self._capacity_blocks):
            self._ring.popleft()
            self._ring_blocks -= self._sizes.popleft()

    def close(self) -> None:
        """End all followers' streams."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        self._changed.set()

    async def follow(
        self,
        from_sequence: int,
        epoch: bytes,
        snapshot: Snapshot,
        *,
        heartbeat_s: float = 0.0,
        gather_s: float = 0.0,
        packed: bool = False,
    ) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield batches from ``from_sequence`` on, until :meth:`close`.

        A snapshot comes first when the follower's epoch is another process's, when it asks from the start, or when the
        ring has already dropped the batches it wants; the same happens when it falls behind later.

        Args:
            from_sequence: First batch number wanted; 0: begin with a snapshot.
            epoch: Epoch of the process that the follower knew.
            snapshot: Returns the events that rebuild the cache, and the number of the last batch that they include.
            heartbeat_s: Seconds without a batch after which a heartbeat is sent, and one when the follower has caught
                up; a follower without heartbeats knows that the stream is dead, even if no connection broke. 0: none.
            gather_s: Longest gathering time in seconds, also across the end of requests; 0: see ``GATHER_S``.
            packed: Send neighbours of one kind and tier as one event, with their hashes in one string and no parents.
        """
        position = from_sequence
        silence_s = min(heartbeat_s, _AT_ONCE_S)
        if from_sequence == 0 or epoch != self._epoch or not self._reaches(from_sequence):
            position = 0
        follower = object()
        self._gather_times[follower] = gather_s
        try:
            while not self._closed:
                if position == 0 or not self._reaches(position):
                    sequence, events = await snapshot()
                    parts = list(_parts(events))
                    for i, part in enumerate(parts):
                        batch = self._batch(sequence, part)
                        batch.snapshot = i == 0
                        batch.more = i + 1 < len(parts)
                        yield _packed(batch) if packed else batch
                    position = sequence + 1
                changed = self._changed
                while position <= self.sequence and self._reaches(position):
                    batch = self._ring[position - self.sequence - 1]
                    yield _packed(batch) if packed else batch
                    position += 1
                while position > self.sequence and not await _set_within(changed, silence_s):
                    silence_s = heartbeat_s
                    # New batches are sent first: a heartbeat names the last batch that was sent.
                    if position > self.sequence:
                        yield events_pb2.KvEventBatch(epoch=self._epoch, sequence=self.sequence, heartbeat=True)
        finally:
            del self._gather_times[follower]

    def _reaches(self, sequence: int) -> bool:
        return self.sequence - len(self._ring) < sequence <= self.sequence + 1

    def _batch(self, sequence: int, events: Iterable[KVEvent]) -> events_pb2.KvEventBatch:
        batch = events_pb2.KvEventBatch(epoch=self._epoch, sequence=sequence)
        batch.events.extend(_to_pb(event) for event in events)
        return batch


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, without limit if ``seconds`` is 0; returns whether it was set in time."""
    try:
        async with asyncio.timeout(seconds or None):
            await event.wait()
    except TimeoutError:
        return False
    return True


def count_blocks(events: Iterable[KVEvent]) -> int:
    """Return the number of blocks that events name; a cleared cache counts as one."""
    return sum(1 if isinstance(event, CacheCleared) else len(event.hashes) for event in events)


def _parts(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Split events into messages of bounded size; yields at least one."""
    part: list[KVEvent] = []
    room = _PART_BLOCKS
    for event in events:
        if isinstance(event, CacheCleared):
            part.append(event)
            continue
        at = 0
        while at < len(event.hashes):
            if not room:
                yield part
                part = []
                room = _PART_BLOCKS
            hashes = event.hashes[at : at + room]
            if isinstance(event, BlocksStored):
                part.append(BlocksStored(event.hashes[at - 1] if at else event.parent, hashes, event.tier))
            else:
                part.append(BlocksRemoved(hashes, event.tier))
            at += len(hashes)
            room -= len(hashes)
    yield part


def _packed(batch: events_pb2.KvEventBatch) -> events_pb2.KvEventBatch:
    """Return a batch with as few events and strings as possible."""
    packed = events_pb2.KvEventBatch(
        epoch=batch.epoch, sequence=batch.sequence, snapshot=batch.snapshot, more=batch.more
    )
    for (kind, tier), events in groupby(batch.events, kind_and_tier):
        event = packed.events.add()
        if kind == "cleared":
            event.cleared.tier = tier
            continue
        hashes = chain.from_iterable(getattr(x, kind).block_hashes for x in events)
        changed = event.stored if kind == "stored" else event.removed
        changed.tier = tier
        changed.packed_hashes = b"".join(hashes)
    return packed


def kind_and_tier(event: events_pb2.KvEvent) -> tuple[str, str]:
    """Return which field of an event is set, and its tier; two empty strings for an unknown kind."""
    kind = event.WhichOneof("event")
    return ("", "") if kind is None else (kind, getattr(event, kind).tier)


def _to_pb(event: KVEvent) -> events_pb2.KvEvent:
    match event:
        case BlocksStored(parent, hashes, tier):
            stored = events_pb2.KvBlocksStored(parent_hash=parent or b"", block_hashes=hashes, tier=tier)
            return events_pb2.KvEvent(stored=stored)
        case BlocksRemoved(hashes, tier):
            return events_pb2.KvEvent(removed=events_pb2.KvBlocksRemoved(block_hashes=hashes, tier=tier))
        case CacheCleared(tier):
            return events_pb2.KvEvent(cleared=events_pb2.KvCleared(tier=tier))
