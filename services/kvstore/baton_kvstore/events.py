"""KV events of the store for routers: which blocks entered and left which tier, in order.

Tiers report changes as they happen, some from their own threads; here they become numbered batches. Beside the ring of
batches, the set of hashes per level is kept for snapshots.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from baton.api.v1 import events_pb2
from baton.kv_cache.events import DISK, HOST, REMOTE, BlocksRemoved, BlocksStored, KVEvent, merge_events
from baton.types import BlockHash, Epoch
from baton.worker.events import KvEventLog
from baton_kvstore.tiers.tiered_store import TieredStore
from baton_kvstore.types import KvFormat

LEVELS = {"memory": HOST, "disk": DISK}
"""Level of each tier in the routers' events; all other tiers are remote."""


class StoreEvents:
    """Listens to the tiers and streams their changes to any number of followers. Used in one event loop.

    Args:
        epoch: Epoch of this process.
        capacity: Number of batches kept for replay.
    """

    def __init__(self, epoch: Epoch, *, capacity: int = 8192) -> None:
        self._log = KvEventLog(epoch, capacity=capacity)
        self._present: dict[str, dict[BlockHash, int]] = {level: {} for level in (HOST, DISK, REMOTE)}
        self._changes: deque[tuple[Sequence[BlockHash], str, bool]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = False

    def start(self, tiers: TieredStore) -> None:
        """Start to listen; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        tiers.listen(self)

    def __call__(self, kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Queue a change; called from any thread while the tier is locked."""
        self._changes.append((hashes, LEVELS.get(tier, REMOTE), present))
        if not self._due and self._loop is not None:
            self._due = True
            self._loop.call_soon_threadsafe(self._flush)

    def follow(
        self, from_sequence: int, epoch: bytes, *, heartbeat_s: float, gather_s: float = 0.0, packed: bool = False
    ) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield batches from ``from_sequence`` on, until :meth:`close`; see :meth:`KvEventLog.follow`."""
        return self._log.follow(
            from_sequence, epoch, self._snapshot, heartbeat_s=heartbeat_s, gather_s=gather_s, packed=packed
        )

    def close(self) -> None:
        self._log.close()

    async def _snapshot(self) -> tuple[int, list[KVEvent]]:
        self._flush()
        present = [(level, tuple(blocks)) for level, blocks in self._present.items() if blocks]
        return self._log.flush(), [BlocksStored(None, hashes, level) for level, hashes in present]

    def _flush(self) -> None:
        """Append the queued changes to the log as one batch."""
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
        """Count a copy more or less, and return whether the block appeared or disappeared.

        Blocks of two KV formats may have the same hash.
        """
        copies = self._present[level]
        before = copies.get(name, 0)
        after = max(0, before + by)
        if after:
            copies[name] = after
        elif before:
            del copies[name]
        return (before == 0) != (after == 0)
