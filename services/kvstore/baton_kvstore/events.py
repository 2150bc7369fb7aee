"""What the store holds, as KV events that routers follow: which blocks came to and left which tier, in order.

The tiers tell of their changes as they happen, some from threads of their own; here they become numbered batches. What
is kept beside the ring of batches is each tier's set of hashes, for snapshots.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from baton.api.v1 import events_pb2
from baton.kv_cache.events import DISK, HOST, REMOTE, BlocksRemoved, BlocksStored, KVEvent, merge_events
from baton.types import BlockHash, Epoch
from baton.worker.events import KvEventLog
from baton_kvstore.tiers.tiered_store import TieredStore
from baton_kvstore.types import KvFormat

LEVELS = {"memory": HOST, "disk": DISK}
"""What routers know the store's tiers as; all others are remote."""


class StoreEvents:
    """Hears what the tiers hold and serves it to any number of followers. Lives in one event loop.

    Args:
        epoch: Of this process.
        capacity: Batches kept for replay.

    Attributes:
        num_followers: Streams that are open.
    """

    def __init__(self, epoch: Epoch, *, capacity: int = 8192) -> None:
        self._log = KvEventLog(epoch, capacity=capacity)
        self._held: dict[str, dict[BlockHash, int]] = {level: {} for level in (HOST, DISK, REMOTE)}
        self._changes: deque[tuple[Sequence[BlockHash], str, bool]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = False
        self.num_followers = 0

    def start(self, tiers: TieredStore) -> None:
        """Begin to listen; runs in the loop."""
        self._loop = asyncio.get_running_loop()
        tiers.listen(self)

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Hear of a change; any thread, and the tier is locked: only takes note."""
        self._changes.append((hashes, LEVELS.get(tier, REMOTE), present))
        if not self._due and self._loop is not None:
            self._due = True
            self._loop.call_soon_threadsafe(self._flush)

    async def follow(
        self, from_sequence: int, epoch: bytes, *, heartbeat_s: float, gather_s: float = 0.0, packed: bool = False
    ) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield batches from ``from_sequence`` on, until the store ends; see :meth:`KvEventLog.follow`."""
        self.num_followers += 1
        try:
            batches = self._log.follow(
                from_sequence, epoch, self._snapshot, heartbeat_s=heartbeat_s, gather_s=gather_s, packed=packed
            )
            async with aclosing(batches):
                async for batch in batches:
                    yield batch
        finally:
            self.num_followers -= 1

    def close(self) -> None:
        """End every stream."""
        self._log.close()

    async def _snapshot(self) -> tuple[int, list[KVEvent]]:
        self._flush()
        held = [(level, tuple(blocks)) for level, blocks in self._held.items() if blocks]
        return self._log.flush(), [BlocksStored(None, hashes, level) for level, hashes in held]

    def _flush(self) -> None:
        """Make the next batch of what was heard."""
        self._due = False
        events: list[KVEvent] = []
        while self._changes:
            hashes, level, present = self._changes.popleft()
            changed = tuple(name for name in hashes if self._count(level, name, 1 if present else -1))
            if changed:
                events.append(BlocksStored(None, changed, level) if present else BlocksRemoved(changed, level))
        if events:
            self._log.append(merge_events(events))

    def _count(self, level: str, name: BlockHash, by: int) -> bool:
        """Note one holder more or less; whether that makes the block come or go. Two kinds of KV may share a hash."""
        held = self._held[level]
        before = held.get(name, 0)
        after = max(0, before + by)
        if after:
            held[name] = after
        elif before:
            del held[name]
        return (before == 0) != (after == 0)
