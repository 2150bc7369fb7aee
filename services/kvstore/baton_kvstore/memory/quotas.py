"""Per-tenant quotas: which tenant owns each block in memory, and which blocks a tenant above its quota loses.

A tenant above its quota loses its own coldest blocks, never another tenant's. Below its quota it competes with all
other tenants for the memory; if all quotas together fit the memory, tenants never affect each other. Within a tenant
the order is least recently used, whatever policy evicts from the store as a whole.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from baton.types import Tenant
from baton_kvstore.memory.pool import Entry, Share

NO_TENANT = ""
_MAX_IDLE_SHARES = 1024
"""Number of tenants without blocks that are remembered."""


class Quotas:
    """The shares of all tenants.

    Args:
        default_bytes: Memory quota of tenants whose requests set none; 0: unlimited.
        default_disk_bytes: Disk quota of tenants whose requests set none; 0: unlimited.
    """

    def __init__(self, default_bytes: int = 0, default_disk_bytes: int = 0) -> None:
        self._default = default_bytes
        self._disk_default = default_disk_bytes
        self._shares: OrderedDict[str, Share] = OrderedDict()

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def share_of(self, tenant: Tenant | None) -> Share:
        """Return a tenant's share and update its quotas; ``None``: the share of blocks without a tenant."""
        name = NO_TENANT if tenant is None else tenant.id
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name)
            if len(self._shares) > _MAX_IDLE_SHARES:
                self._forget_idle()
        if tenant is not None:
            share.quota_bytes = tenant.kv_bytes or self._default
            share.disk_quota_bytes = tenant.kv_disk_bytes or self._disk_default
        return share

    def unsaved(self) -> Iterator[Entry]:
        """Yield blocks that quotas will soon evict and no lower tier holds."""
        for share in self:
            yield from share.unsaved()

    def find(self, name: str) -> Share | None:
        """Return the share of a known tenant, or ``None``."""
        return self._shares.get(name)

    def largest(self, count: int) -> list[Share]:
        """Return the tenants with the most bytes in memory, the largest first."""
        return heapq.nlargest(count, self, key=lambda share: share.used_bytes)

    def _forget_idle(self) -> None:
        """Forget the oldest tenants without blocks, so that tenant names cannot fill the memory."""
        surplus = len(self._shares) - _MAX_IDLE_SHARES
        idle = [name for name, share in self._shares.items() if not (share.entries or share.disk_bytes)][:-1]
        for name in idle[:surplus]:
            del self._shares[name]
