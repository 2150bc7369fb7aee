"""Sends spans to an OpenTelemetry collector; what it needs is the extra ``baton-serve[otel]``.

A span that has ended is put into a bounded queue, which a thread of OpenTelemetry's SDK empties in batches. A collector
that is away, slow or refuses costs spans, which are counted, and no request anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export import SpanExporter as SdkExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from baton.tracing import Span, TraceContext
from baton.version import __version__

log = logging.getLogger(__name__)

_QUEUE = 4096
"""Spans that wait or are on their way, at most; about a kilobyte each."""
_FLUSH_S = 2.0
_STEP_NS = 1_000_000
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_WELL = frozenset({"ok", "cancelled"})
_SCOPE = InstrumentationScope("baton", __version__)


class OtlpExporter:
    """A :class:`~baton.tracing.SpanExporter` to a collector. Its sampler follows the caller where that has decided.

    Args:
        endpoint: URL of the collector, such as ``http://host:4317``; ``https://``: with TLS.
        service: Name of the service in traces, unless OpenTelemetry's variables name it.
        instance: Name of the process.
        sample_rate: Share of the traces started here that are sampled, 0 to 1; ``None``: by OpenTelemetry's variables.
        count: Called with an outcome (``exported``, ``failed`` or ``dropped``) and a number of spans.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        instance: str,
        sample_rate: float | None,
        count: Callable[[str, int], None],
    ) -> None:
        named = {"service.name": service, "service.instance.id": instance, "service.version": __version__}
        self._resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
        # The provider is what reads OTEL_TRACES_SAMPLER; its spans are not used.
        given = None if sample_rate is None else ParentBased(TraceIdRatioBased(sample_rate))
        self._sampler = TracerProvider(sampler=given, resource=self._resource, shutdown_on_exit=False).sampler
        self._count = count
        self._clock = _EpochClock()
        self._slots = threading.Semaphore(_QUEUE)  # one per span that is queued or being sent
        self._exporter = _Counted(OTLPSpanExporter(endpoint), endpoint, self._slots, count)
        self._batches = BatchSpanProcessor(self._exporter, max_queue_size=_QUEUE)

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Whether a request is to be traced."""
        context = None if parent is None else set_span_in_context(NonRecordingSpan(_sdk_context(parent, remote=True)))
        result = self._sampler.should_sample(context, int(trace_id, 16), "request", SpanKind.SERVER)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def export(self, span: Span) -> None:
        """Queue a span; one for which there is no room is dropped."""
        if span.context is None:
            return
        if not self._slots.acquire(blocking=False):
            self._count("dropped", 1)
            return
        self._batches.on_end(self._readable(span, span.context))

    def close(self) -> None:
        """Send what is queued, for at most two seconds."""
        late = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        late.daemon = True
        late.start()
        self._batches.shutdown()  # type: ignore[no-untyped-call]
        late.cancel()

    def _readable(self, span: Span, context: TraceContext) -> ReadableSpan:
        offset = self._clock.offset_ns()
        well = span.status in _WELL
        attributes = span.attributes if span.status == "ok" else {**span.attributes, "error.type": span.status}
        return ReadableSpan(
            span.name,
            context=_sdk_context(context, remote=False),
            parent=None if span.parent is None else _sdk_context(span.parent, remote=True),
            resource=self._resource,
            attributes=attributes,
            events=[
                Event(event.name, {"detail": event.detail} if event.detail else None, event.at_ns + offset)
                for event in span.events
            ],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.UNSET) if well else Status(StatusCode.ERROR, span.status),
            start_time=span.start_ns + offset,
            end_time=span.end_ns + offset,
            instrumentation_scope=_SCOPE,
        )


def _sdk_context(context: TraceContext, *, remote: bool) -> SpanContext:
    flags = TraceFlags(int(context.flags, 16))
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=remote, trace_flags=flags)


class _EpochClock:
    """Turns monotonic times into times since 1970; the same for all spans until the clock is set."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()

    def offset_ns(self) -> int:
        """What is to be added."""
        offset = time.time_ns() - time.perf_counter_ns()
        if abs(offset - self._offset) > _STEP_NS:
            self._offset = offset
        return self._offset


class _Counted(SdkExporter):
    """Counts what another exporter does, and says once when the collector is away, and when it is back."""

    def __init__(
        self, exporter: SdkExporter, endpoint: str, slots: threading.Semaphore, count: Callable[[str, int], None]
    ) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._slots = slots
        self._count = count
        self._away = False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says so once per try

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; in the processor's thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._slots.release(len(spans))
            well = result is SpanExportResult.SUCCESS
            self._count("exported" if well else "failed", len(spans))
            if well and self._away:
                log.info("the collector %s takes spans again", self._endpoint)
            elif not well and not self._away:
                log.warning("the collector %s does not take spans: they are lost until it does", self._endpoint)
            self._away = not well
        return result

    def shutdown(self) -> None:
        """Give up what is being sent."""
        self._exporter.shutdown()
