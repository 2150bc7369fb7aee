"""What the router counts, in Prometheus form, in a registry of its own.

Values that belong to an instance (load, index state) are read when they are scraped, so that an instance that left
leaves no series behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_from_pb
from baton_router.metrics import fast_metrics as tally
from baton_router.scheduler.decision import scores_of
from baton_router.scheduler.decision_terms import DecisionTerms

if TYPE_CHECKING:
    from baton_router.registry.instance import Instance

_RATES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_DECISION_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_MAX_LABELS = 100
_MAX_LABEL_CHARS = 64
_TRANSFER_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class RouterMetrics:
    """All metrics of one router; ``registry`` also takes those of the HTTP side."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        name = "baton_router_"
        self.decisions = tally.Counter(name + "decisions", "Placements, by policy", ["policy"], r)
        self.decision_terms = DecisionTerms()
        r.register(self.decision_terms)
        self.decision_time = tally.Histogram(
            name + "decision_seconds", "Hashing, look-up and choice", [], r, buckets=_DECISION_S
        )
        self.match_rate = tally.Histogram(
            name + "match_rate", "KV match rate of the chosen instance", ["role"], r, buckets=_RATES
        )
        self.index_use = tally.Counter(
            name + "index_use", "Placements by the state of the chosen instances' index", ["state"], r
        )
        self.paths = tally.Counter(
            name + "prefill_path",
            "Requests per decode instance that ran them, by where their KV came from and why",
            ["path", "pipe", "reason"],
            r,
        )
        self.prompt_tokens = tally.Counter(
            name + "prompt_tokens", "Prompt tokens, by how decode got their KV", ["source"], r
        )
        sources = self.prompt_tokens.labels
        self._cached, self._transferred, self._recomputed = map(sources, ("cached", "transferred", "recomputed"))
        self._by_path: dict[tuple[int, str, str], tally.Amount] = {}
        self._names: set[str] = set()
        self.kv_bytes = tally.Counter(name + "kv_bytes", "KV bytes fetched by decode instances", ["pipe"], r)
        self.transfer_time = tally.Histogram(
            name + "transfer_seconds", "Time in fetches, per request", ["pipe"], r, buckets=_TRANSFER_S
        )
        self.failed_prefills = tally.Counter(name + "failed_prefills", "Prefill candidates tried in vain", [], r)
        self.migrations = Counter(
            name + "migrations", "Streams that went on on another decode instance", ["reason"], registry=r
        )
        self.retries = Counter(
            name + "retries", "Requests placed again before their first token", ["reason"], registry=r
        )
        self.failures = Counter(name + "request_failures", "Requests that failed, by error code", ["code"], registry=r)
        self.closed_early = Counter(
            name + "streams_closed_early", "Streams closed by their reader: disconnects, stop strings", registry=r
        )
        self.registrations = Counter(name + "registrations", "Changes of registrations", ["change"], registry=r)
        self.instance_changes = Counter(
            name + "instance_changes", "Changes of instances' state", ["role", "status"], registry=r
        )
        self.refusals = Counter(
            name + "instance_refusals", "Instances refused, by the field that does not fit", ["field"], registry=r
        )
        self.index_events = Counter(name + "index_events", "KV events applied", ["instance"], registry=r)
        self.sequence_gaps = Counter(name + "index_sequence_gaps", "Gaps in KV events", ["instance"], registry=r)

    def observe_trace(self, trace: common_pb2.RequestTrace) -> None:
        """Count how a request came to its KV on one decode instance."""
        pipe = trace.pipe
        key = trace.path, pipe, trace.local_reason.partition(":")[0]
        path = self._by_path.get(key)
        if path is None:
            path = self.paths.labels(path_from_pb(key[0]) or "unknown", *map(self._label, key[1:]))
            if len(self._by_path) < _MAX_LABELS:
                self._by_path[key] = path
        path.value += 1
        self._cached.value += trace.cached_tokens
        self._transferred.value += trace.transferred_tokens
        self._recomputed.value += trace.recomputed_tokens
        if failed := trace.failed_prefills:
            self.failed_prefills.inc(len(failed))
        if pipe:
            pipe = self._label(pipe)
            self.kv_bytes.labels(pipe).inc(trace.kv_bytes)
            self.transfer_time.labels(pipe).observe(trace.transfer_us / 1e6)

    def _label(self, name: str) -> str:
        """Return a name as a label. Clients that run requests by tickets tell traces too: names are bounded."""
        if name not in self._names:
            if len(self._names) >= _MAX_LABELS or len(name) > _MAX_LABEL_CHARS:
                return "other"
            self._names.add(name)
        return name

    def forget_instance(self, instance_id: str) -> None:
        """Remove the series of an instance that left."""
        for counter in (self.index_events, self.sequence_gaps):
            with contextlib.suppress(KeyError):
                counter.remove(instance_id)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class InstanceCollector(Collector):
    """Reads the instances' present values at each scrape.

    Args:
        instances: Returns the instances.
    """

    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        self._instances = instances

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: the values are gathered when they are asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield one family per value, one sample per instance."""
        labels = ["instance", "role"]
        families = {
            name: GaugeMetricFamily("baton_router_" + name, text, labels=labels)
            for name, text in (
                ("instance_healthy", "1: connected and what it should be"),
                ("instance_draining", "1: takes no new requests"),
                ("instance_in_flight", "Sequences this router has placed there"),
                ("instance_work_tokens", "Work in flight as the policy counts it, in tokens"),
                ("index_blocks", "Blocks in the index"),
                ("index_age_seconds", "Time since the event stream broke or fell silent; 0: whole"),
                ("index_decided_prompts", "Prompts that stand in for events where there are none"),
            )
        }
        state = GaugeMetricFamily(
            "baton_router_index_state", "1 for the state that holds: exact, stale or off", labels=[*labels, "state"]
        )
        terms = GaugeMetricFamily(
            "baton_router_instance_score",
            "Terms of the latest score",
            labels=[*labels, "term"],
        )
        for x in {x.instance_id: x for x in self._instances()}.values():
            key = [x.instance_id, x.role.value]
            families["instance_healthy"].add_metric(key, float(x.status == "ready"))
            families["instance_draining"].add_metric(key, float(x.load.draining))
            families["instance_in_flight"].add_metric(key, x.load.requests)
            families["instance_work_tokens"].add_metric(key, x.load.work)
            families["index_blocks"].add_metric(key, x.events.num_blocks)
            families["index_age_seconds"].add_metric(key, x.events.age_s)
            families["index_decided_prompts"].add_metric(key, x.events.num_decided)
            state.add_metric([*key, x.events.state.value], 1.0)
            for term, value in scores_of(x.last_score, x.role):
                terms.add_metric([*key, term], value)
        yield from families.values()
        yield state
        yield terms
