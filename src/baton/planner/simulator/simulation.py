"""A deployment on virtual time: requests arrive, are routed, prefilled, handed over and decoded.

Router (its own placement, index and policy), queues, chunked prefill, KV transfer and decode batches run as in a real
deployment; only the time of steps and of transfers comes from a profile. Each instance's link carries one transfer at
a time, at both of its ends; with layer-wise transfer the KV of a chunk travels while the chunk is computed, and the
last layer's part after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.bench.core.traces import BLOCK_TOKENS, TraceRequest
from baton.planner.profile import EngineProfile, Limits, Link, Overheads
from baton.planner.simulator.engine import EngineExtras, SimulatedEngine
from baton.planner.simulator.outcome import Outcome, RequestTimes, gaps_of
from baton.planner.simulator.routing import Fleet, MakeRouting, Route, Served
from baton.planner.simulator.sequences import SimulatedSequence, Speculation
from baton.planner.simulator.timeline import Processors, Timeline
from baton.types import Role


@dataclass(frozen=True)
class Deployment:
    """What is simulated.

    Attributes:
        prefills: Prefill instances; 0: decode instances compute their prompts.
        decodes: Decode instances.
        prefill: Each prefill instance's engine.
        decode: Each decode instance's engine.
        limits: What engines are told.
        link: Each instance's.
        layers: Of the model.
        kv_bytes_per_token: All layers.
        overheads: Beyond the engine.
        speculation: Of decode instances.
        policy: Of the router.
        threshold: Missing prompt tokens from which prefill instances compute; ``None``: the policy decides.
        cores: Processors that all instances share; ``None``: each has its own.
        threads: Of them that each instance keeps busy.
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

    @property
    def ratio(self) -> str:
        """As ``--ratio`` has it."""
        return f"{self.prefills}P{self.decodes}D"

    @property
    def devices(self) -> int:
        """GPUs that it takes."""
        return self.prefills * self.prefill.devices + self.decodes * self.decode.devices


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way.

    Attributes:
        sent: Leading tokens whose KV the decode instance has, or is being sent.
        arrives_at: When all of it will have come.
    """

    number: int
    request: TraceRequest
    at: float
    route: Route | None = None
    sequence: SimulatedSequence | None = None
    remote: bool = False
    cached: int = 0
    moved: int = 0
    sent: int = 0
    arrives_at: float = 0.0
    exposed_s: float = 0.0


class Simulation:
    """One run; call :meth:`run` once.

    Args:
        deployment: What is simulated.
        make_routing: Makes the router.
        slos: Targets in milliseconds, by metric; for ``most_failed``.
        most_failed: End when more requests than this have failed a target; ``None``: never.
        seed: Of the router's choices.
    """

    def __init__(
        self,
        deployment: Deployment,
        make_routing: MakeRouting,
        *,
        slos: Mapping[str, float] | None = None,
        most_failed: int | None = None,
        seed: int = 0,
    ) -> None:
        self.deployment = deployment
        self._slos, self._most_failed, self._failed = dict(slos or {}), most_failed, 0
        self._timeline = Timeline()
        fleet = Fleet(
            deployment.prefills,
            deployment.decodes,
            deployment.kv_bytes_per_token,
            deployment.limits.max_num_seqs,
            deployment.policy,
            deployment.threshold,
            seed,
        )
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
        self._ended = False

    def _engine(self, role: Role, number: int) -> SimulatedEngine:
        deployment = self.deployment
        return SimulatedEngine(
            role,
            deployment.prefill if role is Role.PREFILL else deployment.decode,
            deployment.limits,
            self._timeline,
            self,
            EngineExtras(
                changed=lambda new, gone: self._routing.changed(role, number, new, gone),
                step_s=deployment.overheads.step_s,
                speculation=deployment.speculation if role is Role.DECODE else Speculation(),
                processors=self._processors,
            ),
        )

    def run(self, requests: Sequence[TraceRequest], speedup: float = 1.0) -> Outcome:
        """Serve requests, which are in order of arrival, so many times faster than they say."""
        first = requests[0].at_ms
        for number, request in enumerate(requests):
            job = _Job(number, request, (request.at_ms - first) / 1e3 / speedup)
            self._timeline.at(job.at + self.deployment.overheads.request_s, partial(self._arrive, job))
        self._timeline.run_while(lambda: not self._ended)
        seconds = self._timeline.now
        return Outcome.of(
            self._done,
            len(requests),
            seconds,
            (self.prefills, self.decodes),
            {engine: busy / seconds for engine, busy in self._link_busy.items()} if seconds else {},
            stopped=self._ended,
        )

    # Router

    def _arrive(self, job: _Job) -> None:
        self._waiting.append(job)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place who has waited longest, and the next, while a decode instance has room."""
        while self._waiting:
            job = self._waiting[0]
            job.route = self._routing.place(job.request)
            if job.route is None:
                return
            self._waiting.popleft()
            request = job.request
            sequence = SimulatedSequence(job.number, request.input_tokens, request.output_tokens, request.blocks)
            job.sequence = sequence
            self._jobs[sequence] = job
            self.decodes[job.route.decode].submit(sequence)

    # What engines ask and tell

    def loads(self, engine: SimulatedEngine, sequence: SimulatedSequence, matched: int) -> bool:
        """Whether a prefill instance computes a sequence's prompt: enough is missing, and there is one."""
        if sequence.pinned:
            return False
        route = self._jobs[sequence].route
        if route is None or route.prefill is None:
            return False
        threshold = self.deployment.limits.remote_prefill_threshold if route.threshold is None else route.threshold
        return sequence.prompt - matched >= threshold

    def start_load(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        """Ask the prefill instance."""
        job = self._jobs[sequence]
        self._timeline.at(
            self._timeline.now + 0.5 * self.deployment.overheads.handover_s, lambda: self._ask(job, engine, sequence)
        )

    def _ask(self, job: _Job, decode: SimulatedEngine, sequence: SimulatedSequence) -> None:
        route = job.route
        if route is None or route.prefill is None:
            raise AssertionError("a sequence loads that has no prefill instance")
        prefill = self.prefills[route.prefill]
        there = BLOCK_TOKENS * decode.cache.matched(sequence.names)
        own = BLOCK_TOKENS * prefill.cache.matched(sequence.names)
        there = min(there, sequence.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        job.remote, job.sent, job.arrives_at = True, there, self._timeline.now
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

    def computed(self, engine: SimulatedEngine, sequence: SimulatedSequence, tokens: int, began: float) -> None:
        """Send the KV of a chunk, and after the last one the first token."""
        job, now = self._jobs[sequence], self._timeline.now
        if job.route is None or job.sequence is None:
            raise AssertionError("a prompt is computed for nobody")
        decode = self.decodes[job.route.decode]
        fresh = sequence.computed - job.sent
        if fresh > 0:
            job.sent = sequence.computed
            job.arrives_at = max(job.arrives_at, self._travel(engine, decode, fresh, began, now))
        if sequence.missing:
            return
        job.cached = sequence.prompt - tokens if tokens < sequence.prompt else 0
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

    def first_token(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        """Tell the router."""
        job = self._jobs[sequence]
        if job.route is None:
            return
        ttft = sequence.first_at - job.at
        computed = max(1, sequence.prompt - job.cached)
        self._routing.first_token(job.route, Served(job.remote, computed, job.cached, job.moved, job.exposed_s, ttft))
        if self._waiting:
            self._place_waiting()

    def finished(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        """Note the request's times; who waits in the router may have room now."""
        job = self._jobs.pop(sequence)
        gaps = gaps_of(engine.gaps, sequence.slices)
        times = RequestTimes.of(sequence, job.at, self._timeline.now, gaps, remote=job.remote)
        self._done.append(times)
        if not all(times.keeps(metric, limit) for metric, limit in self._slos.items()):
            self._failed += 1
            if self._most_failed is not None and self._failed > self._most_failed:
                self._ended = True
        if job.route is not None:
            self._routing.finished(job.route, job.request.output_tokens)
        if self._waiting:
            self._place_waiting()
