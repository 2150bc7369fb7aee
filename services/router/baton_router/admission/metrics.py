"""What the queue counts. Its length is read at each scrape."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_router.admission.queue import FairQueue, Waiting
from baton_router.metrics.fast_metrics import Counter, GaugeFunction, Histogram

_WAIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0)
_MAX_TENANTS = 50
OTHER = "other"
CLASSES = ("high", "normal", "low")


def class_of(priority: int) -> str:
    """Return a priority's name in the metrics; clients choose the numbers."""
    return CLASSES[1 + (priority > 0) - (priority < 0)]


class AdmissionMetrics(Collector):
    """Metrics of one queue, in the registry that was passed in.

    Args:
        registry: Takes them.
        queue: What waits.
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
        self._names: set[str] = set()
        r.register(self)

    def started(self, item: Waiting, waited_s: float) -> None:
        """Count a request that waited and starts now."""
        tenant = self.tenant_label(item.request.tenant)
        self.wait.labels(class_of(item.request.priority)).observe(waited_s)
        self.tenant_wait.labels(tenant).inc(waited_s)
        self.tenant_started.labels(tenant).inc()

    def tenant_label(self, tenant: str) -> str:
        """Return a tenant's name in the metrics: bounded, for clients can make up tenants."""
        name = tenant or "default"
        if name not in self._names:
            if len(self._names) >= _MAX_TENANTS:
                return OTHER
            self._names.add(name)
        return name

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
