"""Spans: what happened to a request and when, and what it is part of (W3C Trace Context).

A request carries a :class:`Span` on its way, whose events are noted where they happen. With an exporter the caller's
span is its parent; without one nothing is noted, and a caller's ``traceparent`` is passed on as it came.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import NamedTuple, Protocol

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(NamedTuple):
    """A span's place: hexadecimal ids of its trace (32 digits) and of itself (16), and the trace's flags (2)."""

    trace_id: str
    span_id: str
    flags: str = "01"

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


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
        at_ns: When, by ``time.perf_counter_ns``.
        detail: E.g. an instance's name; empty: nothing more to say.
    """

    name: str
    at_ns: int
    detail: str = ""


class SpanExporter(Protocol):
    """Takes spans that have ended."""

    def export(self, span: Span) -> None:
        """Take a span; called in the event loop, must not block or raise."""


class Span:
    """One piece of work, e.g. a request in the router.

    Args:
        name: What it is.
        parent: The span that it is part of, if there is one.
        exporter: Takes it at its end.
        start_ns: When it began, by ``time.perf_counter_ns``; 0: now.

    Attributes:
        context: Its place; ``None``: it has no parent and no exporter.
        events: In order; none without an exporter.
        status: How it ended: ``ok`` or an error's code; empty: not yet, or there is no exporter.
        end_ns: When it ended.
    """

    __slots__ = ("_exporter", "context", "end_ns", "events", "name", "parent", "start_ns", "status")

    def __init__(
        self,
        name: str,
        parent: TraceContext | None = None,
        exporter: SpanExporter | None = None,
        start_ns: int = 0,
    ) -> None:
        self.name, self.parent, self._exporter = name, parent, exporter
        self.start_ns = start_ns or time.perf_counter_ns()
        self.end_ns, self.status = 0, ""
        self.events: list[Event] = []
        self.context = parent
        if exporter is not None:
            trace_id = f"{secrets.randbits(128) or 1:032x}" if parent is None else parent.trace_id
            flags = "01" if parent is None else parent.flags
            self.context = TraceContext(trace_id, f"{secrets.randbits(64) or 1:016x}", flags)

    def event(self, name: str, detail: str = "") -> None:
        """Note that something happened now."""
        if self._exporter is not None:
            self.events.append(Event(name, time.perf_counter_ns(), detail))

    def end(self, status: str = "ok") -> None:
        """Note the end, once, and hand the span to the exporter."""
        if self._exporter is not None and not self.status:
            self.end_ns, self.status = time.perf_counter_ns(), status
            self._exporter.export(self)


UNTRACED = Span("request")
"""Stands for the span of every request that is traced neither here nor by its caller."""
