"""What a replica counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from baton_router.registry.registry import Registry
    from baton_router.replication.replica import Replica


class ReplicaMetrics:
    """Metrics of one replica.

    Args:
        registry: Takes them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        entries = Counter(
            "baton_router_replica_entries", "Entries of the stream of replicas", ["direction"], registry=registry
        )
        self.published, self.received = entries.labels(direction="published"), entries.labels(direction="received")
        self.refused = entries.labels(direction="refused")
        self.told = Counter(
            "baton_router_replica_expectations_told", "Chains of blocks told to the other routers", registry=registry
        )
        self.losses = Counter("baton_router_redis_losses", "Times that Redis went away", registry=registry)

    def watch(self, replica: Replica) -> None:
        """Show a replica's state at each scrape."""
        self._registry.register(_StateCollector(replica))


class _StateCollector(Collector):
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        replica = self._replica
        state = GaugeMetricFamily(
            "baton_router_replica_state", "1 for the state that holds: joining, shared or alone", labels=["state"]
        )
        state.add_metric([replica.state.value], 1.0)
        yield state
        live = len(replica.peers.live())
        yield GaugeMetricFamily("baton_router_replicas", "Routers that share their books, this one included", 1 + live)
        yield GaugeMetricFamily(
            "baton_router_replica_expectations",
            "Chains of blocks that other routers' requests make instances compute",
            len(replica.remote_pending),
        )


class UnitsCollector(Collector):
    """Shows, per limited instance, how many sequences this router may have in flight there.

    Args:
        registry: Has the instances and their units.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield limits, what others have in flight, and who waits."""
        limits = GaugeMetricFamily(
            "baton_router_instance_limit", "Sequences that this router may have in flight there", labels=["instance"]
        )
        shared = GaugeMetricFamily(
            "baton_router_instance_shared_in_flight", "Sequences that other routers have there", labels=["instance"]
        )
        for name, part in self._registry.units.all().items():
            limits.add_metric([name], part.book.limit)
        for x in {x.instance_id: x for x in self._registry.instances()}.values():
            shared.add_metric([x.instance_id], x.load.shared_requests)
        yield limits
        yield shared
        yield GaugeMetricFamily(
            "baton_router_waiting_for_room", "Requests that wait for an instance", len(self._registry.room)
        )
