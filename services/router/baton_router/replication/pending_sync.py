"""Blocks that running requests make instances compute: this router's own, which it publishes, and those of others.

*Published.* A placement only appends to a queue (``PrefixIndex.news``); what is worth publishing is decided here, once
per entry. Most is not: a request that ended meanwhile, or one of whose chain the instance already holds all but a small
part, as its own events have said to all routers. Requests of one chain on one instance are published once. A chain is
over when all of them are, when the instance's events have named its blocks, or after ``LIFETIME_S``. All of it is
bounded, at a thousand requests a second too: the queue, the chains that count, the bytes of an entry. What goes beyond
is not published, the oldest first, and costs the other routers a hint.

*Counted.* A chain of another router lies in the index under its instance until that router says that it is over, falls
silent, leaves or restarts, until the instance restarts or leaves, or ``LIFETIME_S`` have passed. What an entry says of
an instance that is not known here, or only as another process, is passed over; a full entry may say it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.hashing import HASH_BYTES, HashChain
from baton.types import BlockHash, Epoch
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PendingChain
from baton_router.metrics import Counter
from baton_router.registry.instance import Instance, epochs_by_applier
from baton_router.registry.registry import Registry
from baton_router.replication.wire import (
    LIFETIME_S,
    MAX_BYTES,
    MAX_CHAIN_BLOCKS,
    MAX_CHAINS,
    Entry,
    Expected,
    ExpectedNews,
)

MAX_ENTRY_CHAIN_BYTES = 16 * 2**10
"""Of the chains in one entry: at an entry each 10 ms 50,000 blocks a second, and 90 MB if all of the stream's entries
are that large."""
_MIN_NEW_SHARE = 1 / 16
"""A chain is published if the instance lacks this part of it. Less moves match rates by less than loads differ."""
_WAITING = 512
"""Placements that wait to be looked at; far more than come between two entries."""
_CHECKED = 16
"""Published chains that are compared with the instance's events per entry: 0.1 ms."""


@dataclass(slots=True, eq=False)
class _Published:
    """A chain that the others count, as long as one of ``requests`` is not over."""

    expected: Expected
    key: tuple[int, bytes]
    events: EventApplier
    until: float
    requests: list[PendingChain] = field(default_factory=list)

    def is_over(self, now: float) -> bool:
        while self.requests and self.requests[-1].over:
            self.requests.pop()
        return not self.requests or self.until <= now


