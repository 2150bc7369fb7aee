"""What users feel of a generation: time to first token, time between tokens, tokens in and out."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2
from baton_router.metrics.fast_metrics import Counter, Histogram
from baton_router.processor.text_request import TextDelta

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class GenerationMetrics:
    """Metrics of all generations, whichever interface they came by, in the registry that was passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "baton_request_"
        # Of those without labels their only series, which is quicker to count in than its family.
        self.ttft = Histogram(name + "ttft_seconds", "Arrival to first token", [], registry, buckets=_TTFT_S).labels()
        self.itl = Histogram(
            name + "itl_seconds", "Between two messages with tokens", [], registry, buckets=_ITL_S
        ).labels()
        self.e2e = Histogram(name + "e2e_seconds", "Arrival to last token", [], registry, buckets=_E2E_S).labels()
        self.prompt_tokens = Counter(name + "prompt_tokens", "Prompt tokens of placed requests", [], registry).labels()
        self.generated_tokens = Counter(name + "generated_tokens", "Tokens delivered", [], registry).labels()
        self.cached_tokens = Counter(
            name + "cached_tokens", "Prompt tokens whose KV was in a cache", [], registry
        ).labels()
        self.finished = Counter(name + "finished", "Generations, by how they ended", ["outcome"], registry)


class GenerationClock:
    """Times one generation.

    Attributes:
        first_token_s: Seconds from its arrival to its first token; ``None``: there is none yet.
        generated: Tokens so far.
    """

    __slots__ = ("_arrived", "_last", "_metrics", "first_token_s", "generated")

    def __init__(self, metrics: GenerationMetrics | None, arrived: float) -> None:
        """Begin.

        Args:
            metrics: Where to count; ``None``: nowhere.
            arrived: When the request came, by ``time.perf_counter()``.
        """
        self._metrics = metrics
        self._arrived = arrived
        self._last = 0.0
        self.first_token_s: float | None = None
        self.generated = 0

    def tokens(self, deltas: list[TextDelta]) -> None:
        """Count new tokens that arrived together."""
        if self._metrics is None:
            return
        count = 0
        for delta in deltas:
            count += len(delta.token_ids)
        if count == 0:
            return
        now = time.perf_counter()
        if self._last:
            self._metrics.itl.observe(now - self._last)
        else:
            self.first_token_s = now - self._arrived
            self._metrics.ttft.observe(self.first_token_s)
        self._last = now
        self.generated += count
        self._metrics.generated_tokens.inc(count)

    def told(self, first_token_s: float | None, gaps_s: Iterable[float], generated: int) -> None:
        """Take what a client that has the tokens from an instance itself has measured.

        Args:
            first_token_s: Seconds from the request's arrival to its first token, if there is one; the first is taken.
            gaps_s: Seconds between messages with tokens that have not been told yet.
            generated: Tokens so far; fewer than before are passed over.
        """
        if self._metrics is None:
            return
        if first_token_s is not None and self.first_token_s is None:
            self.first_token_s = first_token_s
            self._metrics.ttft.observe(first_token_s)
        for gap in gaps_s:
            self._metrics.itl.observe(gap)
        if generated > self.generated:
            self._metrics.generated_tokens.inc(generated - self.generated)
            self.generated = generated

    def prompt(self, prompt_tokens: int, cached: int) -> None:
        """Count the prompt, once it is known how its KV came about."""
        if self._metrics is not None:
            self._metrics.prompt_tokens.inc(prompt_tokens)
            self._metrics.cached_tokens.inc(cached)

    def end(self, outcome: str) -> None:
        """Count the end: ``done``, ``cancelled`` or an error's code."""
        if self._metrics is not None:
            self._metrics.e2e.observe(time.perf_counter() - self._arrived)
            self._metrics.finished.labels(outcome).inc()


def cached_tokens(trace: common_pb2.RequestTrace | None) -> int:
    """Return how many prompt tokens did not have to be computed for this request.

    From the decode instance's own cache, from the prefill instance's cache where it did the prefill, or from the store.
    """
    if trace is None:
        return 0
    cached, path = trace.cached_tokens, trace.path
    if path == common_pb2.PREFILL_PATH_STORE:
        cached += trace.transferred_tokens
    elif path == common_pb2.PREFILL_PATH_REMOTE:
        cached = max(cached, trace.prefill_cached_tokens)
    return min(cached, trace.prompt_tokens)
