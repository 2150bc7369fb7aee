"""KV events of an instance or a KV store: their stream, their order, gaps and restarts, and its part of the index."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import struct
from collections import deque
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Protocol

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from baton.api.v1 import events_pb2
from baton.errors import shown
from baton.hashing import HASH_BYTES, HashChain
from baton.native import address_of
from baton.rpc.errors import readable
from baton.rpc.http2.message_stream import StreamEnded
from baton.types import BlockHash, Epoch
from baton.worker.events import kind_and_tier
from baton_router.indexer.prefix_index import PendingChain, PrefixIndex
from baton_router.metrics import Counter

DEVICE = "device"
LOWER_TIERS = ("host", "disk", "remote")
"""Nearest first. Blocks there must be loaded before use, so they are no match; see :attr:`EventApplier.tiers`."""
STORE_TIERS = {"host": "store", "disk": "store_disk", "remote": "store_remote"}
"""Names of a KV store's tiers for the instances that load from it."""
_KNOWN_TIERS = frozenset({"", DEVICE, *LOWER_TIERS})
_MAX_NAMES = 16
"""Maximum number of remembered names of unknown tiers per sender."""
_ROW = struct.Struct("4d")
"""Slot, time until which it is usable, format, tokens per block: ``struct index_row`` of ``native/block_table.c``."""


class IndexState(enum.StrEnum):
    """How complete the index is for an instance."""

    EXACT = "exact"
    """Every event up to now was applied."""
    STALE = "stale"
    """The event stream is broken or silent, or the index was full; its content may be out of date."""
    OFF = "off"
    """Nothing is known; the router's own decisions stand in."""


class EventGapError(Exception):
    """Events are missing; subscribe again from :attr:`EventApplier.resume_from`."""


