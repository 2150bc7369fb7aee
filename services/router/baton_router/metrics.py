"""Counters, gauges and histograms for one event loop, with the text format of Prometheus' client library.

The client library's own take a lock and several calls each, two to three microseconds; a request updates about forty.
These are plain additions, read when the metrics are scraped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

C = TypeVar("C")


class Amount:
    """A number that rises, or rises and falls."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount


class Distribution:
    """Values by the buckets that they fall into.

    Args:
        bounds: Upper bounds of the buckets, rising.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value, or the same one several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many values are at most each bound."""
        out = []
        so_far = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            so_far += count
            out.append(("+Inf" if math.isinf(bound) else str(float(bound)), float(so_far)))
        return out


class LabelNames:
    """Names that clients or plug-ins choose, as label values: all beyond a number or a length become ``other``.

    Args:
        most: Maximum number of names.
        most_chars: Maximum length of a name, in characters.
    """

    def __init__(self, most: int, most_chars: int = 4096) -> None:
        self._most = most
        self._most_chars = most_chars
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """Return a name as a label value."""
        if name not in self._names:
            if len(self._names) >= self._most or len(name) > self._most_chars:
                return "other"
            self._names.add(name)
        return name


class _Family(Collector, Generic[C]):
    """Series of one name, by their labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], C] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str, **named: str) -> C:
        """Return the series of some labels, by their order or by name; it may be kept."""
        key = values if not named else tuple(named[name] for name in self._labels)
        series = self._series.get(key)
        if series is None:
            if len(key) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {key}")
            series = self._series[key] = self._make()
        return series

    def remove(self, *values: str) -> None:
        """Remove the series of some labels, if there is one."""
        self._series.pop(values, None)

    @abstractmethod
    def _make(self) -> C: ...

    @abstractmethod
    def _metric(self) -> Metric: ...

    def describe(self) -> Iterator[Metric]:
        """Yield the family without values."""
        yield self._metric()


class _Numbers(_Family[Amount]):
    _type: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def collect(self) -> Iterator[Metric]:
        family = self._metric()
        for key, amount in self._series.items():
            family.add_metric([str(value) for value in key], amount.value)
        yield family

    def _make(self) -> Amount:
        return Amount()

    def _metric(self) -> CounterMetricFamily | GaugeMetricFamily:
        return self._type(self._name, self._text, labels=self._labels)


class Counter(_Numbers):
    """A number that rises."""

    _type = CounterMetricFamily

    def inc(self, amount: float = 1) -> None:
        """Add to the only series of a counter without labels."""
        self._series[()].value += amount


class Gauge(_Numbers):
    """A number that rises and falls."""

    _type = GaugeMetricFamily


class GaugeFunction(Collector):
    """A number that is read when the metrics are scraped.

    Args:
        read: Returns the number.
    """

    def __init__(self, name: str, text: str, registry: CollectorRegistry, read: Callable[[], float]) -> None:
        self._name = name
        self._text = text
        self._read = read
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Yield the family without a value."""
        yield GaugeMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._text, value=self._read())


class Histogram(_Family[Distribution]):
    """Values by buckets.

    Args:
        buckets: Their upper bounds, rising.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, *, buckets: Sequence[float]
    ) -> None:
        self._bounds = tuple(buckets)
        super().__init__(name, text, labels, registry)

    def observe(self, value: float) -> None:
        """Add a value to the only series of a histogram without labels."""
        self._series[()].observe(value)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for key, values in self._series.items():
            # With negative values there is no _sum and no _count: in OpenMetrics these must only rise.
            family.add_metric([str(value) for value in key], buckets=values.buckets(), sum_value=values.total)
        yield family

    def _make(self) -> Distribution:
        return Distribution(self._bounds)

    def _metric(self) -> Metric:
        return HistogramMetricFamily(self._name, self._text, labels=self._labels)
