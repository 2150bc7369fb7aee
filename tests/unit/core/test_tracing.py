"""Trace contexts as W3C writes them, and spans that end once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.spans import MemoryExporter

from baton.tracing import UNTRACED, Span, TraceContext, begin_span, continue_span, parse_traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_context_comes_back_as_it_was(trace: int, span: int, flags: int) -> None:
    context = TraceContext(f"{trace:032x}", f"{span:016x}", f"{flags:02x}")
    assert parse_traceparent(str(context)) == context


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        PARENT + "-more",
        PARENT.replace("00-", "ff-", 1),
        PARENT.upper(),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        PARENT + "\n",
    ],
)
def test_what_the_standard_says_to_ignore_is_ignored(value: str) -> None:
    assert parse_traceparent(value) is None


def test_later_versions_are_read_as_far_as_they_are_known() -> None:
    assert parse_traceparent(PARENT.replace("00-", "01-", 1) + "-more") == parse_traceparent(PARENT)


def test_a_span_is_part_of_its_parent_and_is_exported_once() -> None:
    exporter, parent = MemoryExporter(), parse_traceparent(PARENT)
    span = Span("request", parent, exporter)
    span.event("placed", "d0")
    span.event("first_token")
    span.end()
    span.end("cancelled")
    assert exporter.spans == [span]
    assert span.context is not None
    assert parent is not None
    assert (span.context.trace_id, span.parent) == (parent.trace_id, parent)
    assert span.context.span_id != parent.span_id
    assert span.status == "ok"
    times = [span.start_ns, *(event.at_ns for event in span.events), span.end_ns]
    assert times == sorted(times)


def test_without_an_exporter_the_callers_context_is_passed_on() -> None:
    assert Span("request").context is None
    assert str(Span("request", parse_traceparent(PARENT)).context) == PARENT


def test_a_request_that_nobody_traces_has_no_span_of_its_own() -> None:
    assert begin_span("request", "", None) is UNTRACED
    assert begin_span("request", "nonsense", None) is UNTRACED
    assert continue_span("generate", "", MemoryExporter()) is UNTRACED  # instances begin no traces
    UNTRACED.event("placed")
    UNTRACED.part("kv_transfer", 1, 2, {"baton.kv_bytes": 1})
    UNTRACED.end()
    assert (UNTRACED.recording, UNTRACED.events, UNTRACED.attributes, UNTRACED.status) == (False, [], {}, "")


def test_instances_follow_what_the_owner_of_the_request_decided() -> None:
    exporter = MemoryExporter()
    assert continue_span("generate", PARENT, exporter).recording
    unsampled = continue_span("generate", PARENT.removesuffix("01") + "00", exporter)
    assert not unsampled.recording
    assert unsampled.traceparent == PARENT.removesuffix("01") + "00"


def test_a_part_lies_below_its_span_and_has_its_own_times() -> None:
    exporter = MemoryExporter()
    span = Span("generate", parse_traceparent(PARENT), exporter)
    span.part("kv_transfer", 5, 9, {"baton.kv_bytes": 7})
    (part,) = exporter.spans
    assert (part.parent, part.start_ns, part.end_ns, part.status) == (span.context, 5, 9, "ok")
    assert (part.attributes, part.kind) == ({"baton.kv_bytes": 7}, "client")