class PendingPublisher:
    """The chains that were published.

    Args:
        registry: Index and instances.
        count: Counter of published chains.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, registry: Registry, count: Counter, now: Callable[[], float]) -> None:
        self._registry = registry
        self._index = registry.index
        self._count = count
        self._now = now
        self._published: dict[int, _Published] = {}
        self._by_chain: dict[tuple[int, bytes], _Published] = {}
        self._bytes = 0
        self._unchecked: deque[int] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._published)

    def start(self) -> None:
        """Collect placements from now on."""
        self._index.news = deque(maxlen=_WAITING)

    def stop(self) -> None:
        """Forget everything: the other routers cannot be reached."""
        self._index.news = None
        self._published.clear()
        self._by_chain.clear()
        self._unchecked.clear()
        self._bytes = 0

    def news(self, *, full: bool) -> ExpectedNews:
        """Return the chains for the next entry; a full one repeats all of them."""
        over = self._over()
        new, dropped = self._begun()
        if full:
            return ExpectedNews(self._newest(), live=tuple(self._published))
        return ExpectedNews(tuple(new), tuple(over + dropped))

    # --- what is over ---

    def _over(self) -> list[int]:
        now = self._now()
        ended = [number for number, x in self._published.items() if x.is_over(now)]
        for number in ended:
            self._drop(number)
        epochs = epochs_by_applier(self._registry.instances()) if self._unchecked else {}
        for _ in range(min(_CHECKED, len(self._unchecked))):
            number = self._unchecked.popleft()
            item = self._published.get(number)
            if item is None:
                continue
            chain = HashChain(item.expected.chain)
            if epochs.get(item.events) != item.expected.epoch or self._num_held(item.events, chain) == len(chain):
                self._drop(number)
                ended.append(number)
            else:
                item.requests = [x for x in item.requests if not x.over]
                self._unchecked.append(number)
        return ended

    def _num_held(self, events: EventApplier, chain: HashChain) -> int:
        """Return how many leading blocks an instance holds by its own events."""
        return self._index.match_any(chain, [1 << events.slot])[0]

    def _drop(self, number: int) -> None:
        item = self._published.pop(number)
        del self._by_chain[item.key]
        self._bytes -= len(item.expected.chain)

    # --- what is new ---

    def _begun(self) -> tuple[list[Expected], list[int]]:
        """Take from the queue, the latest first, as much as fits into an entry; returns it, and what had to go."""
        queue = self._index.news
        if not queue:
            return [], []
        owners = {self._index.owner(x.events.slot): x for x in self._registry.instances()}
        new: list[Expected] = []
        dropped: list[int] = []
        chains: set[bytes] = set()
        room = MAX_ENTRY_CHAIN_BYTES
        while queue:
            expectation, hashes = queue.pop()
            instance = owners.get(expectation.owner)
            if expectation.over or instance is None or instance.info is None:
                continue
            item = self._begin(expectation, hashes, instance)
            if item is None:
                continue
            size = len(item.expected.chain)
            last = item.key[1]
            if last not in chains:
                if size > room:
                    queue.append((expectation, hashes))
                    break
                room -= size
                chains.add(last)
            dropped += self._make_room(size)
            self._record(item)
            new.append(item.expected)
        return new, dropped

    def _begin(self, expectation: PendingChain, hashes: Sequence[BlockHash], instance: Instance) -> _Published | None:
        """Return what is to be published of an expectation; ``None``: nothing."""
        chain = HashChain.of(hashes)[:MAX_CHAIN_BLOCKS]
        if not chain or instance.info is None:
            return None
        key = expectation.owner, chain.data[-HASH_BYTES:]  # which names all blocks before it, too
        known = self._by_chain.get(key)
        if known is not None:
            known.requests.append(expectation)
            return None
        if len(chain) - self._num_held(instance.events, chain) < _MIN_NEW_SHARE * len(chain):
            return None
        expected = Expected(self._last + 1, instance.instance_id, instance.info.epoch, chain.data)
        return _Published(expected, key, instance.events, self._now() + LIFETIME_S, [expectation])

    def _record(self, item: _Published) -> None:
        number = self._last = item.expected.number
        self._published[number] = self._by_chain[item.key] = item
        self._unchecked.append(number)
        self._bytes += len(item.expected.chain)
        self._count.inc()

    def _make_room(self, size: int) -> list[int]:
        dropped = []
        while self._published and (len(self._published) >= MAX_CHAINS or self._bytes + size > MAX_BYTES):
            dropped.append(next(iter(self._published)))
            self._drop(dropped[-1])
        return dropped

    def _newest(self) -> tuple[Expected, ...]:
        """Return the newest chains that fit into an entry."""
        newest: list[Expected] = []
        chains: set[bytes] = set()
        room = MAX_ENTRY_CHAIN_BYTES
        for item in reversed(self._published.values()):
            last = item.key[1]
            if last not in chains:
                room -= len(item.expected.chain)
                if room < 0:
                    break
                chains.add(last)
            newest.append(item.expected)
        return tuple(newest)


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
        registry: Index and instances.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, registry: Registry, now: Callable[[], float]) -> None:
        self._registry = registry
        self._index = registry.index
        self._now = now
        self._replicas: dict[str, _ReplicaChains] = {}

    def __len__(self) -> int:
        return sum(map(self.count, self._replicas))

    def count(self, replica: str) -> int:
        """Return how many chains of a replica count."""
        known = self._replicas.get(replica)
        return 0 if known is None else sum(x.pending is not None for x in known.chains.values())

    def apply(self, entry: Entry) -> None:
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
        for chain in sorted(entry.expected.new, key=lambda x: x.number):
            events = appliers.get((chain.instance, chain.epoch))
            size = len(chain.chain)
            if events is None or chain.number in known.chains:
                continue
            if len(known.chains) >= MAX_CHAINS or known.size + size > MAX_BYTES:
                break
            pending = self._index.add_pending(events.slot, HashChain(chain.chain))
            if pending is not None:
                known.chains[chain.number] = _RemoteChain(pending, events, chain.epoch, size, until)
                known.size += size
