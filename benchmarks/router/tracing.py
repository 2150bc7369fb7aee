"""What tracing costs a router's event loop: switched off, for a request that is not sampled, and for one that is.

Everything that a request does with its span, as the router does it; sampled spans go to a collector that is away.
Median nanoseconds of CPU time per request, and objects that are allocated and kept or freed in it, by ``tracemalloc``.

    python benchmarks/router/tracing.py
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import baton.tracing
from baton.otlp import OtlpExporter
from baton.tracing import SpanExporter, begin_span

# together they fit into the queue, so that none is dropped
ROUNDS = 15
REQUESTS = 250


def request(exporter: SpanExporter | None) -> None:
    """Do what a request does: four events, attributes where it records, an end."""
    span = begin_span("request", "", exporter, start_ns=1)
    span.event("queued")
    span.event("admitted")
    span.event("placed", "d0")
    span.event("first_token")
    if span.recording:
        span.attributes.update({f"baton.{at}": at for at in range(20)})
    span.end()


def nanoseconds(call: Callable[[], None]) -> float:
    """Return the median CPU time of a call in this thread."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        for _ in range(REQUESTS):
            call()
        rounds.append((time.thread_time_ns() - began) / REQUESTS)
    return statistics.median(rounds)


def most_bytes(call: Callable[[], None]) -> int:
    """Return the most bytes that a call had allocated in ``baton.tracing`` at any moment."""
    call()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    call()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak


def main() -> None:
    exporter = OtlpExporter(
        "http://127.0.0.1:9", service="bench", instance="0", sample_rate=None, count=lambda outcome, spans: None
    )
    rare = OtlpExporter(
        "http://127.0.0.1:9", service="bench", instance="0", sample_rate=0.0, count=lambda outcome, spans: None
    )
    print(f"{baton.tracing.__name__}: per request")
    for name, used in (("off", None), ("not sampled", rare), ("sampled", exporter)):
        call = lambda used=used: request(used)  # noqa: E731
        print(f"{name:>12}: {nanoseconds(call):8.0f} ns, {most_bytes(call):6d} bytes at most")
    for used in (exporter, rare):
        used.close()


if __name__ == "__main__":
    main()
