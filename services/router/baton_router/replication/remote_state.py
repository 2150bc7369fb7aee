"""Pending chains of other routers' requests, counted here like this router's own.

A chain lies in the index under its instance until the other router says that it is over, falls silent, leaves or
restarts, until the instance restarts or leaves, or ``LIFETIME_S`` have passed. What an entry says of an instance that
is not known here, or only as another process, is passed over; a full entry may say it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.hashing import HashChain
from baton.types import Epoch
from baton_router.indexer.event_applier import EventApplier
from baton_router.indexer.prefix_index import PendingChain
from baton_router.registry.instance import epochs_by_applier
from baton_router.registry.registry import Registry
from baton_router.replication.wire import LIFETIME_S, MAX_BYTES, MAX_CHAINS, Entry


@dataclass(slots=True, eq=False)
class _RemoteChain:
    """One chain; without ``pending`` its time is up, and it isn't counted again."""

    pending: PendingChain | None
    events: EventApplier
    epoch: Epoch
    size: int
    until: float

    def end(self) -> None:
        if self.pending is not None:
            self.pending.release()
            self.pending = None


@dataclass(slots=True, eq=False)
class _ReplicaChains:
    """The chains of one replica's process, by their numbers, the oldest first."""

    epoch: str
    chains: dict[int, _RemoteChain] = field(default_factory=dict)
    size: int = 0

    def forget(self, number: int) -> None:
        item = self.chains.pop(number, None)
        if item is not None:
            item.end()
            self.size -= item.size


class RemotePending:
    """The pending chains of all other replicas.

    Args:
        registry: Has the index and the instances.
        now: Monotonic clock.
    """

    def __init__(self, registry: Registry, now: Callable[[], float]) -> None:
        self._registry, self._index, self._now = registry, registry.index, now
        self._replicas: dict[str, _ReplicaChains] = {}

    def __len__(self) -> int:
        """Chains that count."""
        return sum(map(self.count, self._replicas))

    def count(self, replica: str) -> int:
        """Return how many chains of a replica count."""
        known = self._replicas.get(replica)
        return 0 if known is None else sum(x.pending is not None for x in known.chains.values())

    def take(self, entry: Entry) -> None:
        """Follow an entry; it must be newer than the last one of its replica."""
        known = self._replicas.get(entry.replica)
        if known is not None and (entry.left or known.epoch != entry.epoch):
            self.drop(entry.replica)
            known = None
        if entry.left:
            return
        if known is not None:
            ended = known.chains.keys() - set(entry.expected.live) if entry.full else entry.expected.over
            for number in ended:
                known.forget(number)
        if entry.expected.new:
            self._add(entry, known or self._replicas.setdefault(entry.replica, _ReplicaChains(entry.epoch)))

    def drop(self, replica: str) -> None:
        """Forget the chains of a replica."""
        known = self._replicas.pop(replica, None)
        if known is not None:
            for item in known.chains.values():
                item.end()

    def clear(self) -> None:
        """Forget the chains of all other replicas."""
        for replica in list(self._replicas):
            self.drop(replica)

    def tick(self) -> None:
        """Forget what lasted too long, and what instances were to hold that restarted or left."""
        now = self._now()
        epochs = epochs_by_applier(self._registry.instances())
        for known in self._replicas.values():
            for number, item in list(known.chains.items()):
                if epochs.get(item.events) != item.epoch:
                    known.forget(number)
                elif item.until <= now:
                    item.end()

    def _add(self, entry: Entry, known: _ReplicaChains) -> None:
        appliers = {(x.instance_id, x.info.epoch): x.events for x in self._registry.instances() if x.info is not None}
        until = self._now() + LIFETIME_S
        for told in sorted(entry.expected.new, key=lambda x: x.number):
            events, size = appliers.get((told.instance, told.epoch)), len(told.chain)
            if events is None or told.number in known.chains:
                continue
            if len(known.chains) >= MAX_CHAINS or known.size + size > MAX_BYTES:
                break
            pending = self._index.add_pending(events.slot, HashChain(told.chain))
            if pending is not None:
                known.chains[told.number] = _RemoteChain(pending, events, told.epoch, size, until)
                known.size += size
