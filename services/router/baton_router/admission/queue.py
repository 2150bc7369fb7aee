"""The router's queue: classes of priority, tenants that take turns within each, bounds in requests and in tokens."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton_router.types import RoutedRequest

QUANTUM = 512.0
"""Tokens per turn of a tenant of weight 1."""


@dataclass(eq=False, slots=True)
class Waiting:
    """One request that waits.

    Attributes:
        request: What waits.
        number: Rises with every request: order of arrival.
        arrived: When it came.
        deadline: When its first token is due; infinite: it has none.
        start_by: When it must start at the latest; afterwards it is refused.
        cost: What it counts in the queue's fairness: prompt tokens that no instance holds, and output tokens expected.
        future: Ends the wait: with ``None`` it may start, with an error it may not.
        queued: Whether it is in the queue.
        granted: Whether it was told to start.
        priority: Its class: the request's own, or a higher one when it has waited long.
    """

    request: RoutedRequest
    number: int
    arrived: float
    deadline: float
    start_by: float
    cost: float
    future: asyncio.Future[BatonError | None]
    queued: bool = False
    granted: bool = False
    priority: int = field(init=False)

    def __post_init__(self) -> None:
        self.priority = self.request.priority

    @property
    def tokens(self) -> int:
        """Prompt tokens that it keeps in memory."""
        return len(self.request.prompt_token_ids)

    @property
    def order(self) -> tuple[float, int]:
        """Its place among those of its tenant: by deadline, then by arrival."""
        return self.deadline, self.number


class TenantLine:
    """One tenant's requests of one priority, by deadline and then by arrival."""

    __slots__ = ("cost", "deficit", "items", "quantum")

    def __init__(self, weight: float) -> None:
        self.items: list[Waiting] = []
        self.deficit = 0.0
        self.cost = 0.0
        self.quantum = QUANTUM * weight

    def add(self, item: Waiting) -> None:
        insort(self.items, item, key=_order)
        self.cost += item.cost

    def remove(self, item: Waiting) -> None:
        del self.items[bisect_left(self.items, item.order, key=_order)]
        self.cost = self.cost - item.cost if self.items else 0.0

    def cost_before(self, order: tuple[float, int]) -> float:
        """Return the cost of those that go before a place."""
        return sum(item.cost for item in self.items[: bisect_left(self.items, order, key=_order)])


class RoundRobin:
    """The tenants of one priority, by deficit round robin: each has its share of tokens, whatever the others send.

    Tenants take turns. A turn adds ``QUANTUM`` times its weight to the tenant's deficit, and requests leave as long as
    it covers their cost. So between any two tenants of one weight that both have work all the time, what left differs
    by at most a quantum and two of the largest requests (Shreedhar and Varghese, 1995), however many each queues.
    """

    __slots__ = ("_fresh", "_lines")

    def __init__(self) -> None:
        self._lines: OrderedDict[str, TenantLine] = OrderedDict()
        self._fresh = True
        """Whether the first in line has not had its quantum yet in this turn."""

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[tuple[str, TenantLine]]:
        """Go through the tenants, in order of their turns."""
        return iter(self._lines.items())

    @property
    def cost(self) -> float:
        return sum(line.cost for line in self._lines.values())

    def last(self, tenant: str) -> Waiting | None:
        """Return a tenant's request that would leave last; ``None``: it has none here."""
        line = self._lines.get(tenant)
        return line.items[-1] if line is not None else None

    def add(self, item: Waiting) -> None:
        """Take a request in; a tenant that had none goes last."""
        line = self._lines.get(item.request.tenant)
        if line is None:
            account = item.request.account
            line = self._lines[item.request.tenant] = TenantLine(1.0 if account is None else account.weight)
        line.add(item)

    def remove(self, item: Waiting) -> None:
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
        """No deficit was enough in a whole round: go at once through all rounds but the last that are so."""
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


@dataclass(slots=True)
class Held:
    """What one tenant, or all of them, have in the queue."""

    requests: int = 0
    tokens: int = 0

    def add(self, item: Waiting, sign: int) -> None:
        """Count a request that came (1) or went (-1)."""
        self.requests += sign
        self.tokens += sign * item.tokens


