"""The other replicas, as far as is known: what each has in flight, and when it was heard last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton_router.replication.wire import Entry, Registered, Totals

MAX_PEERS = 256


@dataclass(slots=True)
class Peer:
    """One other replica.

    Attributes:
        heard: When, by this process's clock.
        count: How many replicas it knew, itself included.
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
    """Applies entries.

    Args:
        name: This replica's: its own entries come back and are passed over.
        silent_s: Seconds after which a replica that says nothing loses its share of the load.
        now: Monotonic clock.
    """

    def __init__(self, name: str, silent_s: float, now: Callable[[], float]) -> None:
        self._name, self._silent_s, self._now = name, silent_s, now
        self._peers: dict[str, Peer] = {}

    def all(self) -> list[Peer]:
        """Return all that are remembered, silent ones too."""
        return list(self._peers.values())

    def live(self) -> list[Peer]:
        """Return those that were heard lately."""
        return [x for x in self._peers.values() if not x.silent]

    def apply(self, entry: Entry) -> bool:
        """Take an entry; ``False``: it is one's own or an old one."""
        if entry.replica == self._name:
            return False
        peer = self._peers.get(entry.replica)
        if entry.left:
            if peer is not None and peer.epoch == entry.epoch:
                del self._peers[entry.replica]
                return True
            return False
        if peer is None or peer.epoch != entry.epoch:
            if peer is None and len(self._peers) >= MAX_PEERS:
                return False
            peer = self._peers[entry.replica] = Peer(entry.replica, entry.epoch, self._now())
        if entry.sequence <= peer.sequence:
            return False
        peer.sequence, peer.count, peer.heard, peer.silent = entry.sequence, entry.count, self._now(), False
        if entry.full:
            peer.totals, peer.registered = dict(entry.totals), entry.registered
        else:
            peer.totals.update(entry.totals)
        return True

    def expire(self) -> list[Peer]:
        """Return those that fell silent since the last call."""
        before = self._now() - self._silent_s
        found = [x for x in self._peers.values() if not x.silent and x.heard < before]
        for peer in found:
            peer.silent = True
        return found

    def forget(self, name: str) -> None:
        """Forget a replica for good."""
        self._peers.pop(name, None)

    def in_flight(self, instance: str) -> tuple[int, int]:
        """Return the sequences, and their tokens of work, that live replicas have in flight at an instance."""
        requests = tokens = 0
        for peer in self._peers.values():
            totals = peer.totals.get(instance)
            if totals is not None and not peer.silent:
                requests += totals.requests
                tokens += totals.tokens
        return requests, tokens
