"""The log of KV events that routers follow: numbered batches in a bounded ring, snapshots for those who fell behind.

A message costs a router more than what it says, and a busy engine has news at every step. So what steps do is gathered
into a batch until ``GATHER_BLOCKS`` have come or gone, or as long as the least patient follower allows since the one
before. Followers that name no time get it after ``GATHER_S`` and at the end of each request: until then they count its
blocks as here. Those that name one count them for that time longer, and a batch costs them the same however many
requests end.
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
"""Longest that an event waits for followers that name no time: less than the 400 ms after which those want a heartbeat,
which it replaces."""
GATHER_BLOCKS = 512
"""As many as a prompt of 8192 tokens has: what costs seconds to compute twice, other routers should know at once."""
_AT_ONCE_S = 0.001
_PART_BLOCKS = 1 << 16
"""Blocks in one message: 2 MiB of hashes."""
Snapshot = Callable[[], Awaitable[tuple[int, list[KVEvent]]]]


class KvEventLog:
    """Keeps the last ``capacity`` batches and serves them to any number of followers. Lives in one event loop.

    Args:
        epoch: Of this process.
        capacity: Batches kept for replay.
        gather_s: Seconds for which events are gathered into a batch, where followers name none; 0: each :meth:`append`
            is a batch.

    Attributes:
        sequence: Number of the last batch.
    """

    def __init__(self, epoch: Epoch, *, capacity: int = 8192, gather_s: float = GATHER_S) -> None:
        self._epoch, self._gather_s = epoch, gather_s
        self._gathered: list[KVEvent] = []
        self._num_gathered = 0
        self._flushed_at = -math.inf
        self._patience: dict[object, float] = {}
        """Of every follower, in seconds; 0: it names none."""
        self._due: asyncio.TimerHandle | None = None
        self._ring: deque[events_pb2.KvEventBatch] = deque(maxlen=capacity)
        self._changed = asyncio.Event()
        self._closed = False
        self.sequence = 0

    def append(self, events: list[KVEvent]) -> None:
        """Add what one engine step did."""
        self._gathered += events
        self._num_gathered += sum(1 if isinstance(event, CacheCleared) else len(event.hashes) for event in events)
        gather_s = min([x or self._gather_s for x in self._patience.values()], default=self._gather_s)
        wait_s = self._flushed_at + gather_s - time.monotonic()
        if self._num_gathered >= GATHER_BLOCKS or wait_s <= 0:
            self.flush()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def request_ended(self) -> None:
        """Have those hear of its blocks now who count them no more."""
        if not all(self._patience.values()):
            self.flush()

    def flush(self) -> int:
        """Make what was gathered the next batch, or more than one where that would be too large.

        Returns:
            The number of the last batch.
        """
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._gathered:
            events, self._gathered, self._num_gathered = net_events(self._gathered), [], 0
            for part in _parts(events):
                self.sequence += 1
                self._ring.append(self._batch(self.sequence, part))
            self._flushed_at = time.monotonic()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        return self.sequence

    def close(self) -> None:
        """End every follower's stream."""
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

        A snapshot comes first when the follower knows another process, asks from the start, or wants batches that the
        ring has already dropped; the same happens when it falls behind later.

        Args:
            from_sequence: First sequence number wanted; 0: begin with a snapshot.
            epoch: The process the follower knew.
            snapshot: Returns the sequence number it stands for, as :meth:`flush` gives it, and the events that rebuild
                the cache.
            heartbeat_s: A heartbeat is sent when the follower has caught up, and then without news for so long: who
                hears none knows that the stream is cut, also where no connection broke. 0: none.
            gather_s: Longest that news may wait for more, also beyond the end of requests. 0: see ``GATHER_S``.
            packed: Neighbours of one kind and tier come as one event, its hashes as one string, without parents.
        """
        position, silence_s = from_sequence, min(heartbeat_s, _AT_ONCE_S)
        if from_sequence == 0 or epoch != self._epoch or not self._reaches(from_sequence):
            position = 0
        follower = object()
        self._patience[follower] = gather_s
        try:
            while not self._closed:
                if position == 0 or not self._reaches(position):
                    sequence, events = await snapshot()
                    parts = list(_parts(events))
                    for i, part in enumerate(parts):
                        batch = self._batch(sequence, part)
                        batch.snapshot, batch.more = i == 0, i + 1 < len(parts)
                        yield _packed(batch) if packed else batch
                    position = sequence + 1
                changed = self._changed
                while position <= self.sequence and self._reaches(position):
                    batch = self._ring[position - self.sequence - 1]
                    yield _packed(batch) if packed else batch
                    position += 1
                while position > self.sequence and not await _set_within(changed, silence_s):
                    silence_s = heartbeat_s
                    # What came since the time was up is sent first: a heartbeat names the last batch that was sent.
                    if position > self.sequence:
                        yield events_pb2.KvEventBatch(epoch=self._epoch, sequence=self.sequence, heartbeat=True)
        finally:
            del self._patience[follower]

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


def _parts(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Divide events into messages of bounded size; there is at least one."""
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
                part, room = [], _PART_BLOCKS
            hashes = event.hashes[at : at + room]
            if isinstance(event, BlocksStored):
                part.append(BlocksStored(event.hashes[at - 1] if at else event.parent, hashes, event.tier))
            else:
                part.append(BlocksRemoved(hashes, event.tier))
            at, room = at + len(hashes), room - len(hashes)
    yield part


def _packed(batch: events_pb2.KvEventBatch) -> events_pb2.KvEventBatch:
    """Return a batch in as few events and strings as there can be."""
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
        changed.tier, changed.packed_hashes = tier, b"".join(hashes)
    return packed


def kind_and_tier(event: events_pb2.KvEvent) -> tuple[str, str]:
    """Return which field of an event is set, and the tier that it is about; of an unknown kind neither."""
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
