"""Prometheus metrics of a prefill or decode instance; ``docs/metrics.md`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.api.v1 import common_pb2
from baton.engine.executor.base import Quality
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout
from baton.kv_transfer.blocks.rests import PipeRests
from baton.kv_transfer.connector.store.backend import StoreUse
from baton.rpc.convert import path_from_pb
from baton.worker.engine_thread import EngineThread
from baton.worker.process import ServiceMetrics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    """Metrics of one instance. Each has its own ``registry``, so that several instances can run in one process."""

    def __init__(self) -> None:
        self.registry = ServiceMetrics("worker")
        reg = self.registry
        self.requests = Counter(
            "baton_worker_requests", "Calls by method and outcome", ["method", "code"], registry=reg
        )
        self.prefills = Counter(
            "baton_worker_prefills", "Requests by where the prompt was computed", ["path"], registry=reg
        )
        self.local_reasons = Counter(
            "baton_worker_local_prefills", "Local prefills by reason", ["reason"], registry=reg
        )
        self.failed_prefills = Counter(
            "baton_worker_failed_remote_prefills", "Prefill candidates that failed", registry=reg
        )
        self.transfer_bytes = Counter("baton_kv_transfer_bytes", "KV bytes fetched", ["pipe"], registry=reg)
        self.transfer_tokens = Counter(
            "baton_kv_transfer_tokens", "Tokens whose KV was fetched", ["pipe"], registry=reg
        )
        self.exposed_seconds = Histogram(
            "baton_kv_exposed_seconds",
            "Time from the end of the remote computation to the last byte, per request",
            ["pipe"],
            buckets=_SECONDS,
            registry=reg,
        )
        self.transfer_seconds = Histogram(
            "baton_kv_transfer_seconds", "Time in fetches per request", ["pipe"], buckets=_SECONDS, registry=reg
        )
        self.fallbacks = Counter(
            "baton_kv_pipe_fallbacks", "Requests whose KV did not come over the preferred pipe", ["pipe"], registry=reg
        )
        self.ttft = Histogram("baton_worker_ttft_seconds", "Admission to first token", buckets=_SECONDS, registry=reg)
        self.queue = Histogram("baton_worker_queue_seconds", "Admission to first work", buckets=_SECONDS, registry=reg)
        self.leases = Gauge("baton_worker_leases", "Prompts whose blocks are kept for others", registry=reg)
        self.kv_bytes_per_token = Gauge(
            "baton_engine_kv_bytes_per_token", "Bytes that a token takes in the KV pool", ["kv_dtype"], registry=reg
        )

    def describe_kv(self, fingerprint: Fingerprint) -> None:
        """Export the size of a token's KV in the pool."""
        layout = KVLayout(fingerprint.layer_shapes, fingerprint.block_size, fingerprint.kv_dtype)
        self.kv_bytes_per_token.labels(fingerprint.kv_dtype).set(layout.bytes_per_token)

    def watch(
        self, engine: EngineThread, num_leases: Callable[[], int], store: StoreUse, connectors: Mapping[str, StoreUse]
    ) -> None:
        """Export metrics that are read at scrape time.

        Args:
            engine: The engine.
            num_leases: Returns the number of prompts kept for other instances.
            store: Counters of the KV store's use.
            connectors: Counters of the use of Baton's named connectors, by name.
        """
        self.leases.set_function(num_leases)
        for collector in (
            _FieldCollector("baton_engine_", lambda: {"": engine.stats}, _ENGINE_COUNTERS, _ENGINE_GAUGES),
            _FieldCollector("baton_engine_", lambda: {"": engine}, _STEP_COUNTERS),
            _FieldCollector("baton_grammar_", lambda: _unlabeled(engine.core.grammars), _GRAMMAR_COUNTERS),
            _FieldCollector("baton_grammar_", lambda: _unlabeled(engine.core.masks), _MASK_COUNTERS),
            _SpeculationCollector(engine),
            _OperatorCollector(engine),
            _FieldCollector("baton_store_", lambda: {"": store}, _STORE_COUNTERS, _STORE_GAUGES),
            _FieldCollector("baton_connector_", lambda: connectors, _CONNECTOR_COUNTERS, label="connector"),
        ):
            self.registry.register(collector)

    def watch_pipes(self, rests: PipeRests) -> None:
        """Export how many reads ended because nothing came over their pipe."""
        self.registry.register(_PipeCollector(rests))

    def count_trace(self, trace: common_pb2.RequestTrace) -> None:
        """Count a request's trace; call it once per request, at the first token."""
        path = path_from_pb(trace.path)
        self.prefills.labels(path.value if path else "unknown").inc()
        if trace.local_reason:
            # An error's text follows the colon: of unbounded variety, so it is for the trace only.
            self.local_reasons.labels(trace.local_reason.partition(":")[0]).inc()
        self.failed_prefills.inc(len(trace.failed_prefills))
        if trace.pipe:
            self.transfer_bytes.labels(trace.pipe).inc(trace.kv_bytes)
            self.transfer_tokens.labels(trace.pipe).inc(trace.transferred_tokens)
            self.transfer_seconds.labels(trace.pipe).observe(trace.transfer_us / 1e6)
            self.exposed_seconds.labels(trace.pipe).observe(trace.exposed_us / 1e6)
        if trace.pipe_fallback:
            self.fallbacks.labels(trace.pipe).inc()
        self.ttft.observe(trace.ttft_us / 1e6)
        self.queue.observe(trace.queue_us / 1e6)


