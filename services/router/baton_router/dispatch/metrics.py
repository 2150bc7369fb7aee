"""Metrics of dispatched requests: where their KV came from, and what failed or migrated."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_from_pb
from baton_router.metrics import Amount, Counter, Histogram

_NAME = "baton_router_"
_MAX_LABELS = 100
_MAX_LABEL_CHARS = 64
_TRANSFER_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class DispatchMetrics:
    """Counts dispatched requests.

    Args:
        registry: Registry for the metrics.

    Attributes:
        migrations: Streams that continued on another decode instance, by reason.
        retries: Requests placed again before their first token, by reason.
        prefill_first: Prompts in the order ``prefill_first``, by outcome.
        failures: Requests that failed, by error code.
        closed_early: Streams closed by their reader.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._paths = Counter(
            _NAME + "prefill_path",
            "Requests per decode instance that ran them, by where their KV came from and why",
            ["path", "pipe", "reason"],
            registry,
        )
        tokens = Counter(_NAME + "prompt_tokens", "Prompt tokens, by how decode got their KV", ["source"], registry)
        self._cached, self._transferred, self._recomputed = map(tokens.labels, ("cached", "transferred", "recomputed"))
        self._kv_bytes = Counter(_NAME + "kv_bytes", "KV bytes fetched by decode instances", ["pipe"], registry)
        self._transfer_time = Histogram(
            _NAME + "transfer_seconds", "Time in fetches, per request", ["pipe"], registry, buckets=_TRANSFER_S
        )
        self._failed_prefills = Counter(_NAME + "failed_prefills", "Prefill candidates that failed", [], registry)
        self.migrations = Counter(
            _NAME + "migrations", "Streams that went on on another decode instance", ["reason"], registry
        )
        self.retries = Counter(
            _NAME + "retries", "Requests placed again before their first token", ["reason"], registry
        )
        self.prefill_first = Counter(
            _NAME + "prefill_first", "Prompts in the order prefill_first, by what came of them", ["outcome"], registry
        )
        self.failures = Counter(_NAME + "request_failures", "Requests that failed, by error code", ["code"], registry)
        self.closed_early = Counter(
            _NAME + "streams_closed_early", "Streams closed by their reader: disconnects, stop strings", [], registry
        )
        self._by_path: dict[tuple[int, str, str], Amount] = {}
        self._names: set[str] = set()

    def observe_trace(self, trace: common_pb2.RequestTrace) -> None:
        """Count where a request's KV came from on one decode instance."""
        pipe = trace.pipe
        key = trace.path, pipe, trace.local_reason.partition(":")[0]
        path = self._by_path.get(key)
        if path is None:
            path = self._paths.labels(path_from_pb(key[0]) or "unknown", *map(self._label, key[1:]))
            if len(self._by_path) < _MAX_LABELS:
                self._by_path[key] = path
        path.inc()
        self._cached.inc(trace.cached_tokens)
        self._transferred.inc(trace.transferred_tokens)
        self._recomputed.inc(trace.recomputed_tokens)
        if failed := trace.failed_prefills:
            self._failed_prefills.inc(len(failed))
        if pipe:
            pipe = self._label(pipe)
            self._kv_bytes.labels(pipe).inc(trace.kv_bytes)
            self._transfer_time.labels(pipe).observe(trace.transfer_us / 1e6)

    def _label(self, name: str) -> str:
        """Return a name as a label value; their number and length are bounded, because clients send traces, too."""
        if name not in self._names:
            if len(self._names) >= _MAX_LABELS or len(name) > _MAX_LABEL_CHARS:
                return "other"
            self._names.add(name)
        return name
