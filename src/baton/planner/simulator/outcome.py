"""What came of a simulation, in the terms of ``baton bench serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.serve.sample import ITL_SHARE
from baton.planner.simulator.engine import SimulatedEngine
from baton.planner.simulator.sequences import SimulatedSequence

FloatArray = npt.NDArray[np.float64]
Gaps = tuple[float, int]
"""Seconds between two tokens, and how often they came."""


def gaps_of(gaps: Sequence[tuple[float, int, int]], slices: Sequence[tuple[int, int, float]]) -> list[Gaps]:
    """Return the seconds between the tokens of a sequence, and how often each came.

    Args:
        gaps: Its instance's runs of steps: seconds of a step, steps, and sequences.
        slices: Parts of them: first, end, and seconds of waiting before the first step.
    """
    found: list[Gaps] = []
    for start, end, wait in slices:
        if start == end:
            if wait > 0:
                found.append((wait, 1))
            continue
        runs = gaps[start:end]
        seconds, count, _ = runs[0]
        found.append((seconds + wait, 1))
        if count > 1:
            found.append((seconds, count - 1))
        found += [run[:2] for run in runs[1:]]
    return found


def percentile_of(gaps: Sequence[Gaps], share: float) -> float:
    """Return a percentile of gaps, interpolated between those next to it, as ``numpy.percentile`` does."""
    position = share / 100 * (sum(count for _, count in gaps) - 1)
    low, seen = int(position), 0
    below: float | None = None
    for seconds, count in sorted(gaps):
        seen += count
        if below is not None:
            return below + (position - low) * (seconds - below)
        if seen > low:
            if seen > low + 1 or position == low:
                return seconds
            below = seconds
    raise ValueError("no gaps")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request's times in milliseconds; ``itl_ms`` is the percentile that targets are compared with."""

    number: int
    ttft_ms: float
    tpot_ms: float | None
    itl_ms: float | None
    e2e_ms: float
    waits_ms: tuple[float, ...]
    preemptions: int
    remote: bool

    @classmethod
    def of(
        cls, sequence: SimulatedSequence, began: float, ended: float, gaps: Sequence[Gaps], *, remote: bool
    ) -> RequestTimes:
        """Take the times of a sequence that has ended."""
        ttft, e2e = 1e3 * (sequence.first_at - began), 1e3 * (ended - began)
        return cls(
            number=sequence.key,
            ttft_ms=ttft,
            tpot_ms=(e2e - ttft) / (sequence.target - 1) if sequence.target > 1 else None,
            itl_ms=1e3 * percentile_of(gaps, ITL_SHARE) if gaps else None,
            e2e_ms=e2e,
            waits_ms=tuple(1e3 * wait for _, _, wait in sequence.slices if wait > 1e-6),
            preemptions=sequence.num_preemptions,
            remote=remote,
        )

    def keeps(self, metric: str, limit_ms: float) -> bool:
        """Whether it kept a target; an answer too short to have gaps keeps those of gaps."""
        value = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "itl": self.itl_ms, "e2e": self.e2e_ms}[metric]
        return value is None or value <= limit_ms


@dataclass(frozen=True, slots=True)
class RoleUse:
    """What the instances of a role did, as shares of the time, on average.

    Attributes:
        prefill: Steps with prompts.
        decode: Other steps.
        batch: Sequences that decoded, while any did.
        kv: Most of the pool that was in use, of the fullest instance.
        link: The link carried KV, of the busiest instance.
        matched: Prompt tokens that were cached, of those that instances were to compute.
        preemptions: Of all.
    """

    prefill: float
    decode: float
    batch: float
    kv: float
    link: float
    matched: float
    preemptions: int

    @classmethod
    def of(
        cls, engines: Sequence[SimulatedEngine], seconds: float, links: Mapping[SimulatedEngine, float]
    ) -> RoleUse | None:
        """Sum up; ``None``: there are no instances."""
        if not engines or not seconds:
            return None
        uses = [engine.use for engine in engines]
        total = seconds * len(engines)
        steps = sum(use.decode_s + use.prefill_s for use in uses)
        tokens = sum(use.prompt_tokens + use.matched_tokens for use in uses)
        return cls(
            prefill=sum(use.prefill_s for use in uses) / total,
            decode=sum(use.decode_s for use in uses) / total,
            batch=sum(use.sequence_s for use in uses) / steps if steps else 0.0,
            kv=max(use.most_held / engine.cache.capacity for use, engine in zip(uses, engines, strict=True)),
            link=max(links[engine] for engine in engines),
            matched=sum(use.matched_tokens for use in uses) / tokens if tokens else 0.0,
            preemptions=sum(use.preemptions for use in uses),
        )


@dataclass(frozen=True)
class Outcome:
    """A simulation's end.

    Attributes:
        requests: In the order of their ends; those that ended.
        asked: Requests that arrived, or would have.
        seconds: From the first arrival to the last end.
        prefill: What prefill instances did; ``None``: there are none.
        decode: What decode instances did.
        gaps: Milliseconds between tokens [n], with how often they came [n].
        stopped: It was ended early: too many had failed.
    """

    requests: tuple[RequestTimes, ...]
    asked: int
    seconds: float
    prefill: RoleUse | None
    decode: RoleUse | None
    gaps: tuple[FloatArray, FloatArray]
    stopped: bool = False

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestTimes],
        asked: int,
        seconds: float,
        engines: tuple[Sequence[SimulatedEngine], Sequence[SimulatedEngine]],
        links: Mapping[SimulatedEngine, float],
        *,
        stopped: bool,
    ) -> Outcome:
        """Sum up a simulation."""
        runs = [run for engine in engines[1] for run in engine.gaps]
        waits = [wait for each in requests for wait in each.waits_ms]
        values = np.array([1e3 * run[0] for run in runs] + waits)
        counts = np.array([float(run[1] * run[2]) for run in runs] + [1.0] * len(waits))
        prefill, decode = (RoleUse.of(each, seconds, links) for each in engines)
        return cls(tuple(requests), asked, seconds, prefill, decode, (values, counts), stopped)

    def attainment(self, slos: Mapping[str, float]) -> float:
        """Return the share of the requests that kept all targets; what did not end kept none."""
        kept = sum(all(each.keeps(name, limit) for name, limit in slos.items()) for each in self.requests)
        return kept / self.asked

    def kept(self, metric: str, limit_ms: float) -> float:
        """Return the share of the requests that kept one target."""
        return sum(each.keeps(metric, limit_ms) for each in self.requests) / self.asked

    def goodput(self, slos: Mapping[str, float]) -> float:
        """Return requests per second that kept all targets."""
        return self.attainment(slos) * self.asked / self.seconds if self.seconds else 0.0

    def percentile(self, metric: str, share: float) -> float:
        """Return a percentile, in milliseconds: of ``itl`` over all gaps, else over the requests."""
        if metric == "itl":
            values, counts = self.gaps
            order = np.argsort(values)
            total = np.cumsum(counts[order])
            if not total.size:
                return float("nan")
            return float(values[order][np.searchsorted(total, share / 100 * total[-1])])
        found = [value for each in self.requests if (value := getattr(each, f"{metric}_ms")) is not None]
        return float(np.percentile(found, share)) if found else float("nan")
