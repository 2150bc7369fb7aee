"""Rates and percentiles of the last minutes, and flows of KV between instances, for the console.

Rates and percentiles are read off the router's own counters and histograms. A sample of them is taken at most once a
second, when a request ends or the console asks; what the window shows is the difference of two samples. So a request
costs one comparison of clocks, and a console that is just opened shows the minute before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_from_pb

_TTFT = "baton_request_ttft_seconds_bucket"
_ITL = "baton_request_itl_seconds_bucket"
_PROMPT = "baton_request_prompt_tokens_total"
_CACHED = "baton_request_cached_tokens_total"
_TOKENS = "baton_request_generated_tokens_total"
_FINISHED = "baton_request_finished_total"
_KV_BYTES = "baton_router_kv_bytes_total"
_NAMES = (_TTFT, _ITL, _PROMPT, _CACHED, _TOKENS, _FINISHED, _KV_BYTES)
_FAILED = "failed"
_FOLLOW_S = 1.0
STALLED_S = 10.0
"""Seconds without any token, while requests run, after which the deployment counts as stalled."""
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))

Buckets = dict[float, float]
"""Number of values up to each upper bound."""


@dataclass(slots=True)
class Sample:
    """The counters at one moment."""

    at: float
    totals: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)


class WindowStats:
    """Samples of the metrics over the last minutes.

    Args:
        registry: Registry of the metrics.
        window_s: Length of the period of percentiles and rates, in seconds.
        history_s: Length of the time series, in seconds.
        now: Monotonic clock, in seconds.

    Attributes:
        is_busy: Returns whether requests run.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        window_s: float = 60.0,
        history_s: float = 180.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._window_s = window_s
        self._history_s = history_s
        self._now = now
        self.is_busy: Callable[[], bool] = lambda: False
        self._timer: asyncio.TimerHandle | None = None
        self._busy_since = now()
        self._samples: deque[Sample] = deque([self._read()])
        self._pieces: deque[tuple[float, dict[str, Any]]] = deque()

    def sample(self) -> None:
        """Take a sample if the last one is a second old."""
        if self._now() - self._samples[-1].at >= 1.0:
            before = self._samples[-1]
            after = self._read()
            self._samples.append(after)
            self._pieces.append((after.at, _piece(before, after)))
            while self._samples[1].at < after.at - self._history_s:
                self._samples.popleft()
                self._pieces.popleft()

    def follow(self) -> None:
        """Sample every second while requests run, so that a pause before them is a piece of its own."""
        if self._timer is None:
            self._busy_since = self._now()
            self.sample()
            self._timer = asyncio.get_running_loop().call_later(_FOLLOW_S, self._follow_on)

    def _follow_on(self) -> None:
        self._timer = None
        self.sample()
        if self.is_busy():
            self._timer = asyncio.get_running_loop().call_later(_FOLLOW_S, self._follow_on)

    def stalled_s(self) -> float | None:
        """Return the seconds since the last token or the last end of a request, if they are many; only while busy."""
        newest = self._samples[-1]
        progress = [newest.totals[name] for name in (_TOKENS, _FINISHED)]
        since = newest.at
        for sample in reversed(self._samples):
            if [sample.totals[name] for name in (_TOKENS, _FINISHED)] != progress:
                break
            since = sample.at
        seconds = newest.at - max(since, self._busy_since)
        return round(seconds, 1) if seconds >= STALLED_S else None

    def _read(self) -> Sample:
        sample = Sample(self._now(), dict.fromkeys((*_NAMES, _FAILED), 0.0), {_TTFT: {}, _ITL: {}})
        for family in self._registry.restricted_registry(_NAMES).collect():
            for item in family.samples:
                if item.name in sample.histograms:
                    sample.histograms[item.name][float(item.labels["le"])] = item.value
                elif item.name in sample.totals:
                    sample.totals[item.name] += item.value
                    if item.name == _FINISHED and item.labels["outcome"] not in {"done", "cancelled"}:
                        sample.totals[_FAILED] += item.value
        return sample

    def window(self, window_s: float | None = None) -> dict[str, Any]:
        """Return rates, hit rate, and percentiles in milliseconds of the last seconds; ``None`` without values.

        Args:
            window_s: How many seconds; ``None``: the window.
        """
        wanted_s = self._window_s if window_s is None else min(window_s, self._history_s)
        self.sample()
        newest = self._samples[-1]
        inside = (x for x in self._samples if x.at >= newest.at - wanted_s and x is not newest)
        oldest = next(inside, self._samples[-2] if len(self._samples) > 1 else newest)
        seconds = min(wanted_s, newest.at - oldest.at)
        return {
            "window_s": round(seconds, 1),
            **_rates(oldest, newest, seconds),
            "failed": newest.totals[_FAILED] - oldest.totals[_FAILED],
            "ttft_ms": _percentiles(oldest.histograms[_TTFT], newest.histograms[_TTFT]),
            "itl_ms": _percentiles(oldest.histograms[_ITL], newest.histograms[_ITL]),
        }

    def history(self) -> list[dict[str, Any]]:
        """Return the time series between consecutive samples, oldest first; ``ago_s`` is the end of each piece."""
        now = self._now()
        return [{"ago_s": round(now - at, 1), **piece} for at, piece in self._pieces]