def _unlabeled(item: object) -> Mapping[str, object]:
    return {} if item is None else {"": item}


class _FieldCollector(Collector):
    """Metrics that are fields of objects, read at scrape time.

    Args:
        prefix: Prefix of the metrics' names; the field's name follows.
        objects: Returns the objects by their label value.
        counters: Help texts of the fields that only rise, by field name.
        gauges: Help texts of the other fields, by field name.
        label: Name of the label; empty: there is one object without label.
    """

    def __init__(
        self,
        prefix: str,
        objects: Callable[[], Mapping[str, object]],
        counters: Mapping[str, str],
        gauges: Mapping[str, str] | None = None,
        *,
        label: str = "",
    ) -> None:
        self._prefix = prefix
        self._objects = objects
        self._label = label
        self._kinds = ((GaugeMetricFamily, gauges or {}), (CounterMetricFamily, counters))

    def collect(self) -> Iterable[Metric]:
        labels = [self._label] if self._label else []
        objects = self._objects()
        for family_of, texts in self._kinds:
            for name, text in texts.items():
                family = family_of(self._prefix + name, text, labels=labels)
                for value, item in objects.items():
                    family.add_metric([value] if labels else [], getattr(item, name))
                yield family


class _PipeCollector(Collector):
    """Reads that stalled.

    Args:
        rests: Pipes that are left alone for it.
    """

    def __init__(self, rests: PipeRests) -> None:
        self._rests = rests

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("baton_kv_pipe_stalls", "Reads over which nothing came", labels=["pipe"])
        for kind, count in self._rests.num_stalls().items():
            family.add_metric([kind], count)
        yield family


class _OperatorCollector(Collector):
    """Operators that run the model, and the deviation of quantized weights from exact arithmetic.

    Args:
        engine: The engine, whose executor is read.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._executor = engine.core.executor

    def collect(self) -> Iterable[Metric]:
        text = "Operators that run the model, as in the log; always 1"
        info = GaugeMetricFamily("baton_engine_operators", text, labels=["description"])
        info.add_metric([self._executor.description], 1)
        yield info
        quality: Quality | None = getattr(self._executor, "quality", None)
        for name, text in _QUALITY.items():
            family = GaugeMetricFamily(f"baton_engine_quality_{name}", text)
            if quality is not None:
                family.add_metric([], getattr(quality, name))
            yield family


_QUALITY = {
    "kl": "Divergence from exact arithmetic with quantized weights over a fixed text, nats per token",
    "top1": "Share of that text's tokens after which both think the same token is the most likely one",
}


class _SpeculationCollector(Collector):
    """Metrics of speculative decoding, read at scrape time; none without it.

    Args:
        engine: The engine, whose speculator is read.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        families = {
            name: CounterMetricFamily(f"baton_spec_{name}", text, labels=["method", *labels])
            for name, (text, labels) in _SPECULATION_COUNTERS.items()
        }
        speculator = self._engine.core.speculator
        if speculator is not None:
            stats = speculator.stats
            method = stats.method
            families["steps"].add_metric([method], stats.steps)
            for name, counts in (("drafted", stats.drafted), ("accepted", stats.accepted)):
                families[f"{name}_tokens"].add_metric([method], counts.total())
                for position, count in counts.copy().items():
                    families[f"{name}_at_position"].add_metric([method, str(position)], count)
            for name, reasons in (("faults", stats.faults), ("context_tokens", stats.context)):
                for reason, count in reasons.copy().items():
                    families[name].add_metric([method, reason], count)
        yield from families.values()


