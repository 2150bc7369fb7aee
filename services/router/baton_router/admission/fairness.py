"""Deficit round robin over tenants: whoever has work gets its share of tokens, whatever the others send.

Tenants take turns. A turn adds ``QUANTUM`` times its weight to the tenant's deficit, and requests leave as long as it
covers their cost. So between any two tenants of one weight that both have work all the time, what left differs by at
most a quantum and two of the largest requests (Shreedhar and Varghese, 1995), however many requests each queues.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from baton_router.admission.waiting import Waiting

QUANTUM = 512.0
"""Tokens per turn of a tenant of weight 1."""


class TenantLine:
    """One tenant's requests of one priority, by deadline and then by arrival."""

    __slots__ = ("cost", "deficit", "items", "quantum")

    def __init__(self, weight: float) -> None:
        self.items: list[Waiting] = []
        self.deficit = 0.0
        self.cost = 0.0
        self.quantum = QUANTUM * weight

    def add(self, item: Waiting) -> None:
        """Take a request in."""
        insort(self.items, item, key=_order)
        self.cost += item.cost

    def remove(self, item: Waiting) -> None:
        """Take a request out."""
        del self.items[bisect_left(self.items, item.order, key=_order)]
        self.cost = self.cost - item.cost if self.items else 0.0

    def cost_before(self, order: tuple[float, int]) -> float:
        """Return the cost of those that go before a place."""
        return sum(item.cost for item in self.items[: bisect_left(self.items, order, key=_order)])


class RoundRobin:
    """The tenants of one priority."""

    __slots__ = ("_fresh", "_lines")

    def __init__(self) -> None:
        self._lines: OrderedDict[str, TenantLine] = OrderedDict()
        self._fresh = True
        """Whether the first in line has not had its quantum yet in this turn."""

    def __len__(self) -> int:
        """Tenants that have work."""
        return len(self._lines)

    def __iter__(self) -> Iterator[tuple[str, TenantLine]]:
        """Go through the tenants, in order of their turns."""
        return iter(self._lines.items())

    @property
    def cost(self) -> float:
        """Everything that waits here."""
        return sum(line.cost for line in self._lines.values())

    def add(self, item: Waiting) -> None:
        """Take a request in; a tenant that had none goes last."""
        line = self._lines.get(item.request.tenant)
        if line is None:
            account = item.request.account
            line = self._lines[item.request.tenant] = TenantLine(1.0 if account is None else account.weight)
        line.add(item)

    def remove(self, item: Waiting) -> None:
        """Take a request out."""
        tenant = item.request.tenant
        line = self._lines[tenant]
        line.remove(item)
        if not line.items:
            self._drop(tenant)

    def take(self) -> Waiting:
        """Take out the request that is next; there must be one."""
        turns = 0
        while True:
            tenant, line = next(iter(self._lines.items()))
            if self._fresh:
                line.deficit += line.quantum
                self._fresh = False
            item = line.items[0]
            if item.cost <= line.deficit:
                line.deficit -= item.cost
                self.remove(item)
                return item
            self._lines.move_to_end(tenant)
            self._fresh = True
            turns += 1
            if turns == len(self._lines):
                self._skip_rounds()
                turns = 0

    def cost_ahead(self, tenant: str, order: tuple[float, int], cost: float) -> float:
        """Return about how much leaves before a request that is not in here: its tenant's own, and others' turns."""
        line = self._lines.get(tenant)
        own = line.cost_before(order) if line is not None else 0.0
        quantum = line.quantum if line is not None else QUANTUM
        turns = (own + cost) / quantum
        return own + sum(min(x.cost, turns * x.quantum) for name, x in self._lines.items() if name != tenant)

    def _skip_rounds(self) -> None:
        """Nobody's deficit was enough in a whole round: go at once through all rounds but the last that are so."""
        missing = min((line.items[0].cost - line.deficit) / line.quantum for line in self._lines.values())
        rounds = max(0, math.ceil(missing) - 1)
        for line in self._lines.values():
            line.deficit += rounds * line.quantum

    def _drop(self, tenant: str) -> None:
        """Forget a tenant without work, deficit and all: it could save up turns otherwise."""
        if next(iter(self._lines)) == tenant:
            self._fresh = True
        del self._lines[tenant]


def _order(item: Waiting) -> tuple[float, int]:
    return item.order
