"""Spans on their way to a collector: who is sampled, what is counted, and what a collector that fails costs."""

from __future__ import annotations

import threading
from collections import Counter

import grpc
import pytest
from tests.support.servers.otlp_collector import OtlpCollector

from baton import otlp
from baton.config.environment import traces_endpoint
from baton.errors import ConfigError
from baton.otlp import OtlpExporter
from baton.rpc.server import free_port
from baton.tracing import Span, begin_span, parse_traceparent
from baton.worker.process import ServiceMetrics, open_span_exporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT.removesuffix("01") + "00"


class Fate:
    """Counts spans by what became of them."""

    def __init__(self, expected: int) -> None:
        self.counts: Counter[str] = Counter()
        self.all_there = threading.Event()
        self._expected, self._lock = expected, threading.Lock()

    def count(self, outcome: str, spans: int) -> None:
        with self._lock:
            self.counts[outcome] += spans
            if self.counts.total() >= self._expected:
                self.all_there.set()


def make(endpoint: str, fate: Fate, rate: float | None = None) -> OtlpExporter:
    return OtlpExporter(endpoint, service="baton-test", instance="t0", sample_rate=rate, count=fate.count)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def test_a_span_comes_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=chosen,deployment.environment=test")
    with OtlpCollector() as collector:
        exporter = make(collector.endpoint, Fate(1))
        span = Span("request", parse_traceparent(PARENT), exporter)
        span.event("placed", "d0")
        span.attributes["baton.failed_prefills"] = ("p0: away",)
        span.end("unavailable")
        assert span.context is not None
        (found,) = collector.of_trace(span.context.trace_id, "request").values()
        exporter.close()
    assert (found.parent, found.span_id) == ("b7ad6b7169203331", span.context.span_id)
    assert (found.service, found.instance, found.kind) == ("baton-test", "chosen", "server")
    assert found.start_ns <= found.events["placed"] <= found.end_ns
    assert found.end_ns - found.start_ns == span.end_ns - span.start_ns
    assert found.attributes == {"baton.failed_prefills": ["p0: away"], "error.type": "unavailable"}
    assert found.failed


@pytest.mark.parametrize(
    ("rate", "variable", "parent", "sampled"),
    [
        (None, "", "", True),
        (1.0, "", "", True),
        (0.0, "", "", False),
        (0.0, "", PARENT, True),  # its caller has decided
        (1.0, "", UNSAMPLED, False),
        (None, "always_off", "", False),
        (None, "parentbased_always_off", PARENT, True),
        (1.0, "always_off", "", True),  # the flag goes first
    ],
)
def test_the_caller_decides_and_else_the_rate(
    monkeypatch: pytest.MonkeyPatch, rate: float | None, variable: str, parent: str, sampled: bool
) -> None:
    if variable:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", variable)
    exporter = make(f"http://127.0.0.1:{free_port()}", Fate(0), rate)
    try:
        assert begin_span("request", parent, exporter).recording is sampled
    finally:
        exporter.close()


def test_a_share_is_sampled() -> None:
    exporter = make(f"http://127.0.0.1:{free_port()}", Fate(0), 0.25)
    try:
        found = sum(begin_span("request", "", exporter).recording for _ in range(2000))
    finally:
        exporter.close()
    assert 380 < found < 620  # 6 deviations


def test_what_a_collector_refuses_is_counted_and_what_has_no_room_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "_QUEUE", 600)
    caplog.set_level("INFO", "baton.otlp")
    fate = Fate(700)
    with OtlpCollector() as collector:
        exporter = make(collector.endpoint, fate)
        collector.gate.clear()
        collector.refuse = grpc.StatusCode.PERMISSION_DENIED
        for _ in range(700):  # none is answered, so at most 600 are taken
            Span("request", None, exporter).end()
        assert fate.counts == {"dropped": 100}
        collector.gate.set()
        assert fate.all_there.wait(240)
        assert fate.counts == {"dropped": 100, "failed": 600}
        collector.refuse = None
        back = Span("request", None, exporter)
        back.end()
        assert back.context is not None
        collector.of_trace(back.context.trace_id, "request")
        exporter.close()
    said = [record.getMessage() for record in caplog.records if record.name == "baton.otlp"]
    assert [("does not take" in line, "again" in line) for line in said] == [(True, False), (False, True)]


def test_an_end_waits_for_no_collector() -> None:
    fate = Fate(2)
    with OtlpCollector() as collector:
        collector.gate.clear()
        exporter = make(collector.endpoint, fate)
        for _ in range(2):
            Span("request", None, exporter).end()
        exporter.close()  # returns although the collector never answers
        collector.gate.set()
    assert fate.all_there.wait(240)
    assert fate.counts == {"failed": 2}


def test_the_endpoint_is_the_flags_or_opentelemetrys(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(env: dict[str, str]) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("os.environ", env)
            return traces_endpoint()

    one, other = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:1"}
    assert named({}) == ""
    assert named(one) == "http://a:1"
    assert named(one | other) == "http://b:1"
    assert named(one | {"OTEL_SDK_DISABLED": "true"}) == ""
    assert named(one | {"OTEL_TRACES_EXPORTER": "none"}) == ""
    assert open_span_exporter("", "router", "r0", ServiceMetrics("router")) is None


def test_without_the_extra_the_flag_is_an_error_and_the_variable_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "baton.otlp", None)
    with pytest.raises(ConfigError, match=r"baton-serve\[otel\]"):
        open_span_exporter("http://127.0.0.1:1", "router", "r0", ServiceMetrics("router"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert open_span_exporter("", "router", "r0", ServiceMetrics("router")) is None
    assert "baton-serve[otel]" in caplog.text
