"""A deployment on virtual time: requests arrive, are routed, prefilled, handed over and decoded.

Router (its own placement, index and policy), queues, chunked prefill, KV transfer and decode batches run as in a real
deployment; only the time of steps and of transfers comes from a profile. Each instance's link carries one transfer at
a time, at both of its ends; with layer-wise transfer the KV of a chunk travels while the chunk is computed, and the
last layer's part after it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from baton.types import Role
from baton_bench.report import build_from
from baton_bench.serve.records import ITL_SHARE
from baton_bench.simulator.engine import EngineExtras, SimulatedEngine, SimulatedSequence, Speculation
from baton_bench.simulator.profile import EngineProfile, Limits, Link, Overheads
from baton_bench.simulator.router import Fleet, MakeRouting, PrefillReport, Route, VirtualRouter
from baton_bench.simulator.timeline import Processors, Timeline
from baton_bench.traces import BLOCK_TOKENS, TraceRequest

FloatArray = npt.NDArray[np.float64]
Gaps = tuple[float, int]
"""Seconds between two tokens, and how often that gap occurred."""


def gaps_of(gaps: Sequence[tuple[float, int, int]], slices: Sequence[tuple[int, int, float]]) -> list[Gaps]:
    """Return the gaps between the tokens of a sequence in seconds, and how often each occurred.

    Args:
        gaps: Its instance's runs of steps: seconds of a step, steps, and sequences.
        slices: Parts of them: first, end, and seconds of waiting before the first step.
    """
    results: list[Gaps] = []
    for start, end, wait in slices:
        if start == end:
            if wait > 0:
                results.append((wait, 1))
            continue
        runs = gaps[start:end]
        seconds, count, _ = runs[0]
        results.append((seconds + wait, 1))
        if count > 1:
            results.append((seconds, count - 1))
        results += [run[:2] for run in runs[1:]]
    return results


def percentile_of(gaps: Sequence[Gaps], share: float) -> float:
    """Return a percentile of gaps, interpolated between those next to it, as ``numpy.percentile`` does."""
    position = share / 100 * (sum(count for _, count in gaps) - 1)
    low = int(position)
    seen = 0
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
    """One request's times in milliseconds.

    Attributes:
        itl_ms: The percentile of its gaps that targets are compared with.
        computed: Prompt tokens that were computed, the first time.
        began_s: Time of arrival.
    """

    number: int
    ttft_ms: float
    tpot_ms: float | None
    itl_ms: float | None
    e2e_ms: float
    waits_ms: tuple[float, ...]
    preemptions: int
    computed: int
    began_s: float
    remote: bool

    @classmethod
    def of(
        cls,
        sequence: SimulatedSequence,
        began: float,
        ended: float,
        gaps: Sequence[Gaps],
        computed: int,
        *,
        remote: bool,
    ) -> RequestTimes:
        """Take the times of a sequence that has ended."""
        ttft = 1e3 * (sequence.first_at - began)
        e2e = 1e3 * (ended - began)
        return cls(
            number=sequence.key,
            ttft_ms=ttft,
            tpot_ms=(e2e - ttft) / (sequence.target - 1) if sequence.target > 1 else None,
            itl_ms=1e3 * percentile_of(gaps, ITL_SHARE) if gaps else None,
            e2e_ms=e2e,
            waits_ms=tuple(1e3 * wait for _, _, wait in sequence.slices if wait > 1e-6),
            preemptions=sequence.num_preemptions,
            computed=computed,
            began_s=began,
            remote=remote,
        )

    def keeps(self, metric: str, limit_ms: float) -> bool:
        """Whether it kept a target; an answer too short to have gaps keeps those of gaps."""
        value = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "itl": self.itl_ms, "e2e": self.e2e_ms}[metric]
        return value is None or value <= limit_ms


@dataclass(frozen=True, slots=True)
class RoleUse:
    """What the instances of a role did, as shares of the time, averaged over them.

    Attributes:
        prefill: Share of steps with prompts.
        decode: Share of steps with decodes alone.
        batch: Mean number of decoding sequences per step.
        kv: Highest used share of the pool on any instance.
        link: Share of the time that the busiest instance's link carried KV.
        matched: Share of prompt tokens found in the prefix cache.
        preemptions: Number of preemptions on all instances.
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
        prefill: Use of the prefill instances; ``None``: there are none.
        decode: Use of the decode instances.
        gaps: Milliseconds between tokens [n], and how often each occurred [n].
        given_up_ms: Milliseconds that each request waited which was given up.
        stopped: Whether it was ended early because too many requests had failed.
    """

    requests: tuple[RequestTimes, ...]
    asked: int
    seconds: float
    prefill: RoleUse | None
    decode: RoleUse | None
    gaps: tuple[FloatArray, FloatArray]
    given_up_ms: tuple[float, ...] = ()
    stopped: bool = False

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestTimes],
        asked: int,
        seconds: float,
        engines: tuple[Sequence[SimulatedEngine], Sequence[SimulatedEngine]],
        links: Mapping[SimulatedEngine, float],
        given_up_ms: tuple[float, ...] = (),
        *,
        stopped: bool,
    ) -> Outcome:
        runs = [run for engine in engines[1] for run in engine.gaps]
        waits = [wait for each in requests for wait in each.waits_ms]
        values = np.array([1e3 * run[0] for run in runs] + waits)
        counts = np.array([float(run[1] * run[2]) for run in runs] + [1.0] * len(waits))
        prefill, decode = (RoleUse.of(each, seconds, links) for each in engines)
        return cls(tuple(requests), asked, seconds, prefill, decode, (values, counts), given_up_ms, stopped)

    def attainment(self, slos: Mapping[str, float]) -> float:
        """Return the share of the requests that kept all targets; what did not end kept none."""
        kept = sum(all(each.keeps(name, limit) for name, limit in slos.items()) for each in self.requests)
        return kept / self.asked

    def share_kept(self, metric: str, limit_ms: float) -> float:
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
        results = [value for each in self.requests if (value := getattr(each, f"{metric}_ms")) is not None]
        return float(np.percentile(results, share)) if results else float("nan")


@dataclass(frozen=True)
class Deployment:
    """A deployment to simulate.

    Attributes:
        prefills: Prefill instances; 0: decode instances compute their prompts.
        decodes: Decode instances.
        prefill: Profile of each prefill instance's engine.
        decode: Profile of each decode instance's engine.
        limits: Configured limits of a step on all instances.
        link: Link of each instance.
        layers: Number of decoder layers.
        kv_bytes_per_token: KV bytes of a token over all layers.
        overheads: Seconds beyond the engine.
        speculation: Speculative decoding of decode instances.
        policy: Name of the router's placement policy.
        threshold: Missing prompt tokens from which prefill instances compute; ``None``: the policy decides.
        cores: Processors that all instances share; ``None``: each has its own.
        threads: Processors that each instance keeps busy, if they are shared.
        slow: Number of instances of each role that are slower.
        slow_factor: How many times as long a slow instance takes for everything, at least 1.
        patience_s: Seconds after which a request that waits in the router is given up.
        block_tokens: Tokens of a block that prompts can share.
    """

    prefills: int
    decodes: int
    prefill: EngineProfile
    decode: EngineProfile
    limits: Limits
    link: Link
    layers: int
    kv_bytes_per_token: float
    overheads: Overheads = field(default_factory=Overheads)
    speculation: Speculation = field(default_factory=Speculation)
    policy: str = "match_minus_load"
    threshold: int | None = None
    cores: float | None = None
    threads: float = 1.0
    slow: int = 0
    slow_factor: float = 3.0
    patience_s: float = math.inf
    block_tokens: int = BLOCK_TOKENS

    @property
    def ratio(self) -> str:
        return f"{self.prefills}P{self.decodes}D"

    @property
    def devices(self) -> int:
        return self.prefills * self.prefill.devices + self.decodes * self.decode.devices


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way.

    Attributes:
        at: Time of arrival.
        placed_at: Time at which it was placed.
        computed: Prompt tokens that were computed, the first time.
        moved: Prompt tokens whose KV is transferred.
        follower: The session's next request, which waits for this one's answer; ``None``: there is none.
        sent: Leading tokens whose KV the decode instance has or is receiving.
        arrives_at: Time at which all of it will have arrived.
    """

    number: int
    request: TraceRequest
    at: float
    route: Route | None = None
    sequence: SimulatedSequence | None = None
    follower: _Job | None = None
    placed_at: float = 0.0
    remote: bool = False
    computed: int = 0
    moved: int = 0
    sent: int = 0
    arrives_at: float = 0.0
    exposed_s: float = 0.0


