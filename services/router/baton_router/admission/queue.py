"""The router's queue: classes of priority, tenants that take turns within each, bounds in requests and in tokens."""

from __future__ import annotations

import asyncio
import collections
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.errors import BatonError
from baton.types import BACKGROUND_PRIORITY
from baton_router.metrics import Counter, GaugeFunction, Histogram, LabelNames
from baton_router.types import RoutedRequest

QUANTUM = 512.0
"""Tokens per turn of a tenant of weight 1."""


@dataclass(eq=False, slots=True)
class Waiting:
    """One request that waits.

    Attributes:
        request: The request.
        number: Order of arrival, rising.
        arrived: Time of arrival, in seconds.
        deadline: Time when its first token is due; infinite: it has no target.
        start_by: Latest time to start; afterwards it is refused.
        cost: Expected work, as fairness counts it: prompt tokens that no instance holds, and output tokens.
        future: Ends the wait: with ``None`` it may start, with an error it may not.
        queued: Whether it is in the queue.
        granted: Whether it may start.
        priority: Class of the request: its own priority, or a higher one when it has waited long.
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
        """Number of tokens that it brings."""
        return self.request.num_given

    @property
    def ages(self) -> bool:
        """Whether it moves to a higher class when it has waited long."""
        return self.request.priority < BACKGROUND_PRIORITY

    @property
    def order(self) -> tuple[float, int]:
        """Sort key among the requests of its tenant: by deadline, then by arrival."""
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
        """Return the cost of the requests before a sort key."""
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
        """Whether the first tenant has not had its quantum yet in this turn."""

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[tuple[str, TenantLine]]:
        """Iterate over the tenants, in the order of their turns."""
        return iter(self._lines.items())

    @property
    def cost(self) -> float:
        return sum(line.cost for line in self._lines.values())

    def last(self, tenant: str) -> Waiting | None:
        """Return the last request of a tenant; ``None``: it has none."""
        line = self._lines.get(tenant)
        return line.items[-1] if line is not None else None

    def add(self, item: Waiting) -> None:
        """Add a request; a tenant without other requests gets the last turn."""
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

    def pop(self) -> Waiting:
        """Remove and return the next request; there must be one."""
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
        """Return about how much would leave before a new request: its tenant's own, and others' turns."""
        line = self._lines.get(tenant)
        own = line.cost_before(order) if line is not None else 0.0
        quantum = line.quantum if line is not None else QUANTUM
        turns = (own + cost) / quantum
        return own + sum(min(x.cost, turns * x.quantum) for name, x in self._lines.items() if name != tenant)

    def _skip_rounds(self) -> None:
        """Skip the rounds in which no tenant's deficit would be enough, after one such round."""
        missing = min((line.items[0].cost - line.deficit) / line.quantum for line in self._lines.values())
        rounds = max(0, math.ceil(missing) - 1)
        for line in self._lines.values():
            line.deficit += rounds * line.quantum

    def _drop(self, tenant: str) -> None:
        """Remove a tenant without work together with its deficit: it could save up turns otherwise."""
        if next(iter(self._lines)) == tenant:
            self._fresh = True
        del self._lines[tenant]


def _order(item: Waiting) -> tuple[float, int]:
    return item.order


@dataclass(slots=True)
class Held:
    """Requests and prompt tokens of one tenant, or of all, in the queue."""

    requests: int = 0
    tokens: int = 0

    def add(self, item: Waiting, sign: int) -> None:
        """Add (1) or subtract (-1) a request."""
        self.requests += sign
        self.tokens += sign * item.tokens