class FairQueue:
    """Requests that wait. A class of lower priority gets nothing while one of higher priority has work.

    That is not for ever: who has waited long enough takes turns with the highest class that waits.

    Args:
        max_requests: Requests at most.
        max_tokens: Prompt tokens at most; a single request may have more.
        tenant_share: How much of both one tenant may have.
        ageing_s: Seconds after which a request counts in the highest class.
    """

    def __init__(self, max_requests: int, max_tokens: int, tenant_share: float, *, ageing_s: float = math.inf) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._share = tenant_share
        self._ageing_s = ageing_s
        self._by_arrival: list[Waiting] = []
        """Those that have not waited so long."""
        self._aged: dict[Waiting, None] = {}
        self._aged_priority = 0
        """The class that those are in who have."""
        self._classes: dict[int, RoundRobin] = {}
        self._priorities: list[int] = []
        self._by_start: list[Waiting] = []
        self._tenants: dict[str, Held] = {}
        self._held = Held()

    def __len__(self) -> int:
        return self._held.requests

    def __iter__(self) -> Iterator[Waiting]:
        """Go through all that wait, those first that must start first."""
        return iter(self._by_start)

    @property
    def tokens(self) -> int:
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
        requests = self._held.requests
        held = self._held.tokens
        if without is not None:
            requests -= 1
            held -= without.tokens
        return requests + 1 > self._max_requests or (requests > 0 and held + tokens > self._max_tokens)

    def victim(self, tenant: str, priority: int) -> Waiting | None:
        """Return who should go so that a newcomer fits; ``None``: all have as much right to be here.

        That is the last request of the newcomer's own tenant, if its class is below the newcomer's; else the last one
        of the tenant that has most, if that is more than the newcomer's has and its class is not above the newcomer's.
        So a high priority takes no place from other tenants that a normal one would not get.
        """
        own = self._last(tenant)
        if own is not None and own.priority > priority:
            return own
        if not self._tenants:
            return None
        largest = max(self._tenants, key=lambda name: self._tenants[name].requests)
        held = self._tenants.get(tenant)
        mine = held.requests if held is not None else 0
        if largest == tenant or self._tenants[largest].requests <= mine + 1:
            return None
        last = self._last(largest)
        return last if last is not None and last.priority >= priority else None

    def _last(self, tenant: str) -> Waiting | None:
        """Return the last request of a tenant's lowest class; ``None``: it has none."""
        if tenant not in self._tenants:
            return None
        found = (self._classes[priority].last(tenant) for priority in reversed(self._priorities))
        return next((item for item in found if item is not None), None)

    # --- in and out ---

    def add(self, item: Waiting) -> None:
        """Take a request in; the bounds are the caller's to look at."""
        self._line_up(item)
        item.queued = True
        insort(self._by_start, item, key=_start)
        insort(self._by_arrival, item, key=_arrival)
        self._held.add(item, 1)
        self._tenants.setdefault(item.request.tenant, Held()).add(item, 1)

    def remove(self, item: Waiting) -> None:
        """Take a request out, out of turn."""
        self._classes[item.priority].remove(item)
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

    def age(self, now: float) -> None:
        """Let requests that have waited long take turns with the highest class that waits."""
        late = 0
        while late < len(self._by_arrival) and self._by_arrival[late].arrived + self._ageing_s <= now:
            late += 1
        old = self._by_arrival[:late]
        self._by_arrival[:late] = []
        if self._aged and self._priorities[0] < self._aged_priority:
            old += self._aged  # a higher class has come since
        if old:
            self._aged_priority = self._priorities[0]
            self._aged.update(dict.fromkeys(old))
            for item in old:
                if item.priority != self._aged_priority:
                    self._classes[item.priority].remove(item)
                    self._drop_empty(item.priority)
                    item.priority = self._aged_priority
                    self._line_up(item)

    def cost_ahead(self, item: Waiting) -> float:
        """Return about how much leaves before a request that is not in here."""
        mine = item.priority
        ahead = 0.0
        for priority in self._priorities:
            if priority > mine:
                break
            turns = self._classes[priority]
            ahead += turns.cost if priority < mine else turns.cost_ahead(item.request.tenant, item.order, item.cost)
        return ahead

    def _line_up(self, item: Waiting) -> None:
        turns = self._classes.get(item.priority)
        if turns is None:
            turns = self._classes[item.priority] = RoundRobin()
            insort(self._priorities, item.priority)
        turns.add(item)

    def _drop_empty(self, priority: int) -> None:
        if not len(self._classes[priority]):
            del self._classes[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def _forget(self, item: Waiting) -> None:
        item.queued = False
        tenant = item.request.tenant
        self._drop_empty(item.priority)
        del self._by_start[bisect_left(self._by_start, _start(item), key=_start)]
        if item in self._aged:
            del self._aged[item]
        else:
            del self._by_arrival[bisect_left(self._by_arrival, _arrival(item), key=_arrival)]
        self._held.add(item, -1)
        held = self._tenants[tenant]
        held.add(item, -1)
        if not held.requests:
            del self._tenants[tenant]


def _start(item: Waiting) -> tuple[float, int]:
    return item.start_by, item.number


def _arrival(item: Waiting) -> tuple[float, int]:
    return item.arrived, item.number