def _piece(before: Sample, after: Sample) -> dict[str, Any]:
    """Return the piece of the time series between two samples."""
    seconds = after.at - before.at
    ttft = _percentiles(before.histograms[_TTFT], after.histograms[_TTFT])
    itl = _percentiles(before.histograms[_ITL], after.histograms[_ITL])
    return {
        "seconds": round(seconds, 1),
        **_rates(before, after, seconds),
        "ttft_ms": ttft["p50"] if ttft else None,
        "itl_ms": itl["p50"] if itl else None,
    }


def _rates(before: Sample, after: Sample, seconds: float) -> dict[str, float | None]:
    def rate(name: str) -> float | None:
        return round((after.totals[name] - before.totals[name]) / seconds, 3) if seconds > 0 else None

    prompt = after.totals[_PROMPT] - before.totals[_PROMPT]
    hits = after.totals[_CACHED] - before.totals[_CACHED]
    return {
        "requests_per_s": rate(_FINISHED),
        "tokens_per_s": rate(_TOKENS),
        "kv_bytes_per_s": rate(_KV_BYTES),
        "hit_rate": round(hits / prompt, 4) if prompt > 0 else None,
    }


def _percentiles(before: Buckets, after: Buckets) -> dict[str, float] | None:
    bounds = sorted(after)
    counts = [after[bound] - before.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    return {name: round(1000 * quantile(bounds, counts, q), 3) for name, q in _QUANTILES}


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float:
    """Return a quantile of a histogram, interpolated linearly inside its bucket.

    Args:
        bounds: Upper bounds, rising; the last is infinite.
        counts: Values at most as large as each bound.
        q: From 0 to 1.

    Returns:
        The quantile; the largest finite bound for whatever lies beyond it.
    """
    rank = q * counts[-1]
    low = 0.0
    below = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low = low if math.isinf(bound) else bound
        below = count
    return low


_MAX_FLOWS = 4096
_Way = tuple[common_pb2.PrefillPath.ValueType, str, str, str]
"""Key of a flow, cheap to count; converted to a :class:`Flow` on demand."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow of prompts' KV.

    Attributes:
        path: ``local``, ``remote`` or ``store``.
        source: The prefill instance; empty unless ``path`` is ``remote``.
        target: The decode instance.
        pipe: Kind of pipe; empty: no KV travelled.
    """

    path: str
    source: str
    target: str
    pipe: str


class Flows:
    """Requests and bytes per flow, second by second, for the last ``window_s`` seconds.

    Args:
        window_s: How far back to remember.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, window_s: int = 10, *, now: Callable[[], float] = time.monotonic) -> None:
        self.window_s = window_s
        self._now = now
        self._seconds: deque[tuple[int, dict[_Way, list[int]]]] = deque(maxlen=window_s + 1)

    def add(self, trace: common_pb2.RequestTrace, num_bytes: int) -> None:
        """Count the flow of a request, and its bytes."""
        path = trace.path
        if not path:
            return
        second = int(self._now())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}))
        flows = self._seconds[-1][1]
        way = (path, trace.prefill_instance, trace.decode_instance, trace.pipe)
        counts = flows.get(way)
        if counts is None:
            if len(flows) >= _MAX_FLOWS:
                return
            counts = flows[way] = [0, 0]
        counts[0] += 1
        counts[1] += num_bytes

    def recent(self) -> dict[Flow, tuple[int, int]]:
        """Return requests and bytes of each flow of the window."""
        begin = self._now() - self.window_s
        totals: dict[Flow, list[int]] = {}
        for second, flows in self._seconds:
            if second < begin:
                continue
            for (wire, source, target, pipe), counts in flows.items():
                path = path_from_pb(wire) or ""
                total = totals.setdefault(Flow(path, source if path == "remote" else "", target, pipe), [0, 0])
                total[0] += counts[0]
                total[1] += counts[1]
        return {flow: (requests, num_bytes) for flow, (requests, num_bytes) in totals.items()}