class ApproxIndex:
    """Probable content of an instance that sends no events: the latest prompts that this router sent there.

    An approximation: a prompt counts for a limited time, which starts again when it is sent again, and the prompts sent
    longest ago are dropped first when they would not fit into the instance's memory any more.

    Args:
        index: The index.
        now: Monotonic clock, in seconds.
        ttl_s: Seconds that a prompt counts.

    Attributes:
        capacity: Number of blocks of the instance; 0: unknown, no limit.
    """

    def __init__(self, index: PrefixIndex, *, now: Callable[[], float], ttl_s: float) -> None:
        self._index = index
        self._now = now
        self._ttl_s = ttl_s
        self._kept: deque[tuple[float, PendingChain]] = deque()
        self.capacity = 0

    def __len__(self) -> int:
        return len(self._kept)

    def remember(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        """Count a chain as held from now on."""
        pending = self._index.add_pending(slot, hashes) if self._ttl_s > 0 else None
        if pending is None:
            return
        self._kept.append((self._now() + self._ttl_s, pending))
        self.expire()
        while self.capacity and len(self._kept) > 1 and self._index.num_pending(slot) > self.capacity:
            self._drop_oldest()

    def expire(self) -> None:
        """Drop prompts whose time is up."""
        while self._kept and self._kept[0][0] <= self._now():
            self._drop_oldest()

    def clear(self) -> None:
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._kept.popleft()[1].release()


class EventApplier:
    """Applies one instance's event batches to its slots of the index.

    Before the instance has sent events, or when it has sent none for too long, the prompts that this router sent there
    count as cached for a while.

    Args:
        index: The index.
        now: Monotonic clock, in seconds.
        stale_limit_s: Seconds without events after which a stale slot is not used any more.
        decision_ttl_s: Seconds that a prompt sent to an instance without events counts as cached.
        settle_s: Seconds that the chain of a request counts after its end: longer than its last events may take.

    Attributes:
        slot: The slot of the index that holds this instance's blocks; changes with every snapshot.
        lower_slots: The slot of each lower tier that the instance has reported.
        num_gaps: Number of gaps in its events.
        num_heard: Number of batches and heartbeats received.
        num_events: Number of events applied.
        num_unknown: Number of events of unknown tiers, which are ignored.
        unknown_tiers: Names of the first unknown tiers.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        now: Callable[[], float],
        stale_limit_s: float = 30.0,
        decision_ttl_s: float = 120.0,
        settle_s: float = 0.0,
    ) -> None:
        self._index = index
        self._now = now
        self._stale_limit_s = stale_limit_s
        self._settle_s = settle_s
        self._settling: deque[tuple[float, PendingChain]] = deque()
        self.slot = index.add()
        self.lower_slots: dict[str, int] = {}
        self._epoch: Epoch | None = None
        self._process: Epoch | None = None
        self._sequence = 0
        self._watcher: IndexColumns | None = None
        self._at = 0
        self._known = self._closed = False
        self._broken_at: float | None = now()
        self._heard_at = now()
        self.num_heard = 0
        self._silence_s: float | None = None
        self._incomplete = False
        self._partial = False
        self._decisions = ApproxIndex(index, now=now, ttl_s=decision_ttl_s)
        self.num_gaps = 0
        self.num_events = self.num_unknown = 0
        self.unknown_tiers: set[str] = set()

    @property
    def tiers(self) -> tuple[tuple[str, int], ...]:
        """Tiers that the instance has reported, nearest first, each with a mask of its slots and all nearer ones.

        With :meth:`PrefixIndex.match_any` they give the leading blocks in each tier or nearer.
        """
        slots = 1 << self.slot
        tiers = [(DEVICE, 1 << self.slot)]
        for tier in LOWER_TIERS:
            if tier in self.lower_slots:
                slots |= 1 << self.lower_slots[tier]
                tiers.append((tier, slots))
        return tuple(tiers)

    @property
    def num_lower_blocks(self) -> dict[str, int]:
        """Number of blocks in the index of each reported lower tier."""
        return {tier: self._index.num_blocks(slot) for tier, slot in self.lower_slots.items()}

    @property
    def state(self) -> IndexState:
        """How complete the slot is now."""
        if not self._known:
            return IndexState.OFF
        cut_at = self._cut_at
        if cut_at is not None and self._now() - cut_at > self._stale_limit_s:
            return IndexState.OFF
        exact = cut_at is None and not self._incomplete and not self._partial
        return IndexState.EXACT if exact else IndexState.STALE

    @property
    def usable(self) -> bool:
        """Whether a match on the slot may count: not if its content is too old. An empty slot does no harm."""
        return self._now() <= self.usable_until

    @property
    def usable_until(self) -> float:
        """Time until which the slot is usable without another message; ``-inf``: it was released."""
        if self._closed:
            return -math.inf
        if not self._known:
            return math.inf
        if self._broken_at is not None:
            return self._broken_at + self._stale_limit_s
        return math.inf if self._silence_s is None else self._heard_at + max(self._silence_s, self._stale_limit_s)

    @property
    def owner(self) -> int:
        """Owner of the slot, see :meth:`PrefixIndex.owner`; 0: it was released."""
        return 0 if self._closed else self._index.owner(self.slot)

    @property
    def clock(self) -> Callable[[], float]:
        return self._now

    def watch(self, watcher: IndexColumns, at: int) -> None:
        """Report changes of slots and of :attr:`usable_until` to a watcher, which replaces an earlier one.

        Args:
            watcher: The watcher.
            at: Position of this part in the watcher.
        """
        if self._watcher is not None:
            self._watcher.over = True
        self._watcher = watcher
        self._at = at

    def _changed(self) -> None:
        if self._watcher is not None:
            self._watcher.changed.add(self._at)

    @property
    def age_s(self) -> float:
        """Seconds since the event stream broke or fell silent; 0 while it is whole."""
        cut_at = self._cut_at
        return 0.0 if cut_at is None else self._now() - cut_at

    @property
    def _cut_at(self) -> float | None:
        if self._broken_at is None and self._silence_s is not None and self._now() - self._heard_at > self._silence_s:
            return self._heard_at
        return self._broken_at

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the index of this instance."""
        return self._index.num_blocks(self.slot)

    @property
    def num_decided(self) -> int:
        """Prompts that stand in for events."""
        return len(self._decisions)

    def resume_from(self, epoch: Epoch) -> int:
        """Return the sequence number to subscribe from.

        It is the last one applied, not the next: the repeated batch is ignored, but it proves at once that the
        sender still has the same history, even if nothing new ever happens. 0 asks for a snapshot.
        """
        return self._sequence if self._known and not self._partial and epoch == self._epoch else 0

    def restarted(self, epoch: Epoch, num_blocks: int = 0) -> bool:
        """Set the current process and its number of blocks; return whether it is another one than before.

        Everything from an earlier process is dropped.
        """
        self._decisions.capacity = num_blocks
        before = self._process
        self._process = epoch
        if epoch == self._epoch or (self._epoch is None and before in (None, epoch)):
            return False
        self._forget()
        self._decisions.clear()
        self._end_settling(math.inf)
        self._index.drop(self.slot)
        self.slot = self._index.add()
        self._epoch = self._silence_s = None
        self._changed()
        return True

    def broken(self) -> None:
        """Record that the event stream ended."""
        self._broken_at = self._now() if self._cut_at is None else self._cut_at
        self._changed()

    def stood_still(self, seconds: float) -> None:
        """Record that the router itself stood still: that is no silence of the instance."""
        self._heard_at += seconds
        self._changed()

    def tick(self) -> None:
        """Drop what is too old to be used."""
        self._decisions.expire()
        self._end_settling(self._now())
        if self._known and not self.usable:
            self._forget()

    def heartbeat(self, batch: events_pb2.KvEventBatch, silence_s: float) -> None:
        """Apply a heartbeat; from now on, also on later streams, a silence of ``silence_s`` makes the index stale.

        Raises:
            EventGapError: The instance sent events that did not arrive.
        """
        if not self._known or batch.epoch != self._epoch or batch.sequence != self._sequence:
            self._gap(Epoch(batch.epoch), f"batch {batch.sequence} did not come, the last was {self._sequence}")
        self._hear()
        self._silence_s = silence_s

    def apply(self, batch: events_pb2.KvEventBatch) -> bool:
        """Apply a batch; returns ``False`` for one that was applied before.

        Raises:
            EventGapError: Events were lost between the last batch and this one, or it comes from another process.
        """
        epoch = Epoch(batch.epoch)
        if batch.snapshot:
            self._forget()
            self._decisions.clear()
            self._known = True
            self._epoch = epoch
        elif self._partial and epoch == self._epoch and batch.sequence == self._sequence:
            pass  # the snapshot's next part
        elif not self._known or self._partial or epoch != self._epoch or batch.sequence > self._sequence + 1:
            self._gap(epoch, f"expected batch {self._sequence + 1}, got {batch.sequence}")
        elif batch.sequence <= self._sequence:
            self._hear()
            return False
        self._sequence = batch.sequence
        self._partial = batch.more
        self._hear()
        unknown = self.num_unknown
        for (kind, tier), events in groupby(batch.events, kind_and_tier):
            self._apply_alike(kind, tier, list(events))
        self.num_events += len(batch.events) - (self.num_unknown - unknown)
        return True

    def _hear(self) -> None:
        self._heard_at = self._now()
        self._broken_at = None
        self.num_heard += 1
        self._changed()

    def _gap(self, epoch: Epoch, what: str) -> None:
        self.num_gaps += 1
        self.broken()
        if epoch != self._epoch:
            self._forget()
        raise EventGapError(what)

    def _apply_alike(self, kind: str, tier: str, events: Sequence[events_pb2.KvEvent]) -> None:
        """Apply consecutive events of one kind and tier, with one call of the table."""
        if tier not in _KNOWN_TIERS:
            self.num_unknown += len(events)
            if len(self.unknown_tiers) < _MAX_NAMES:
                self.unknown_tiers.add(shown(tier))
        elif kind == "stored":
            slot = self._slot_of(tier, make=True)
            if slot is not None and self._index.stored(slot, _hashes([x.stored for x in events])):
                self._incomplete = True
        elif kind == "removed":
            slot = self._slot_of(tier)
            if slot is not None:
                self._index.removed(slot, _hashes([x.removed for x in events]))
        elif kind == "cleared":
            if tier in ("", DEVICE):
                self.slot = self._index.replace(self.slot)
            for lower in [name for name in self.lower_slots if tier in ("", name)]:
                self._index.drop(self.lower_slots.pop(lower))

    def _slot_of(self, tier: str, *, make: bool = False) -> int | None:
        """Return a tier's slot; ``None``: it has none."""
        if tier in ("", DEVICE):
            return self.slot
        if make and tier not in self.lower_slots:
            self.lower_slots[tier] = self._index.add()
        return self.lower_slots.get(tier)

    def lost(self) -> None:
        """Record that the process is gone, and its blocks with it."""
        self.broken()
        if self._known:
            self._forget()

    def _forget(self) -> None:
        """Drop the instance's reported blocks; pending ones are kept."""
        self.slot = self._index.replace(self.slot)
        for slot in self.lower_slots.values():
            self._index.drop(slot)
        self.lower_slots.clear()
        self._known = self._incomplete = self._partial = False
        self._changed()

    def add_pending(self, hashes: Sequence[BlockHash]) -> PendingChain | None:
        """Count the whole chain of a request that was just placed here; see :meth:`PrefixIndex.add_pending`."""
        index = self._index
        if not self._known:
            self._decisions.remember(self.slot, hashes)
        pending = index.add_pending(self.slot, hashes)
        if index.news is not None and pending is not None:
            index.news.append((pending, hashes))
        return pending

    def settle(self, pending: PendingChain) -> None:
        """Release the chain of a request that was computed here, once its events must have arrived.

        Until then only the chain shows its blocks: instances batch events, also beyond a request's end.
        """
        if self._settle_s and self._known:
            self._settling.append((self._now() + self._settle_s, pending))
        else:
            pending.release()

    def _end_settling(self, now: float) -> None:
        while self._settling and self._settling[0][0] <= now:
            self._settling.popleft()[1].release()

    def close(self) -> None:
        """Remove this instance from the index."""
        self._decisions.clear()
        self._settle_s = 0.0
        self._closed = True
        self._changed()
        self._end_settling(math.inf)
        for slot in (self.slot, *self.lower_slots.values()):
            self._index.drop(slot)


class IndexColumns:
    """Parts of the index as rows; only parts that changed are read again.

    Args:
        appliers: Parts of the index, in the order of the rows.
        formats: Number of each part's block format.
        block_sizes: Tokens per block of each format.

    Attributes:
        changed: Positions of parts that changed since they were read.
        over: Whether later columns watch one of the parts, so that these are outdated.
        lower: Positions of instances that have reported slower tiers.
    """

    def __init__(self, appliers: Sequence[EventApplier], formats: Sequence[int], block_sizes: Sequence[int]) -> None:
        self._appliers = appliers
        self._formats = formats
        self._block_sizes = block_sizes
        self.changed = set(range(len(appliers)))
        self.over = False
        self.lower: set[int] = set()
        self._rows = np.zeros((len(appliers), 4))
        self._memory = self._rows.reshape(-1).view(np.uint8).data
        self._address = address_of(self._rows)
        self._owners = [0] * len(appliers)
        self._place: dict[int, int] = {}
        for at, applier in enumerate(appliers):
            applier.watch(self, at)

    def matched_tokens(self, index: PrefixIndex, chains: Mapping[int, HashChain]) -> npt.NDArray[np.float64]:
        """Return how many leading prompt tokens each instance holds, those that are pending for it included.

        Args:
            index: The index.
            chains: Hash chains of the prompt, by format; instances of other formats hold nothing.

        Returns:
            float64, an entry per row.
        """
        if self.changed:
            self._read()
        out = np.zeros(len(self._appliers))
        if self._appliers:
            now = self._appliers[0].clock()
            where = address_of(out)
            for number, chain in chains.items():
                index.match_rows(chain, (self._address, out.size), (float(number), now), self._place.get, where)
        return out

    def _read(self) -> None:
        while self.changed:
            at = self.changed.pop()
            applier = self._appliers[at]
            number = self._formats[at]
            _ROW.pack_into(
                self._memory,
                at * _ROW.size,
                applier.slot,
                applier.usable_until,
                number,
                self._block_sizes[number],
            )
            (self.lower.add if applier.lower_slots else self.lower.discard)(at)
            owner = applier.owner
            known = self._owners[at]
            if owner != known:
                if self._place.get(known) == at:
                    del self._place[known]
                self._owners[at] = owner
                if owner:
                    self._place[owner] = at


def _hashes(events: Sequence[events_pb2.KvBlocksStored | events_pb2.KvBlocksRemoved]) -> HashChain:
    """Return the hashes of the right length; others cannot be of a hash chain."""
    packed = [x.packed_hashes[: len(x.packed_hashes) // HASH_BYTES * HASH_BYTES] for x in events]
    raw = list(chain.from_iterable(x.block_hashes for x in events))
    if raw:
        packed.append(b"".join(raw))
        if len(packed[-1]) != HASH_BYTES * len(raw):
            packed[-1] = b"".join(x for x in raw if len(x) == HASH_BYTES)
    return HashChain(b"".join(packed))


log = logging.getLogger(__name__)

SILENT_BEATS = 1.5
"""Silence, in heartbeat intervals, after which an event stream counts as cut."""
GATHER_BEATS = 0.95
"""Heartbeat intervals that events may be batched: then they take the place of heartbeats."""
_LOST_BEATS = 8
"""Silence, in heartbeat intervals, after which the stream is opened again."""


class IndexMetrics:
    """Counts events and gaps, per instance or KV store.

    Args:
        registry: Registry to add the metrics to.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events = Counter("baton_router_index_events", "KV events applied", ["instance"], registry)
        self.gaps = Counter("baton_router_index_sequence_gaps", "Gaps in KV events", ["instance"], registry)
        self.unknown = Counter(
            "baton_router_index_unknown_tier_events", "KV events of tiers not known here", ["instance"], registry
        )

    def remove(self, instance: str) -> None:
        """Remove the series of an instance that left."""
        for counter in (self.events, self.gaps, self.unknown):
            counter.remove(instance)


class _Answer(Protocol):
    @property
    def batch(self) -> events_pb2.KvEventBatch: ...


class EventStream(AsyncIterable[_Answer], Protocol):
    """A call that streams events."""

    def cancel(self) -> object: ...


class EventSubscriber:
    """Reads streams of events into an instance's part of the index.

    Args:
        events: The instance's part of the index.
        metrics: Counters of events and gaps.
        beat_s: Seconds between requested heartbeats; 0: none.

    Attributes:
        heard: Whether the latest stream delivered anything.
    """

    def __init__(self, events: EventApplier, metrics: IndexMetrics, beat_s: float) -> None:
        self._events = events
        self._metrics = metrics
        self._beat_s = beat_s
        self.heard = False
        self._logged_tiers: set[str] = set()

    async def follow(self, name: str, call: EventStream) -> bool:
        """Follow one stream until it ends; ``False``: the peer has no events.

        Args:
            name: Name of the peer, for log and metrics.
            call: The stream, from :meth:`EventApplier.resume_from` on.
        """
        self.heard = False
        try:
            async with asyncio.timeout(None) as silence:
                async for answer in call:
                    self._apply(name, readable(answer).batch, silence)
                    self.heard = True
        except TimeoutError:
            log.warning("KV events of %s fell silent", name)
        except EventGapError as error:
            log.warning("KV events of %s have a gap: %s", name, error)
            self._metrics.gaps.labels(name).inc()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            log.warning("KV events of %s broke: %s: %s", name, error.code().name, error.details())
        except StreamEnded as end:
            if end.code is grpc.StatusCode.UNIMPLEMENTED:
                return False
            log.warning("KV events of %s broke: %s: %s", name, end.code.name, end.message)
        finally:
            call.cancel()
            self._events.broken()
        return True

    def _apply(self, name: str, batch: events_pb2.KvEventBatch, silence: asyncio.Timeout) -> None:
        """Apply a batch. Once there are heartbeats, ``silence`` ends a stream that delivers nothing."""
        if batch.heartbeat:
            self._events.heartbeat(batch, SILENT_BEATS * self._beat_s)
        else:
            before = self._events.num_events
            unknown = self._events.num_unknown
            if self._events.apply(batch):
                self._metrics.events.labels(name).inc(self._events.num_events - before)
            if self._events.num_unknown > unknown:
                self._metrics.unknown.labels(name).inc(self._events.num_unknown - unknown)
                self._log_unknown(name)
        end = silence.when()
        if batch.heartbeat or end is not None:
            later = asyncio.get_running_loop().time() + _LOST_BEATS * self._beat_s
            if end is None or later - end > self._beat_s:  # a new timer costs more than a beat is worth
                silence.reschedule(later)

    def _log_unknown(self, name: str) -> None:
        """Log once for each unknown tier that its blocks are ignored."""
        new = self._events.unknown_tiers - self._logged_tiers
        if new:
            self._logged_tiers |= new
            log.warning(
                "KV events of %s are of tiers that this router does not know, their blocks count nowhere: %s",
                name,
                ", ".join(sorted(new)),
            )
