"""The router's queue: classes of priority, tenants that take turns within each, bounds in requests and in tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from baton_router.admission.fairness import RoundRobin
from baton_router.admission.waiting import Waiting


@dataclass(slots=True)
class Held:
    """What somebody has in the queue."""

    requests: int = 0
    tokens: int = 0

    def add(self, item: Waiting, sign: int) -> None:
        """Count a request that came (1) or went (-1)."""
        self.requests += sign
        self.tokens += sign * item.tokens


class FairQueue:
    """Requests that wait. A class of lower priority gets nothing while one of higher priority has work.

    Args:
        max_requests: Requests at most.
        max_tokens: Prompt tokens at most; a single request may have more.
        tenant_share: How much of both one tenant may have.
    """

    def __init__(self, max_requests: int, max_tokens: int, tenant_share: float) -> None:
        self._max_requests, self._max_tokens, self._share = max_requests, max_tokens, tenant_share
        self._classes: dict[int, RoundRobin] = {}
        self._priorities: list[int] = []
        self._by_start: list[Waiting] = []
        self._tenants: dict[str, Held] = {}
        self._held = Held()

    def __len__(self) -> int:
        """Requests that wait."""
        return self._held.requests

    def __iter__(self) -> Iterator[Waiting]:
        """Go through all that wait, those first that must start first."""
        return iter(self._by_start)

    @property
    def tokens(self) -> int:
        """Their prompt tokens."""
        return self._held.tokens

    @property
    def cost(self) -> float:
        """Everything that waits, as fairness counts it."""
        return sum(turns.cost for turns in self._classes.values())

    def tenants(self) -> dict[str, Held]:
        """Return what each tenant has here."""
        return self._tenants

    def tenant_cost(self, tenant: str) -> float:
        """Return what one tenant has here, as fairness counts it."""
        return sum(line.cost for turns in self._classes.values() for name, line in turns if name == tenant)

    # --- bounds ---

    def over_share(self, tenant: str, tokens: int) -> bool:
        """Whether one more request would be more than a tenant may have."""
        held = self._tenants.get(tenant)
        if held is None:
            return False
        most = self._max_requests * self._share, self._max_tokens * self._share
        return held.requests + 1 > most[0] or held.tokens + tokens > most[1]

    def full(self, tokens: int, *, without: Waiting | None = None) -> bool:
        """Whether there is no room for one more request, or would be none if another one went."""
        requests, held = self._held.requests, self._held.tokens
        if without is not None:
            requests, held = requests - 1, held - without.tokens
        return requests + 1 > self._max_requests or (requests > 0 and held + tokens > self._max_tokens)

    def victim(self, tenant: str, priority: int) -> Waiting | None:
        """Return who should go so that a newcomer fits; ``None``: nobody has less right to be here.

        That is the last request of the lowest class, if that is below the newcomer's, or of the tenant that has most in
        the newcomer's class, if that is more than the newcomer's tenant has.
        """
        if not self._priorities or self._priorities[-1] < priority:
            return None
        lowest = self._priorities[-1]
        largest, line = max(self._classes[lowest], key=lambda pair: len(pair[1].items))
        if lowest == priority:
            held = self._tenants.get(tenant)
            mine = held.requests if held is not None else 0
            if largest == tenant or self._tenants[largest].requests <= mine + 1:
                return None
        return line.items[-1]

    # --- in and out ---

    def add(self, item: Waiting) -> None:
        """Take a request in; the bounds are the caller's to look at."""
        priority = item.request.priority
        turns = self._classes.get(priority)
        if turns is None:
            turns = self._classes[priority] = RoundRobin()
            insort(self._priorities, priority)
        turns.add(item)
        item.queued = True
        insort(self._by_start, item, key=_start)
        self._held.add(item, 1)
        self._tenants.setdefault(item.request.tenant, Held()).add(item, 1)

    def remove(self, item: Waiting) -> None:
        """Take a request out, whoever's turn it is."""
        self._classes[item.request.priority].remove(item)
        self._forget(item)

    def take(self) -> Waiting:
        """Take out the request that is next; there must be one."""
        item = self._classes[self._priorities[0]].take()
        self._forget(item)
        return item

    def take_late(self, now: float) -> list[Waiting]:
        """Take out the requests that should have started by now."""
        late = []
        while self._by_start and self._by_start[0].start_by < now:
            late.append(self._by_start[0])
            self.remove(self._by_start[0])
        return late

    def cost_ahead(self, item: Waiting) -> float:
        """Return about how much leaves before a request that is not in here."""
        mine, ahead = item.request.priority, 0.0
        for priority in self._priorities:
            if priority > mine:
                break
            turns = self._classes[priority]
            ahead += turns.cost if priority < mine else turns.cost_ahead(item.request.tenant, item.order, item.cost)
        return ahead

    def _forget(self, item: Waiting) -> None:
        item.queued = False
        priority, tenant = item.request.priority, item.request.tenant
        if not len(self._classes[priority]):
            del self._classes[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
        del self._by_start[bisect_left(self._by_start, _start(item), key=_start)]
        self._held.add(item, -1)
        held = self._tenants[tenant]
        held.add(item, -1)
        if not held.requests:
            del self._tenants[tenant]


def _start(item: Waiting) -> tuple[float, int]:
    return item.start_by, item.number
