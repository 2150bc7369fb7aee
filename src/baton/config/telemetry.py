"""Where traces and log lines go: what all services are told alike, and what OpenTelemetry's own variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping

TRACES_HELP = (
    "OTLP collector (gRPC) that gets the spans of sampled requests, as http://collector:4317; OpenTelemetry's own "
    "variables (OTEL_EXPORTER_OTLP_ENDPOINT, ..._HEADERS, OTEL_RESOURCE_ATTRIBUTES) hold too; default: none"
)
LOG_FORMAT_HELP = "lines of the log: text, or json, an object per line with request ids as a field"
LOG_FORMATS = ("text", "json")


def traces_endpoint(env: Mapping[str, str] | None = None) -> str:
    """Return the collector that OpenTelemetry's own variables name; empty: none, or it is switched off."""
    source = os.environ if env is None else env
    if source.get("OTEL_SDK_DISABLED", "").lower() == "true" or source.get("OTEL_TRACES_EXPORTER", "") == "none":
        return ""
    return source.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or source.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