_SPECULATION_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "steps": ("Drafts verified: one for each sequence and step that had one", ()),
    "drafted_tokens": ("Draft tokens verified", ()),
    "accepted_tokens": ("Draft tokens that were right", ()),
    "drafted_at_position": ("Draft tokens verified, by their place in the draft, from 0 on", ("position",)),
    "accepted_at_position": ("Draft tokens that were right, by their place in the draft", ("position",)),
    "faults": ("Drafts that could not be used: raised, bad_ids", ("reason",)),
    "context_tokens": ("Tokens whose KV was computed elsewhere, by whether the drafter's came with it", ("draft_kv",)),
}
_ENGINE_GAUGES = {
    "num_running": "Sequences in the batch",
    "num_waiting": "Sequences in the queue",
    "num_loading": "Sequences that wait for KV from outside",
    "num_blocks": "KV blocks in the pool",
    "blocks_active": "KV blocks held by requests or leases",
    "blocks_cached": "KV blocks that can be hit, those in use included",
    "waiting_prompt_tokens": "Prompt tokens not computed yet",
}
_ENGINE_COUNTERS = {
    "num_preemptions": "Sequences preempted",
    "num_bounded_steps": "Steps in which the budget in time left prompt tokens for later",
    "prefill_tokens": "Prompt tokens computed",
    "decode_tokens": "Tokens generated",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache",
    "early_evictions": "Cached blocks evicted before older ones since their session's usual gap is long",
    "spared_blocks": "Times that a hint spared a cached block that was to be evicted",
}
_STEP_COUNTERS = {
    "steps": "Engine steps",
    "step_seconds": "Time in engine steps",
}
_GRAMMAR_COUNTERS = {
    "compiled": "Grammars compiled",
    "compile_seconds": "Time in compilation, outside the engine's thread",
    "cache_hits": "Grammars found compiled",
    "refused": "Grammars that could not be compiled, or cost too much",
}
_MASK_COUNTERS = {
    "masks": "Masks computed: one for each token under a grammar that is not chosen without",
    "tried_tokens": "Tokens under a grammar that were chosen without a mask, where forward passes have all processors",
    "refused_tokens": "Those of them that the grammar did not take; a mask was computed then",
    "mask_seconds": "Time in masks, beside forward passes, or before or after where these have all processors",
    "mask_wait_seconds": "Time in which steps waited for masks, or to know whether a token is taken",
    "forced_tokens": "Tokens that grammars forced, which no forward pass was made for",
}
_STORE_COUNTERS = {
    "loads": "Loads from the KV store that ended, whatever with",
    "load_hits": "Loads that brought at least one block",
    "load_failures": "Loads that failed",
    "loaded_tokens": "Tokens whose KV came from the store",
    "loaded_bytes": "KV bytes that came from the store",
    "saves": "Puts that the store answered",
    "save_failures": "Puts that failed",
    "saved_blocks": "Blocks that the store held after a Put, new or not",
    "followed_blocks": "Those of them that it copied while they were computed",
    "saved_bytes": "KV bytes that the store pulled",
    "skipped_loads": "Requests not looked for: too many were, or the store was left alone",
    "skipped_saves": "Saves left out for the same reasons",
    "times_left_alone": "How often failures in a row made this instance leave the store alone",
    "node_failures": "Calls to one of several store nodes, and fetches from it, that failed",
    "refused_nodes": "Registrations of store nodes in Redis passed over, at each look: not signed, or senseless",
    "failovers": "Segments that came from another store node than the one asked first",
    "copied_blocks": "Blocks that this instance had one store node copy from another",
    "skipped_copies": "Copies between store nodes that were left out or failed",
}
_STORE_GAUGES = {
    "nodes": "Store nodes known, where there are several",
    "nodes_resting": "Those that are left alone because they did not answer",
}
_CONNECTOR_COUNTERS = {
    "loads": "Loads through a connector that ended, whatever with",
    "load_hits": "Loads that brought at least one block",
    "load_failures": "Loads that failed",
    "loaded_tokens": "Tokens whose KV was loaded",
    "loaded_bytes": "KV bytes that were loaded",
    "saves": "Saves that ended well",
    "save_failures": "Saves that failed",
    "saved_blocks": "Blocks that were there after a save, new or not",
    "saved_bytes": "KV bytes that were saved",
    "skipped_loads": "Requests not looked for: too many were, or the connector rested after failures",
    "skipped_saves": "Saves left out for the same reasons",
    "times_left_alone": "How often failures in a row made the connector rest",
}
