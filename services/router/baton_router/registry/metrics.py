"""Metrics of the instance registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_router.indexer.events import IndexMetrics
from baton_router.metrics import Counter, GaugeFunction
from baton_router.registry.instance import Instance, Status
from baton_router.registry.load import NO_LIMIT, Waiters

_NAME = "baton_router_"


class RegistryMetrics(Collector):
    """Counts events of instances; their current values are read at each scrape, so removed instances have no series.

    Args:
        registry: Registry to add the metrics to.
        instances: Returns the known instances.
        waiters: Requests that wait for one.

    Attributes:
        index: Metrics of the instances' event streams.
    """

    def __init__(
        self, registry: CollectorRegistry, instances: Callable[[], Iterable[Instance]], waiters: Waiters
    ) -> None:
        self._instances = instances
        self.index = IndexMetrics(registry)
        self.registrations = Counter(_NAME + "registrations", "Changes of registrations", ["change"], registry)
        self.changes = Counter(_NAME + "instance_changes", "Changes of instances' state", ["role", "status"], registry)
        self.refusals = Counter(
            _NAME + "instance_refusals", "Instances refused, by the field that does not fit", ["field"], registry
        )
        self.redis_refused = Counter(
            _NAME + "redis_refused", "What stood in Redis and was not signed with the token", ["kind"], registry
        )
        self.discovery_failures = Counter(
            _NAME + "discovery_failures", "Failed tries to learn who is there", ["source"], registry
        )
        GaugeFunction(_NAME + "waiting_for_room", "Requests that wait for an instance", registry, lambda: len(waiters))
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield one family per value, one sample per instance."""
        labels = ["instance", "role"]
        gauges: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
            ("instance_healthy", "1: connected and what it should be", lambda x: x.status is Status.READY),
            ("instance_draining", "1: takes no new requests", lambda x: x.load.draining),
            ("instance_in_flight", "Sequences this router has placed there", lambda x: x.load.requests),
            ("instance_work_tokens", "Work in flight as the policy counts it, in tokens", lambda x: x.load.work),
            ("index_blocks", "Blocks in the index", lambda x: x.events.num_blocks),
            (
                "index_age_seconds",
                "Time since the event stream broke or fell silent; 0: whole",
                lambda x: x.events.age_s,
            ),
            (
                "index_decided_prompts",
                "Prompts that stand in for events where there are none",
                lambda x: x.events.num_decided,
            ),
        )
        instances = list({x.instance_id: x for x in self._instances()}.values())
        for name, text, read in gauges:
            family = GaugeMetricFamily(_NAME + name, text, labels=labels)
            for x in instances:
                family.add_metric([x.instance_id, x.role.value], float(read(x)))
            yield family
        state = GaugeMetricFamily(
            _NAME + "index_state", "1 for the state that holds: exact, stale or off", labels=[*labels, "state"]
        )
        for x in instances:
            state.add_metric([x.instance_id, x.role.value, x.events.state.value], 1.0)
        yield state
        limit = GaugeMetricFamily(
            _NAME + "instance_limit", "Sequences that this router may have in flight there", labels=["instance"]
        )
        shared = GaugeMetricFamily(
            _NAME + "instance_shared_in_flight", "Sequences that other routers have there", labels=["instance"]
        )
        for x in instances:
            if x.load.limit < NO_LIMIT:
                limit.add_metric([x.instance_id], x.load.limit)
            shared.add_metric([x.instance_id], x.load.shared_requests)
        yield limit
        yield shared
