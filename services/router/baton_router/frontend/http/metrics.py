"""What the HTTP front counts."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from baton_router.metrics.fast_metrics import Amount, Counter, Distribution, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MAX_FIELD_LABELS = 100


class HttpMetrics:
    """Metrics of the HTTP front, in the registry that was passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_http_"
        self._children: dict[tuple[str, int], tuple[Amount, Amount, Distribution]] = {}
        self._begun: dict[str, Amount] = {}
        self._requests = Counter(
            name + "requests", "Requests, by endpoint and status", ["endpoint", "status"], registry
        )
        self._in_flight = Gauge(name + "in_flight", "Requests that are being served", ["endpoint"], registry)
        self._seconds = Histogram(
            name + "request_seconds", "First byte in to last byte out", ["endpoint"], registry, buckets=_SECONDS
        )
        self._ignored = Counter(name + "ignored_fields", "Request fields that had no effect", ["field"], registry)
        self._field_labels: set[str] = set()

    def begin(self, endpoint: str) -> None:
        """Count a request that begins."""
        in_flight = self._begun.get(endpoint)
        if in_flight is None:
            in_flight = self._begun[endpoint] = self._in_flight.labels(endpoint)
        in_flight.inc()

    def end(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        children = self._children.get((endpoint, status))
        if children is None:  # looking a series up costs more than counting
            children = (
                self._requests.labels(endpoint, str(status)),
                self._in_flight.labels(endpoint),
                self._seconds.labels(endpoint),
            )
            self._children[endpoint, status] = children
        children[0].inc()
        children[1].dec()
        children[2].observe(seconds)

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields. Clients choose the names, so only the first hundred have series of their own."""
        for field in fields:
            label = field[:64]
            if label not in self._field_labels:
                if len(self._field_labels) < _MAX_FIELD_LABELS:
                    self._field_labels.add(label)
                else:
                    label = "other"
            self._ignored.labels(label).inc()
