"""The other replicas, this one's part of each decode instance's capacity, and the rule by which it never places more.

The order of steps is what makes the bound hold: a smaller part takes effect here before Redis is told, a larger one
after Redis has granted it. So what Redis has written down for a replica is never less than what it uses, and the sum of
that never exceeds the capacity. While Redis is away no part grows. After half of ``LEASE_S`` without Redis a
replica places no more than an equal part (capacity / replicas that it knew); so the others, who wait the whole of it,
may take back what a silent replica held beyond that, once the instance itself reports nothing that they cannot account
for. After ``forget_s`` they take back the rest in the same way.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from baton.config.router import RouterConfig
from baton.types import Role
from baton_router.registry.instance import Instance, InstanceInfo
from baton_router.registry.load import LoadTracker
from baton_router.replication.redis_log import Claim
from baton_router.replication.wire import Entry, Registered, Totals

MAX_PEERS = 256

LEASE_S = 10.0
_NO_ROUTER = "\x00"
"""Sorts before every name; stands for replicas that are expected but not there."""


@dataclass(slots=True)
class Peer:
    """One other replica.

    Attributes:
        name: Name of the replica.
        epoch: Id of its process.
        heard: Time of its latest entry by this process's clock, in seconds.
        sequence: Number of its latest entry.
        count: Number of replicas that it knew, itself included.
        totals: Work and units of the replica, by instance.
        registered: Instances that registered with it.
        silent: Whether it has not been heard lately.
    """

    name: str
    epoch: str
    heard: float
    sequence: int = -1
    count: int = 1
    totals: dict[str, Totals] = field(default_factory=dict)
    registered: tuple[Registered, ...] = ()
    silent: bool = False


class Peers:
    """The other replicas, as far as they are known by their entries.

    Args:
        name: Name of this replica, whose own entries are skipped.
        silent_s: Seconds without an entry after which a replica loses its share of the load.
        now: Monotonic clock, in seconds.

    Attributes:
        wishes: Rises whenever some live replica wants another number of units than before, comes or goes.
    """

    def __init__(self, name: str, silent_s: float, now: Callable[[], float]) -> None:
        self._name = name
        self._silent_s = silent_s
        self._now = now
        self._peers: dict[str, Peer] = {}
        self.wishes = 0

    def all(self) -> list[Peer]:
        """Return all known replicas, including silent ones."""
        return list(self._peers.values())

    def live(self) -> list[Peer]:
        """Return the replicas that were heard lately."""
        return [x for x in self._peers.values() if not x.silent]

    def apply(self, entry: Entry) -> bool:
        """Apply an entry; ``False``: it is this replica's own or an old one."""
        if entry.replica == self._name:
            return False
        peer = self._peers.get(entry.replica)
        if entry.left:
            if peer is not None and peer.epoch == entry.epoch:
                self.forget(entry.replica)
                return True
            return False
        if peer is None or peer.epoch != entry.epoch:
            if peer is None and len(self._peers) >= MAX_PEERS:
                return False
            peer = self._peers[entry.replica] = Peer(entry.replica, entry.epoch, self._now())
        if entry.sequence <= peer.sequence:
            return False
        came = peer.silent or peer.sequence < 0
        before = peer.totals
        peer.sequence = entry.sequence
        peer.count = entry.count
        peer.heard = self._now()
        peer.silent = False
        if entry.full:
            peer.totals = dict(entry.totals)
            peer.registered = entry.registered
        else:
            peer.totals = {**peer.totals, **entry.totals}
        known = before.keys() == peer.totals.keys()
        if came or not known or any(before[x].wants != t.wants for x, t in entry.totals.items()):
            self.wishes += 1
        return True

    def expire(self) -> list[Peer]:
        """Return the replicas that fell silent since the last call."""
        before = self._now() - self._silent_s
        silent = [x for x in self._peers.values() if not x.silent and x.heard < before]
        for peer in silent:
            peer.silent = True
            self.wishes += 1
        return silent

    def forget(self, name: str) -> None:
        """Remove a replica."""
        self._peers.pop(name, None)
        self.wishes += 1

    def in_flight(self, instance: str) -> tuple[int, int]:
        """Return the sequences, and their tokens of work, that live replicas have in flight at an instance."""
        requests = tokens = 0
        for peer in self._peers.values():
            totals = peer.totals.get(instance)
            if totals is not None and not peer.silent:
                requests += totals.requests
                tokens += totals.tokens
        return requests, tokens


def replica_name(config: RouterConfig) -> str:
    """Return this router's name among the others.

    Without a configured name and with a port that is chosen at start, every process has a different name.
    """
    return config.replica_name or f"{socket.gethostname()}:{config.grpc_port or secrets.token_hex(4)}"


@dataclass(slots=True)
class CapacityShare:
    """This replica's part of one instance's capacity.

    Attributes:
        capacity: Units of the instance.
        tracker: Load of the instance.
        held: Units recorded in Redis for this replica, or all without Redis.
        wants: Units that this replica could use.
        settled: Inputs of the last computation of its share, if its result is what it holds; else empty.
    """

    capacity: int
    tracker: LoadTracker
    held: int = 0
    wants: int = 0
    settled: tuple[int, ...] = ()


