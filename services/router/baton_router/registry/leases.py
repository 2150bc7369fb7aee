"""Leases of instances that registered themselves, kept by heartbeats."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """An instance's right to be known."""

    lease_id: str
    address: str
    ends_at: float


class Leases:
    """Who registered, and until when.

    Args:
        ttl_s: Life of a lease after registration and after each heartbeat.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, ttl_s: float, now: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self._now = now
        self._by_id: dict[str, Lease] = {}
        self._by_address: dict[str, Lease] = {}

    def __len__(self) -> int:
        """Leases that have not been taken out yet."""
        return len(self._by_id)

    def addresses(self) -> Collection[str]:
        """Return who holds a lease."""
        return self._by_address.keys()

    def grant(self, address: str) -> Lease:
        """Give an address a new lease; one it had before is void."""
        old = self._by_address.get(address)
        if old is not None:
            del self._by_id[old.lease_id]
        lease = Lease(secrets.token_hex(16), address, self._now() + self.ttl_s)
        self._by_id[lease.lease_id] = self._by_address[address] = lease
        return lease

    def renew(self, lease_id: str) -> bool:
        """Take a heartbeat; ``False`` if there is no such lease any more."""
        lease = self._by_id.get(lease_id)
        if lease is None or lease.ends_at <= self._now():
            return False
        lease.ends_at = self._now() + self.ttl_s
        return True

    def end(self, lease_id: str) -> str | None:
        """Give a lease back; returns its address."""
        lease = self._by_id.pop(lease_id, None)
        if lease is None:
            return None
        del self._by_address[lease.address]
        return lease.address

    def drop_address(self, address: str) -> None:
        """Void the lease of an address, if it has one."""
        lease = self._by_address.get(address)
        if lease is not None:
            self.end(lease.lease_id)

    def extend(self, seconds: float) -> None:
        """Move every lease's end back: for a time in which this router could hear no heartbeat."""
        for lease in self._by_id.values():
            lease.ends_at += seconds

    def take_expired(self) -> list[str]:
        """Remove the leases that ran out and return their addresses."""
        now = self._now()
        return [self.end(x.lease_id) or "" for x in list(self._by_id.values()) if x.ends_at <= now]
