"""Spans: what happened to a request and when, and what it is part of (W3C Trace Context).

A request carries a :class:`Span` on its way, whose events are noted where they happen. With an exporter the caller's
span is its parent; without one, or where the request is not sampled, nothing is noted, and a caller's ``traceparent``
is passed on as it came. Times are ``time.perf_counter_ns``, on Linux the clock of ``time.monotonic_ns``, too.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

Attribute: TypeAlias = str | int | float | bool | Sequence[str]
Kind: TypeAlias = Literal["server", "client", "internal"]
"""Whether a span answers a call of another process, waits for another process, or neither."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(NamedTuple):
    """A span's place: hexadecimal ids of its trace (32 digits) and of itself (16), and the trace's flags (2)."""

    trace_id: str
    span_id: str
    flags: str = "01"

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def sampled(self) -> bool:
        """Whether spans of this trace are exported."""
        return bool(int(self.flags, 16) & 1)

    @classmethod
    def below(cls, parent: TraceContext | None) -> TraceContext:
        """Return the place of a new span that is sampled; ``None``: it begins a trace."""
        trace_id = f"{secrets.randbits(128) or 1:032x}" if parent is None else parent.trace_id
        return cls(trace_id, f"{secrets.randbits(64) or 1:016x}")


def parse_traceparent(value: str) -> TraceContext | None:
    """Read a ``traceparent`` header; ``None``: there is none, or one that the standard says to ignore."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, flags)


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        at_ns: When.
        detail: E.g. an instance's name; empty: nothing more to say.
    """

    name: str
    at_ns: int
    detail: str = ""


class SpanExporter(Protocol):
    """Exports spans that have ended."""

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Whether a request is to be traced.

        Args:
            trace_id: Trace id, 32 hexadecimal digits.
            parent: The caller's span; ``None``: the trace begins here.
        """

    def export(self, span: Span) -> None:
        """Export a span; called in the event loop, must not block or raise."""


class Span:
    """One piece of work, e.g. a request in the router.

    Args:
        name: Name of the span.
        parent: Context of the parent span, if there is one.
        exporter: Exporter that gets the span at its end; ``None``: it is not recorded.
        start_ns: Start, in nanoseconds of the performance counter; 0: now.
        kind: Kind of span, as in OpenTelemetry.
        context: Context of this span; ``None``: a new one below the parent.

    Attributes:
        context: Context of this span; ``None``: it has no parent and no exporter.
        events: Events in order; empty without an exporter.
        attributes: Attributes; fill them only while :attr:`recording`.
        status: ``ok`` or an error's code; empty: not ended, or there is no exporter.
        end_ns: End, in nanoseconds of the performance counter; 0: not ended.
    """

    __slots__ = (
        "_exporter",
        "attributes",
        "context",
        "end_ns",
        "events",
        "kind",
        "name",
        "parent",
        "start_ns",
        "status",
    )

    def __init__(
        self,
        name: str,
        parent: TraceContext | None = None,
        exporter: SpanExporter | None = None,
        start_ns: int = 0,
        *,
        kind: Kind = "server",
        context: TraceContext | None = None,
    ) -> None:
        self.name = name
        self.parent = parent
        self.kind = kind
        self._exporter = exporter
        self.start_ns = start_ns or time.perf_counter_ns()
        self.end_ns = 0
        self.status = ""
        self.events: list[Event] = []
        self.attributes: dict[str, Attribute] = {}
        self.context = parent if exporter is None else context or TraceContext.below(parent)

    @property
    def recording(self) -> bool:
        """Whether events and attributes are recorded."""
        return self._exporter is not None

    @property
    def traceparent(self) -> str:
        """The ``traceparent`` for calls made within this span; empty: none."""
        return "" if self.context is None else str(self.context)

    def event(self, name: str, detail: str = "", at_ns: int = 0) -> None:
        """Record an event; ``at_ns`` 0: now."""
        if self._exporter is not None:
            self.events.append(Event(name, at_ns or time.perf_counter_ns(), detail))

    def part(self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Attribute]) -> None:
        """Export a child span that has ended, in which this span waited for another process."""
        if self._exporter is not None:
            part = Span(name, self.context, self._exporter, start_ns, kind="client")
            part.attributes.update(attributes)
            part.end(end_ns=end_ns)

    def end(self, status: str = "ok", *, end_ns: int = 0) -> None:
        """End the span and export it; only the first call has an effect. ``end_ns`` 0: now."""
        if self._exporter is not None and not self.status:
            self.end_ns = end_ns or time.perf_counter_ns()
            self.status = status
            self._exporter.export(self)


UNTRACED = Span("request")
"""Span of every request that is traced neither here nor by its caller."""


def begin_span(name: str, traceparent: str, exporter: SpanExporter | None, *, start_ns: int = 0) -> Span:
    """Start the span of a request at its entry: it continues the caller's trace, or starts one, if it is sampled.

    Args:
        name: Name of the span.
        traceparent: ``traceparent`` of the caller; empty: none.
        exporter: Exporter of spans; ``None``: nothing is recorded.
        start_ns: Start, in nanoseconds of the performance counter; 0: now.
    """
    parent = parse_traceparent(traceparent) if traceparent else None
    if exporter is not None:
        context = TraceContext.below(parent)
        if exporter.samples(context.trace_id, parent):
            return Span(name, parent, exporter, start_ns, context=context)
    return UNTRACED if parent is None else Span(name, parent, start_ns=start_ns)


def continue_span(name: str, traceparent: str, exporter: SpanExporter | None, *, kind: Kind = "server") -> Span:
    """Start the span of a part of a request: it is traced if the request is, and starts no trace of its own.

    Args:
        name: Name of the span.
        traceparent: ``traceparent`` of the request; empty: it is not traced.
        exporter: Exporter of spans; ``None``: nothing is recorded.
        kind: Kind of span.
    """
    parent = parse_traceparent(traceparent) if traceparent else None
    if parent is None:
        return UNTRACED
    return Span(name, parent, exporter if parent.sampled else None, kind=kind)