class InstanceCapacity:
    """The parts of all limited instances.

    Args:
        name: Name of this replica.
        per_instance: Maximum sequences in flight per decode instance; 0: its batch size; ``None``: unlimited.
        expected: Minimum number of replicas to divide among.
        shared: Whether there is a Redis; without one this router has all units.
        freed: Called with a number of units that became usable.

    Attributes:
        parts: Shares by instance id; other instances are not limited.
    """

    def __init__(
        self, name: str, per_instance: int | None, expected: int, *, shared: bool, freed: Callable[[int], None]
    ) -> None:
        self.name = name
        self._per_instance = per_instance
        self._expected = expected
        self._shared = shared
        self._freed = freed
        self.parts: dict[str, CapacityShare] = {}

    def set_limit(self, instance: Instance, info: InstanceInfo) -> None:
        """Set an instance's limit, before its first request."""
        if self._per_instance is None or instance.role is not Role.DECODE:
            return
        capacity = self._per_instance or max(1, info.max_num_seqs)
        part = self.parts.get(info.instance_id)
        if part is None:
            part = self.parts[info.instance_id] = CapacityShare(capacity, instance.load)
            if not self._shared:
                part.held = capacity
            elif self._expected:
                part.held = self._shares(info.instance_id, part, {})[self.name]
        elif not self._shared:
            part.held = capacity
        if not self._shared or instance.load.freed is None:  # one that came back keeps the limit that it had
            instance.load.limit = part.held
            instance.load.freed = self._free_one
        part.capacity = capacity
        part.tracker = instance.load

    def keep_only(self, instances: Iterable[str]) -> list[str]:
        """Remove the parts of instances that left and run no request of this router; return their ids."""
        known = set(instances)
        gone = [name for name, part in self.parts.items() if name not in known and not part.tracker.requests]
        for name in gone:
            del self.parts[name]
        return gone

    def claims(self, peers: Peers, waiting: int) -> list[Claim]:
        """Lower limits that must be lowered, and return claims where the wanted units differ from the held ones.

        Args:
            peers: The other replicas.
            waiting: Number of requests that wait for room.
        """
        claims = []
        each = -(-waiting // len(self.parts)) if self.parts else 0
        for name, part in self.parts.items():
            used = part.tracker.requests
            look = (used, each, peers.wishes, part.capacity, part.held, part.tracker.limit)
            if look == part.settled:
                continue
            part.wants = used + each + 1 + used // 4
            others = {x.name: x.totals[name].wants if name in x.totals else 0 for x in peers.live()}
            target = self._shares(name, part, others)[self.name]
            self._limit(part, min(target, part.held))
            units = max(target, used)
            if units != part.held:
                claims.append(Claim(name, part.capacity, units, part.held, used))
                part.held = min(part.held, units)  # even if the answer gets lost, Redis may have noted it
                part.settled = ()
            else:
                part.settled = (*look[:-1], part.tracker.limit)
        return claims

    def holdings(self, *, sure: bool) -> list[Claim]:
        """Return claims of all usable units, for a Redis that may have lost them.

        Args:
            sure: Whether no other replica can have reclaimed them meanwhile; else unused units need a new grant.
        """
        claims = []
        for name, part in self.parts.items():
            used = part.tracker.requests
            if not sure:
                part.tracker.limit = min(part.tracker.limit, used)
            may = max(part.tracker.limit, used)
            part.held = may
            claims.append(Claim(name, part.capacity, may, may, may if sure else used))
        return claims

    def granted(self, claim: Claim, units: int) -> None:
        """Apply Redis' answer to a claim."""
        part = self.parts.get(claim.instance)
        if part is not None:
            part.held = units
            self._limit(part, units)

    def alone(self, count: int) -> None:
        """Limit each part to an equal one: Redis has been away for a while.

        Args:
            count: Number of replicas known last, this one included.
        """
        for part in self.parts.values():
            self._limit(part, min(part.tracker.limit, part.capacity // max(count, self._expected, 1)))

    def _limit(self, part: CapacityShare, limit: int) -> None:
        more = limit - part.tracker.limit
        part.tracker.limit = limit
        if more > 0:
            self._freed(more)

    def _shares(self, name: str, part: CapacityShare, others: dict[str, int]) -> dict[str, int]:
        wants = {self.name: part.wants, **others}
        for number in range(self._expected - len(wants)):
            wants[f"{_NO_ROUTER}{number}"] = 0
        return fair_shares(part.capacity, wants)

    def _free_one(self) -> None:
        self._freed(1)


def fair_shares(capacity: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Divide ``capacity`` among replicas by what each could use.

    Each replica is sure of half of an equal part (at least 1 if there is enough for all), so that none is left with
    nothing when Redis goes away. Of the rest, none gets more than it wants while another wants more and has less;
    what is left when all have what they want is divided equally. The result depends on the arguments alone, so that
    all replicas come to the same; it adds up to ``capacity``.

    Args:
        capacity: Units of the instance.
        wants: Units per replica that it uses or could use.
    """
    names = sorted(wants)
    if not names or capacity <= 0:
        return dict.fromkeys(names, 0)
    count = len(names)
    floor = min(capacity // count, max(1, capacity // (2 * count)))
    shares = dict.fromkeys(names, floor)
    left = capacity - floor * count
    hungry = sorted((name for name in names if wants[name] > floor), key=lambda name: (wants[name], name))
    while hungry and left:
        part = left // len(hungry)
        name = hungry.pop(0)  # wants least; the others share what it leaves
        more = min(wants[name] - floor, part)
        shares[name] += more
        left -= more
    for at, name in enumerate(names):
        shares[name] += left // count + (at < left % count)
    return shares
