"""The requests that a plan is for: a trace, or lengths and a rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.errors import ConfigError
from baton_bench.traces import BLOCK_TOKENS, TraceRequest, best_hit_rate, draw_length, read_trace


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        name: File name of the trace, or the requested lengths.
        requests: The requests.
        rate: Mean arrival rate in requests per second.
        isl: Mean prompt tokens.
        osl: Mean output tokens.
        hit_rate: Share of the prompt tokens that one cache with endless memory would find.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    rate: float
    isl: float
    osl: float
    hit_rate: float

    @classmethod
    def of(cls, name: str, requests: Sequence[TraceRequest]) -> Workload:
        """Sum up requests.

        Raises:
            ConfigError: They are too few, or all arrive at once.
        """
        span = (requests[-1].at_ms - requests[0].at_ms) / 1e3 if requests else 0.0
        if len(requests) < 2 or span <= 0:
            raise ConfigError(f"{name} has too few requests for a rate", field="trace")
        return cls(
            name=name,
            requests=tuple(requests),
            rate=(len(requests) - 1) / span,
            isl=float(np.mean([each.input_tokens for each in requests])),
            osl=float(np.mean([each.output_tokens for each in requests])),
            hit_rate=best_hit_rate([each.blocks for each in requests]),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(each.input_tokens + each.output_tokens for each in self.requests)

    def first(self, count: int) -> Workload:
        """Return the workload of the first ``count`` requests."""
        return self if count >= len(self.requests) else Workload.of(self.name, self.requests[:count])

    def repeated(self, times: int) -> Workload:
        """Return the requests ``times`` times in a row, at the same rate; repetitions share nothing with each other."""
        fresh = 1 + max((name for each in self.requests for name in each.blocks), default=0)
        span_ms = 1e3 * len(self.requests) / self.rate
        results = [
            dataclasses.replace(
                each,
                at_ms=each.at_ms + number * span_ms,
                blocks=tuple(name + number * fresh for name in each.blocks),
            )
            for number in range(times)
            for each in self.requests
        ]
        return Workload.of(self.name, results)

    def longer(self, isl: float = 1.0, osl: float = 1.0) -> Workload:
        """Return the requests with prompts and outputs scaled by factors; the new parts share nothing."""
        fresh = 1 + max((name for each in self.requests for name in each.blocks), default=0)
        results = []
        for each in self.requests:
            tokens = max(1, round(isl * each.input_tokens))
            count = -(-tokens // BLOCK_TOKENS)
            blocks = each.blocks[:count]
            if count > len(blocks):
                more = count - len(blocks)
                blocks += tuple(range(fresh, fresh + more))
                fresh += more
            results.append(
                dataclasses.replace(
                    each,
                    input_tokens=tokens,
                    output_tokens=max(1, round(osl * each.output_tokens)),
                    blocks=blocks,
                )
            )
        return Workload.of(self.name, results)


def from_trace(path: Path, limit: int | None) -> Workload:
    """Read a trace in Mooncake's format; at least one token of each prompt is computed.

    Raises:
        ConfigError: The file cannot be read, or a line is not what it should be.
    """
    return Workload.of(path.name, read_trace(path, limit))


def from_lengths(isl: int, osl: int, count: int, *, spread: float = 0.0, seed: int = 0) -> Workload:
    """Return requests that share nothing and arrive at random (Poisson), one per second on average.

    Args:
        isl: Mean prompt tokens.
        osl: Mean output tokens.
        count: How many.
        spread: Lengths are drawn evenly from (1 - spread) to (1 + spread) times the mean.
        seed: Seed of lengths and arrivals.
    """
    rng = np.random.default_rng(seed)
    pauses = rng.exponential(1.0, count)
    times = np.concatenate(([0.0], np.cumsum(pauses)[:-1]))
    times *= (count - 1) / times[-1]  # the same rate for every seed
    name = 0
    requests = []
    for at in times.tolist():
        tokens = draw_length(rng, isl, spread)
        blocks = -(-tokens // BLOCK_TOKENS)
        requests.append(
            TraceRequest(1e3 * at, tokens, draw_length(rng, osl, spread), tuple(range(name, name + blocks)))
        )
        name += blocks
    return Workload.of(f"isl {isl}, osl {osl}", requests)