class FairQueue:
    """The waiting requests. A class of lower priority gets nothing while one of higher priority has work.

    A request that has waited long enough is moved to the highest class that waits, unless it is a background request.

    Args:
        max_requests: Maximum number of requests.
        max_tokens: Maximum number of prompt tokens; a single request may have more.
        tenant_share: Maximum share of both for one tenant, 0 to 1.
        ageing_s: Seconds after which a request counts in the highest class.
    """

    def __init__(self, max_requests: int, max_tokens: int, tenant_share: float, *, ageing_s: float = math.inf) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._share = tenant_share
        self._ageing_s = ageing_s
        self._by_arrival: list[Waiting] = []
        """Requests that have not waited for ``ageing_s`` yet, without background requests."""
        self._aged: dict[Waiting, None] = {}
        self._aged_priority = 0
        """Class of the requests that have."""
        self._classes: dict[int, RoundRobin] = {}
        self._priorities: list[int] = []
        self._by_start: list[Waiting] = []
        self._tenants: dict[str, Held] = {}
        self._held = Held()

    def __len__(self) -> int:
        return self._held.requests

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over the requests, in the order of their latest start."""
        return iter(self._by_start)

    @property
    def tokens(self) -> int:
        return self._held.tokens

    @property
    def first_priority(self) -> int:
        """Class of the next request; there must be one."""
        return self._priorities[0]

    @property
    def cost(self) -> float:
        """Cost of all waiting requests."""
        return sum(turns.cost for turns in self._classes.values())

    def tenants(self) -> dict[str, Held]:
        """Return the requests and tokens of each tenant."""
        return self._tenants

    def tenant_cost(self, tenant: str) -> float:
        """Return the cost of one tenant's requests."""
        return sum(line.cost for turns in self._classes.values() for name, line in turns if name == tenant)

    # --- bounds ---

    def over_share(self, tenant: str, tokens: int) -> bool:
        """Whether one more request would exceed a tenant's share."""
        held = self._tenants.get(tenant)
        if held is None:
            return False
        most = self._max_requests * self._share, self._max_tokens * self._share
        return held.requests + 1 > most[0] or held.tokens + tokens > most[1]

    def full(self, tokens: int, *, without: Waiting | None = None) -> bool:
        """Whether there is no room for one more request, even if ``without`` were removed."""
        requests = self._held.requests
        held = self._held.tokens
        if without is not None:
            requests -= 1
            held -= without.tokens
        return requests + 1 > self._max_requests or (requests > 0 and held + tokens > self._max_tokens)

    def victim(self, tenant: str, priority: int) -> Waiting | None:
        """Return the request to remove so that a new one fits; ``None``: the new one has no precedence.

        It is the last request of the new one's own tenant, if its class is below the new one's; else the last one of
        the tenant with the most requests, if that has more than the new one's and its class is not above the new one's.
        So a high priority displaces no request of other tenants that a normal one would not.
        """
        own = self._last(tenant)
        if own is not None and own.priority > priority:
            return own
        if not self._tenants:
            return None
        largest = max(self._tenants, key=lambda name: self._tenants[name].requests)
        held = self._tenants.get(tenant)
        own_requests = held.requests if held is not None else 0
        if largest == tenant or self._tenants[largest].requests <= own_requests + 1:
            return None
        last = self._last(largest)
        return last if last is not None and last.priority >= priority else None

    def _last(self, tenant: str) -> Waiting | None:
        """Return the last request of a tenant's lowest class; ``None``: it has none."""
        if tenant not in self._tenants:
            return None
        lasts = (self._classes[priority].last(tenant) for priority in reversed(self._priorities))
        return next((item for item in lasts if item is not None), None)

    # --- in and out ---

    def add(self, item: Waiting) -> None:
        """Add a request; the caller checks the bounds."""
        self._line_up(item)
        item.queued = True
        insort(self._by_start, item, key=_start)
        if item.ages:
            insort(self._by_arrival, item, key=_arrival)
        self._held.add(item, 1)
        self._tenants.setdefault(item.request.tenant, Held()).add(item, 1)

    def remove(self, item: Waiting) -> None:
        """Remove a request out of turn."""
        self._classes[item.priority].remove(item)
        self._forget(item)

    def pop(self) -> Waiting:
        """Remove and return the next request; there must be one."""
        item = self._classes[self._priorities[0]].pop()
        self._forget(item)
        return item

    def pop_late(self, now: float) -> list[Waiting]:
        """Remove and return the requests whose latest start has passed."""
        late = []
        while self._by_start and self._by_start[0].start_by < now:
            late.append(self._by_start[0])
            self.remove(self._by_start[0])
        return late

    def age(self, now: float) -> None:
        """Move requests that have waited long to the highest class that waits."""
        late = 0
        while late < len(self._by_arrival) and self._by_arrival[late].arrived + self._ageing_s <= now:
            late += 1
        old = self._by_arrival[:late]
        self._by_arrival[:late] = []
        if self._aged and self._priorities[0] < self._aged_priority:
            old += self._aged  # a higher class was added since
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
        """Return about how much would leave before a new request."""
        ahead = 0.0
        for priority in self._priorities:
            if priority > item.priority:
                break
            turns = self._classes[priority]
            ahead += (
                turns.cost if priority < item.priority else turns.cost_ahead(item.request.tenant, item.order, item.cost)
            )
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
        elif item.ages:
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


_WAIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0)
_MAX_TENANTS = 50
CLASSES = ("high", "normal", "low")


def class_of(priority: int) -> str:
    """Return a priority's name in the metrics; clients choose the numbers."""
    return CLASSES[1 + (priority > 0) - (priority < 0)]


class AdmissionMetrics(Collector):
    """Metrics of one queue, in the registry that was passed in.

    Args:
        registry: Registry to add the metrics to.
        queue: The queue, which is read at each scrape.
        rate: Returns tokens per second that leave the queue.
    """

    def __init__(self, registry: CollectorRegistry, queue: FairQueue, rate: Callable[[], float]) -> None:
        r = registry
        name = "baton_router_queue_"
        self._queue = queue
        self.at_once = Counter("baton_router_admitted_at_once", "Requests that did not wait", [], r).labels()
        self.wait = Histogram(name + "wait_seconds", "Waits of requests that waited", ["priority"], r, buckets=_WAIT_S)
        self.tenant_wait = Counter(name + "tenant_wait_seconds", "Time that tenants' requests waited", ["tenant"], r)
        self.tenant_started = Counter(name + "tenant_started", "Requests that waited and started", ["tenant"], r)
        self.refusals = Counter("baton_router_admission_refusals", "Requests refused early, by reason", ["reason"], r)
        self.cancelled = Counter(name + "cancelled", "Requests whose client left while they waited", [], r)
        GaugeFunction(name + "tokens", "Prompt tokens that wait", r, lambda: queue.tokens)
        GaugeFunction(name + "drain_tokens_per_second", "Tokens that leave the queue", r, rate)
        self._names = LabelNames(_MAX_TENANTS)  # clients can invent tenants
        r.register(self)

    def started(self, item: Waiting, waited_s: float) -> None:
        """Count a request that waited and starts now."""
        tenant = self.tenant_label(item.request.tenant)
        self.wait.labels(class_of(item.request.priority)).observe(waited_s)
        self.tenant_wait.labels(tenant).inc(waited_s)
        self.tenant_started.labels(tenant).inc()

    def tenant_label(self, tenant: str) -> str:
        """Return a tenant's name in the metrics."""
        return self._names.label(tenant or "default")

    def collect(self) -> Iterator[Metric]:
        length = GaugeMetricFamily("baton_router_queue_requests", "Requests that wait", labels=["priority"])
        classes = collections.Counter(class_of(item.request.priority) for item in self._queue)
        for name in CLASSES:
            length.add_metric([name], classes[name])
        yield length
        by_tenant = GaugeMetricFamily("baton_router_queue_tenant_requests", "Requests that wait", labels=["tenant"])
        tenants = collections.Counter[str]()
        for tenant, held in self._queue.tenants().items():
            tenants[self.tenant_label(tenant)] += held.requests
        for name, requests in tenants.items():
            by_tenant.add_metric([name], requests)
        yield by_tenant
