"""A registry whose instances are known without having been asked, and what placements hold in it."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry
from tests.support.servers.fake_worker import FINGERPRINT

from baton.api.v1 import events_pb2
from baton.config.router import RouterConfig
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import Epoch, InstanceId
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.registry.registry import Registry
from baton_router.scheduler.placer import Placer, SchedulerMetrics
from baton_router.scheduler.policies import Policy, make_policy

PROMPT = list(range(40))


class Cluster:
    """A registry whose instances are known without having been asked."""

    def __init__(self, threshold: int | None = None, **fingerprints: Fingerprint) -> None:
        """Make instances p:1, p:2, d:1 and d:2; ``fingerprints`` (``p1=...``) are of those that differ."""
        self.metrics = CollectorRegistry()
        self.scheduler_metrics = SchedulerMetrics(self.metrics)
        # Without events, what was placed is remembered; here caches hold what a test says.
        config = RouterConfig(prefill=("p:1", "p:2"), decode=("d:1", "d:2"), index_decision_ttl_s=0)
        self.now = 0.0
        self.registry = Registry(config, self.metrics, now=lambda: self.now)
        self.registry.start()
        for _, task in self.registry._monitors.values():
            task.cancel()
        for x in self.registry.instances():
            fingerprint = fingerprints.get(x.address.replace(":", ""), FINGERPRINT)
            x.info = InstanceInfo(
                InstanceId(x.address), x.role, Epoch(b"e" * 16), fingerprint, 100, 1000, "m", "", 1000, frozenset()
            )
            x.status, x.generation, x.load.now = Status.READY, 1, lambda: self.now
        self.placer = self.make_placer(threshold=threshold)

    def make_placer(self, policy: str | Policy = "match_minus_load", **options: Any) -> Placer:
        options = {"max_prefills": 1, "threshold": None, "seed": 0, **options}
        if isinstance(policy, str):
            policy = make_policy(policy)
        return Placer(self.registry, policy, self.scheduler_metrics, **options)

    def get(self, address: str) -> Instance:
        return next(x for x in self.registry.instances() if x.address == address)

    def hold(self, address: str, tokens: list[int]) -> None:
        instance = self.get(address)
        assert instance.info is not None
        kind = instance.info.fingerprint
        hashes = block_hashes(tokens, kind.block_size, root_hash(kind.content_key()))
        event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=hashes))
        instance.events.apply(events_pb2.KvEventBatch(epoch=b"e" * 16, sequence=1, events=[event], snapshot=True))

    def set_down(self, *instances: Instance) -> None:
        """Say, as a link does, that instances are not usable any more."""
        for x in instances:
            x.status = Status.DOWN
        self.registry._changed()

    def settle(self) -> None:
        """Have all events come that there may be of requests that ended."""
        self.now += 1.0
        for x in self.registry.instances():
            x.events.tick()

    def loads(self) -> dict[str, tuple[int, int]]:
        return {x.address: (x.load.requests, x.load.tokens) for x in self.registry.instances() if x.load.requests}


def nothing_expected(cluster: Cluster) -> bool:
    index = cluster.registry.index
    return not any(index.num_pending(x.events.slot) for x in cluster.registry.instances())
