"""One instance's KV events on their way into the index: order, gaps, restarts, how far to trust them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from baton.api.v1 import events_pb2
from baton.hashing import HASH_BYTES
from baton.types import BlockHash, Epoch
from baton_router.index import Expectation, PrefixIndex

_DEVICE_TIERS = frozenset({"", "device"})
"""Only what lies in the instance's own pool is found without loading it first."""


class IndexState(enum.StrEnum):
    """How much the index knows of an instance."""

    EXACT = "exact"
    """Every event up to now was applied."""
    STALE = "stale"
    """The event stream is broken, or the index was full; what is known may be out of date."""
    OFF = "off"
    """Nothing is known."""


class EventGapError(Exception):
    """Events are missing; subscribe again from :attr:`EventFeed.resume_from`."""


class EventFeed:
    """Applies one instance's event batches to its slot of the index.

    Args:
        index: The index.
        now: Monotonic clock, in seconds.
        stale_limit_s: After so long without events a stale slot is not used any more.
    """

    def __init__(self, index: PrefixIndex, *, now: Callable[[], float], stale_limit_s: float = 30.0) -> None:
        self._index = index
        self._now = now
        self._stale_limit_s = stale_limit_s
        self._slot = index.add()
        self._epoch: Epoch | None = None
        self._sequence = 0
        self._known = False
        self._broken_at: float | None = now()
        self._incomplete = False
        self.num_gaps = 0
        self.num_events = 0

    @property
    def slot(self) -> int:
        """The slot of the index that holds this instance's blocks; changes with every snapshot."""
        return self._slot

    @property
    def state(self) -> IndexState:
        """How far the slot can be trusted now."""
        if not self._known or self.age_s > self._stale_limit_s:
            return IndexState.OFF
        return IndexState.EXACT if self._broken_at is None and not self._incomplete else IndexState.STALE

    @property
    def usable(self) -> bool:
        """Whether a match on the slot may count: not if what is known is too old. An empty slot does no harm."""
        return not self._known or self.age_s <= self._stale_limit_s

    @property
    def age_s(self) -> float:
        """Seconds since the event stream broke; 0 while it is whole."""
        return 0.0 if self._broken_at is None else self._now() - self._broken_at

    @property
    def num_blocks(self) -> int:
        """Blocks that the index holds of this instance."""
        return self._index.num_blocks(self._slot)

    def resume_from(self, epoch: Epoch) -> int:
        """Return the sequence number to subscribe from.

        It is the last one applied, not the next: the repeated batch is ignored, but it proves at once that the
        sender still has the same history, even if nothing new ever happens. 0 asks for a snapshot.
        """
        return self._sequence if self._known and epoch == self._epoch else 0

    def restarted(self, epoch: Epoch) -> bool:
        """Tell which process is there now; forgets everything of another one and returns whether it did."""
        if self._epoch is None or epoch == self._epoch:
            return False
        self._reset()
        self._known, self._epoch = False, None
        return True

    def broken(self) -> None:
        """Tell that the event stream ended."""
        if self._broken_at is None:
            self._broken_at = self._now()

    def apply(self, batch: events_pb2.KvEventBatch) -> bool:
        """Apply a batch; returns ``False`` for one that was applied before.

        Raises:
            EventGapError: Events were lost between the last batch and this one, or it comes from another process.
        """
        epoch = Epoch(batch.epoch)
        if batch.snapshot:
            self._reset()
            self._known, self._incomplete, self._epoch = True, False, epoch
        elif not self._known or epoch != self._epoch or batch.sequence > self._sequence + 1:
            self.num_gaps += 1
            self.broken()
            if epoch != self._epoch:
                self._known = False
            raise EventGapError(f"expected batch {self._sequence + 1}, got {batch.sequence}")
        elif batch.sequence <= self._sequence:
            self._broken_at = None
            return False
        self._sequence = batch.sequence
        self._broken_at = None
        for event in batch.events:
            self._apply_event(event)
        self.num_events += len(batch.events)
        return True

    def _apply_event(self, event: events_pb2.KvEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "stored" and event.stored.tier in _DEVICE_TIERS:
            if self._index.stored(self._slot, _hashes(event.stored.block_hashes)):
                self._incomplete = True
        elif kind == "removed" and event.removed.tier in _DEVICE_TIERS:
            self._index.removed(self._slot, _hashes(event.removed.block_hashes))
        elif kind == "cleared":
            self._reset()

    def _reset(self) -> None:
        self._index.drop(self._slot)
        self._slot = self._index.add()

    def expect(self, hashes: Sequence[BlockHash]) -> Expectation | None:
        """Count the whole chain of a request that was just placed here; see :meth:`PrefixIndex.expect`."""
        return self._index.expect(self._slot, hashes)

    def close(self) -> None:
        """Take this instance out of the index."""
        self._index.drop(self._slot)


def _hashes(raw: object) -> list[BlockHash]:
    """Hashes of the right length; anything else could not have come from the hash chain."""
    return [item for item in raw if len(item) == HASH_BYTES]  # type: ignore[attr-defined]