class Simulation:
    """One run; call :meth:`run` once.

    Args:
        deployment: Deployment to simulate.
        make_routing: Makes the router; by default Baton's own placement on virtual time.
        slos: Targets in milliseconds, by metric; for ``most_failed``.
        most_failed: End when more requests than this have failed a target; ``None``: never.
        seed: Seed of the router's choices.
    """

    def __init__(
        self,
        deployment: Deployment,
        make_routing: MakeRouting = VirtualRouter,
        *,
        slos: Mapping[str, float] | None = None,
        most_failed: int | None = None,
        seed: int = 0,
    ) -> None:
        self.deployment = deployment
        self._slos = dict(slos or {})
        self._most_failed = most_failed
        self._failed = 0
        self._timeline = Timeline()
        fleet = build_from(Fleet, deployment, max_num_seqs=deployment.limits.max_num_seqs, seed=seed)
        self._routing = make_routing(fleet, lambda: self._timeline.now)
        cores = deployment.cores
        self._processors = None if cores is None else Processors(self._timeline, cores, deployment.threads)
        self.prefills = [self._engine(Role.PREFILL, number) for number in range(deployment.prefills)]
        self.decodes = [self._engine(Role.DECODE, number) for number in range(deployment.decodes)]
        self._link_free: dict[SimulatedEngine, float] = dict.fromkeys((*self.prefills, *self.decodes), 0.0)
        self._link_busy: dict[SimulatedEngine, float] = dict.fromkeys((*self.prefills, *self.decodes), 0.0)
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[SimulatedSequence, _Job] = {}
        self._done: list[RequestTimes] = []
        self._given_up_ms: list[float] = []
        self._ended = False

    def _engine(self, role: Role, number: int) -> SimulatedEngine:
        deployment = self.deployment
        profile = deployment.prefill if role is Role.PREFILL else deployment.decode
        if number < deployment.slow:
            profile = profile.slower(deployment.slow_factor, deployment.slow_factor)
        return SimulatedEngine(
            role,
            profile,
            deployment.limits,
            self._timeline,
            self,
            EngineExtras(
                on_change=lambda new, gone: self._routing.on_blocks_changed(role, number, new, gone),
                step_s=deployment.overheads.step_s,
                speculation=deployment.speculation if role is Role.DECODE else Speculation(),
                processors=self._processors,
                block_tokens=deployment.block_tokens,
            ),
        )

    def run(self, requests: Sequence[TraceRequest], speedup: float = 1.0, *, closed: bool = False) -> Outcome:
        """Serve requests, given in order of arrival.

        Args:
            requests: The requests.
            speedup: Factor by which arrivals are faster.
            closed: Whether a session's next request, where its delay is known, comes that long after the answer before
                has ended, instead of at its time.
        """
        first = requests[0].at_ms
        latest: dict[str, _Job] = {}
        for number, request in enumerate(requests):
            job = _Job(number, request, (request.at_ms - first) / 1e3 / speedup)
            before = latest.get(request.session) if closed and request.delay_ms is not None else None
            if request.session:
                latest[request.session] = job
            if before is not None:
                before.follower = job
            else:
                self._schedule(job, job.at)
        self._timeline.run_while(lambda: not self._ended)
        seconds = self._timeline.now
        return Outcome.of(
            self._done,
            len(requests),
            seconds,
            (self.prefills, self.decodes),
            {engine: busy / seconds for engine, busy in self._link_busy.items()} if seconds else {},
            tuple(self._given_up_ms),
            stopped=self._ended,
        )

    def _schedule(self, job: _Job, at: float) -> None:
        job.at = at
        self._timeline.at(at + self.deployment.overheads.request_s, partial(self._arrive, job))

    def _schedule_follower(self, job: _Job) -> None:
        """Have the session's next request arrive, its delay after now."""
        if job.follower is not None:
            self._schedule(job.follower, self._timeline.now + (job.follower.request.delay_ms or 0.0) / 1e3)

    # Router

    def _arrive(self, job: _Job) -> None:
        self._waiting.append(job)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place the request that has waited longest, and the next ones, while a decode instance has room."""
        while self._waiting:
            job = self._waiting[0]
            if self._timeline.now - job.at > self.deployment.patience_s:
                self._waiting.popleft()
                self._given_up_ms.append(1e3 * (self._timeline.now - job.at))
                self._schedule_follower(job)
                continue
            job.route = self._routing.place(job.request)
            if job.route is None:
                return
            self._waiting.popleft()
            job.placed_at = self._timeline.now
            request = job.request
            full = request.blocks[: request.input_tokens // self.deployment.block_tokens]
            sequence = SimulatedSequence(job.number, request.input_tokens, request.output_tokens, full)
            job.sequence = sequence
            self._jobs[sequence] = job
            self.decodes[job.route.decode].submit(sequence)

    # Callbacks of the engines

    def needs_load(self, engine: SimulatedEngine, sequence: SimulatedSequence, matched: int) -> bool:
        """Whether a prefill instance was chosen and at least the threshold of prompt tokens is missing."""
        if sequence.pinned:
            return False
        route = self._jobs[sequence].route
        if route is None or route.prefill is None:
            return False
        threshold = self.deployment.limits.remote_prefill_threshold if route.threshold is None else route.threshold
        return sequence.prompt - matched >= threshold

    def start_load(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        job = self._jobs[sequence]
        self._timeline.at(
            self._timeline.now + 0.5 * self.deployment.overheads.handover_s, lambda: self._ask(job, engine, sequence)
        )

    def _ask(self, job: _Job, decode: SimulatedEngine, sequence: SimulatedSequence) -> None:
        route = job.route
        if route is None or route.prefill is None:
            raise AssertionError("a sequence loads that has no prefill instance")
        prefill = self.prefills[route.prefill]
        size = self.deployment.block_tokens
        there = size * decode.cache.match_prefix(sequence.names)
        own = size * prefill.cache.match_prefix(sequence.names)
        there = min(there, sequence.prompt - 1) // size * size
        job.remote = True
        job.sent = there
        job.arrives_at = self._timeline.now
        job.moved += sequence.prompt - there
        copy = SimulatedSequence(job.number, sequence.prompt, 1, sequence.names, pinned=True)
        self._jobs[copy] = job
        if there <= own:
            prefill.submit(copy)
            return
        # What decode alone holds comes from there before the rest is computed.
        copy.computed = there
        end = self._travel(decode, prefill, there - own, self._timeline.now, self._timeline.now)
        self._timeline.at(end, lambda: prefill.submit(copy))

    def on_chunk_computed(
        self, engine: SimulatedEngine, sequence: SimulatedSequence, tokens: int, began: float
    ) -> None:
        """Send the KV of a chunk, and after the last one the first token."""
        job = self._jobs[sequence]
        now = self._timeline.now
        if job.route is None or job.sequence is None:
            raise AssertionError("a prompt is computed that has no decode instance")
        decode = self.decodes[job.route.decode]
        job.computed += tokens
        fresh = sequence.computed - job.sent
        if fresh > 0:
            job.sent = sequence.computed
            job.arrives_at = max(job.arrives_at, self._travel(engine, decode, fresh, began, now))
        if sequence.missing:
            return
        end = max(now, job.arrives_at)
        job.exposed_s = end - now
        target = job.sequence
        del self._jobs[sequence]
        self._timeline.at(end, lambda: engine.release(sequence))
        self._timeline.at(end + 0.5 * self.deployment.overheads.handover_s, lambda: decode.load_ended(target))

    def _travel(
        self, source: SimulatedEngine, target: SimulatedEngine, tokens: int, began: float, computed: float
    ) -> float:
        """Return when the KV of tokens that were computed between two times has travelled."""
        link = self.deployment.link
        rate = link.bytes_per_s * min(source.profile.devices, target.profile.devices)
        seconds = tokens * self.deployment.kv_bytes_per_token / rate
        ready = began if link.layerwise else computed
        start = max(ready, self._link_free[source], self._link_free[target])
        end = start + seconds
        if link.layerwise:
            end = max(end, computed + seconds / self.deployment.layers)
        for each in (source, target):
            self._link_free[each] = max(self._link_free[each], end)
            self._link_busy[each] += seconds
        return end + link.latency_s

    def on_first_token(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        job = self._jobs[sequence]
        if job.route is None:
            return
        if not job.remote:
            job.computed = sequence.base - sequence.matched
        queue_s = sequence.admitted_at - job.placed_at
        self._routing.on_first_token(
            job.route,
            PrefillReport(
                job.remote,
                job.computed,
                sequence.base - job.computed,
                job.moved,
                job.exposed_s,
                sequence.first_at - job.placed_at,
                queue_s,
            ),
        )
        if self._waiting:
            self._place_waiting()

    def on_finished(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        """Note the request's times; a request that waits in the router may have room now."""
        job = self._jobs.pop(sequence)
        gaps = gaps_of(engine.gaps, sequence.slices)
        times = RequestTimes.of(sequence, job.at, self._timeline.now, gaps, job.computed, remote=job.remote)
        self._done.append(times)
        if not all(times.keeps(metric, limit) for metric, limit in self._slos.items()):
            self._failed += 1
            if self._most_failed is not None and self._failed > self._most_failed:
                self._ended = True
        if job.route is not None:
            self._routing.on_finished(job.route, job.request.output_tokens)
        self._schedule_follower(job)
        if self._waiting:
            self._place_waiting()
