"""What an engine has noted of a request, as parts of the span of the call that brought it."""

from __future__ import annotations

from baton.engine.request import RequestMetrics
from baton.kv_cache.connector import TransferStats
from baton.tracing import Attribute, Span


def note_engine(span: Span, metrics: RequestMetrics) -> None:
    """Give a recording span the moments of a request, and its loads of KV as parts."""
    if metrics.queue_us:
        span.event("admitted", at_ns=metrics.arrived_ns + 1000 * metrics.queue_us)
    if metrics.ttft_us:
        span.event("first_token", at_ns=metrics.arrived_ns + 1000 * metrics.ttft_us)
    for load in metrics.transfer.loads:
        if load.kind:
            span.part(load.kind, load.began_ns, load.ended_ns, _attributes(load))


def _attributes(load: TransferStats) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "baton.path": str(load.path),
        "baton.kv_bytes": load.kv_bytes,
        "baton.transferred_tokens": load.transferred_tokens,
        "baton.transfer_us": load.transfer_us,
        "baton.exposed_us": load.exposed_us,
    }
    words = {
        "baton.source": load.source,
        "baton.pipe": load.pipe,
        "baton.pipe_fallback": load.pipe_fallback,
        "baton.local_reason": load.local_reason,
    }
    found |= {name: word for name, word in words.items() if word}
    if load.failures:
        found["baton.failures"] = load.failures
    return found
