"""What was seen of one request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

ITL_SHARE = 95
"""Percentile of a request's gaps that an ITL target is compared with."""


@dataclass(slots=True)
class Sample:
    """One request; times in seconds on a monotonic clock.

    Attributes:
        number: Of the request, from 0.
        due_s: When it should have been sent.
        sent_s: When it was: it may have waited for ``--max-concurrency``, or for this process.
        arrivals: When each event with output came.
        output_tokens: As the service counts them; else events.
        prompt_tokens, cached_tokens: As the service counts them; ``None``: it does not say.
        error: Its kind, such as ``http 429``, ``timeout`` or ``connection``; empty: it went well.
        message: What the service said of it.
    """

    number: int
    due_s: float = 0.0
    sent_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    message: str = ""

    def finish(self, output_tokens: int | None) -> None:
        """Take the service's count of output tokens, and find fault with an answer without any."""
        self.output_tokens = len(self.arrivals) if output_tokens is None else output_tokens
        if not self.error and not self.arrivals:
            self.error, self.message = "empty answer", "no event had output"

    def fail(self, kind: str, message: str) -> None:
        """Note why it failed; the first reason counts."""
        if not self.error:
            self.error, self.message = kind, " ".join(message.split())[:300]

    @property
    def late_ms(self) -> float:
        """Milliseconds that it waited here before it was sent."""
        return 1e3 * max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from sending to the first output."""
        return 1e3 * (self.arrivals[0] - self.sent_s)

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from sending to the last output."""
        return 1e3 * (self.arrivals[-1] - self.sent_s)

    @property
    def itl_ms(self) -> list[float]:
        """Milliseconds between events with output."""
        return [1e3 * (after - before) for before, after in itertools.pairwise(self.arrivals)]

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; ``None``: there was one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    def keeps(self, metric: str, limit_ms: float) -> bool:
        """Whether it kept a target; an answer too short to have gaps keeps those of gaps."""
        if self.error:
            return False
        if metric == "itl":
            gaps = self.itl_ms
            return not gaps or float(np.percentile(gaps, ITL_SHARE)) <= limit_ms
        value = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}[metric]
        return value is None or value <= limit_ms
