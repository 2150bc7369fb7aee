"""Counters by plain addition show what the client library's own would show."""

from __future__ import annotations

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from baton_router.metrics import Counter, Gauge, Histogram

BUCKETS = (0.0, 0.5, 1.0, 30.0)


def shown(registry: CollectorRegistry) -> list[str]:
    """Return what is scraped, but for the times at which the library's own series were made."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5))),
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1, 40))),
)
@settings(deadline=None)
def test_what_is_scraped_is_the_same(counts: list[tuple[str, int]], values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = Counter("things", "Things", ["kind"], ours)
    gauge = Gauge("level", "Level", ["kind"], ours)
    histogram = Histogram("sizes", "Sizes", ["kind"], ours, buckets=BUCKETS)
    bare = Counter("bare", "Bare", [], ours)
    total = Histogram("whole", "Whole", [], ours, buckets=BUCKETS)
    their_counter = prometheus_client.Counter("things", "Things", ["kind"], registry=theirs)
    their_gauge = prometheus_client.Gauge("level", "Level", ["kind"], registry=theirs)
    their_histogram = prometheus_client.Histogram("sizes", "Sizes", ["kind"], registry=theirs, buckets=BUCKETS)
    their_bare = prometheus_client.Counter("bare", "Bare", registry=theirs)
    their_total = prometheus_client.Histogram("whole", "Whole", registry=theirs, buckets=BUCKETS)
    for kind, count in counts:
        counter.labels(kind).inc(count)
        gauge.labels(kind=kind).dec(count)
        bare.inc()
        their_counter.labels(kind).inc(count)
        their_gauge.labels(kind).dec(count)
        their_bare.inc()
    for kind, value in values:
        histogram.labels(kind).observe(value)
        total.observe(value)
        their_histogram.labels(kind).observe(value)
        their_total.observe(value)
    assert shown(ours) == shown(theirs)


def test_series_are_found_by_their_names() -> None:
    registry = CollectorRegistry()
    Histogram("sizes", "Sizes", [], registry, buckets=BUCKETS).observe(0.7)
    Counter("things", "Things", ["kind"], registry).labels("a").inc(3)
    assert registry.get_sample_value("things_total", {"kind": "a"}) == 3
    assert registry.get_sample_value("sizes_bucket", {"le": "1.0"}) == 1
    names = {family.name for family in registry.restricted_registry(["sizes_bucket"]).collect()}
    assert names == {"sizes"}


def test_labels_must_be_those_that_were_named() -> None:
    counter = Counter("things", "Things", ["kind"], CollectorRegistry())
    with pytest.raises(ValueError, match="kind"):
        counter.labels("a", "b")
    with pytest.raises(KeyError):
        counter.labels(color="a")
