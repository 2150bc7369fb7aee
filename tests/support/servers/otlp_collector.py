"""An OTLP collector in memory, which can also be slow or refuse."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

_WAIT_S = 240.0


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came. Times in nanoseconds since 1970; ``parent``: empty: it has none."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    failed: bool

    def within(self, other: CollectedSpan) -> bool:
        """Whether it began and ended in the time of another one."""
        return other.start_ns <= self.start_ns <= self.end_ns <= other.end_ns


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent.

    Attributes:
        spans: In the order in which they came.
        refuse: A status with which it answers instead.
        gate: Waits for it before it answers.
    """

    def __init__(self, port: int = 0) -> None:
        self.spans: list[CollectedSpan] = []
        self.refuse: grpc.StatusCode | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.gate.set()
        self._server.stop(0.5).wait()

    def Export(self, request: Any, context: Any) -> Any:
        self.calls += 1
        self.gate.wait()
        if self.refuse is not None:
            context.abort(self.refuse, "not now")
        for resource in request.resource_spans:
            named = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_read(named, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str, *names: str) -> dict[str, CollectedSpan]:
        """Wait until a trace has spans of these names, each once; return them by name."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            found = [span for span in self.spans if span.trace_id == trace_id]
            if {span.name for span in found} >= set(names):
                return {span.name: span for span in found}
            if time.monotonic() > deadline:
                raise TimeoutError(f"there are {sorted(span.name for span in found)}, not {names}")
            time.sleep(0.02)


def _read(resource: dict[str, Any], span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events={event.name: event.time_unix_nano for event in span.events},
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
