"""Opens the way of a service's spans to a collector, if it was told of one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.config.environment import traces_endpoint
from baton.errors import ConfigError
from baton.worker.process import ServiceMetrics

if TYPE_CHECKING:
    from baton.otlp import OtlpExporter

log = logging.getLogger(__name__)


def open_span_exporter(
    endpoint: str, service: str, instance: str, metrics: ServiceMetrics, sample_rate: float | None = None
) -> OtlpExporter | None:
    """Return what takes spans to a collector, to be closed at the end; ``None``: nothing is traced here.

    Args:
        endpoint: ``--otlp-traces-endpoint``; empty: what OpenTelemetry's own variables name, if they name one.
        service: Which service this is.
        instance: Which of its processes.
        metrics: Where spans are counted.
        sample_rate: Share of the traces that begin here; ``None``: as OpenTelemetry's variables say.

    Raises:
        ConfigError: The extra is not installed that the flag needs; or what it says is no endpoint.
    """
    collector = endpoint or traces_endpoint()
    if not collector:
        return None
    try:
        from baton.otlp import OtlpExporter
    except ImportError as error:
        message = f"traces need an extra: pip install 'baton-serve[otel]' ({error})"
        if endpoint:
            raise ConfigError(message, field="otlp_traces_endpoint") from error
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but %s", message)
        return None

    def count(outcome: str, spans: int) -> None:
        metrics.spans.labels(outcome).inc(spans)

    try:
        return OtlpExporter(
            collector, service=f"baton-{service}", instance=instance, sample_rate=sample_rate, count=count
        )
    except ValueError as error:
        raise ConfigError(f"no traces can go to {collector!r}: {error}", field="otlp_traces_endpoint") from error
