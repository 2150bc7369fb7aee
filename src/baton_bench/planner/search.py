"""Which deployment serves most requests within the targets, per GPU.

Goodput is DistServe's: the highest rate at which a share of the requests (90 %) keeps all targets. Candidates are all
ratios and parallel shapes that use the GPUs up, those with prefill instances twice: with the router's policy free to
let decode instances compute prompts that prefill has no time for, and without; and those without prefill instances.
The closed forms say how much each can do at most; candidates are tried in that order, and one that could not beat the
best is not simulated at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.engine.step_budget import SLO_SHARE
from baton.errors import ConfigError
from baton.terminal import Step
from baton_bench.planner.workload import Workload
from baton_bench.serve.run import find_knee
from baton_bench.simulator.engine import Speculation
from baton_bench.simulator.profile import EngineProfile, Profile
from baton_bench.simulator.simulation import Deployment, Outcome, Simulation


def md1_wait_s(rate: float, service_s: float) -> float:
    """Return the mean time in the queue of an M/D/1 system, in seconds; infinite from full load on."""
    load = rate * service_s
    return load * service_s / (2 * (1 - load)) if load < 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Requests per second that parts of a deployment can take at most, however they are scheduled.

    Attributes:
        prefill: Prompts that prefill instances compute; 0: there are none.
        link: Prompts whose KV is transferred; infinite without transfers.
        decode: Outputs that decode instances generate within the targets, if they compute no prompts.
        decodes: Decode instances.
        busy_s: Seconds of a decode instance per output.
        own_s: Seconds of a decode instance per prompt that it computes; infinite: it computes none.
        overlap: Share of that which steps with decodes may save.
        batch: Sequences per decode instance within the targets and the pool.
        prompt_s: Seconds of a prompt of mean length, less what can be cached, where prompts are computed.
    """

    prefill: float
    link: float
    decode: float
    decodes: int
    busy_s: float
    own_s: float
    overlap: float
    batch: int
    prompt_s: float

    @property
    def rate(self) -> float:
        """Upper bound for the deployment: decode instances compute the prompts that prefill has no time for."""
        apart = min(self.prefill, self.link)
        if apart >= self.decode:
            return self.decode
        if math.isinf(self.own_s):
            return apart
        beside = (1 - self.overlap) * self.own_s
        mixed = (self.decodes + apart * beside) / (self.busy_s + beside)
        return min(mixed, apart + self.decodes / self.own_s)

    @property
    def limit(self) -> str:
        """Name of the part with the lowest bound: ``decode``, ``prefill`` or ``link``."""
        if min(self.prefill, self.link) >= self.decode:
            return "decode"
        return "link" if self.link < self.prefill else "prefill"

    def md1_ttft_s(self, rate: float, deployment: Deployment) -> float:
        """Return the mean time to first token if requests wait only in the prompts' queue, spread evenly."""
        instances = deployment.prefills or deployment.decodes
        overheads = deployment.overheads
        more = overheads.request_s + (overheads.handover_s if deployment.prefills else 0.0)
        return self.prompt_s + md1_wait_s(rate / instances, self.prompt_s) + more


def bounds(deployment: Deployment, workload: Workload, slos: Mapping[str, float]) -> Bounds:
    """Return a deployment's bounds for a workload."""
    fresh = max(1.0, workload.isl * (1 - workload.hit_rate))
    start = workload.isl - fresh
    own = _prompt_s(deployment.decode, fresh, start, deployment)
    prompt_s = _prompt_s(deployment.prefill, fresh, start, deployment) if deployment.prefills else own
    batch, step_s = _largest_batch(deployment, workload, slos)
    steps = max(0.0, workload.osl - 1) / deployment.speculation.per_step
    busy = max(1e-12, steps * step_s / batch)
    rate = deployment.link.bytes_per_s * min(deployment.prefill.devices, deployment.decode.devices)
    ends = min(deployment.prefills, deployment.decodes)
    return Bounds(
        prefill=deployment.prefills / prompt_s,
        link=ends * rate / (deployment.kv_bytes_per_token * fresh) if ends else float("inf"),
        decode=deployment.decodes / busy,
        decodes=deployment.decodes,
        busy_s=busy,
        own_s=math.inf if deployment.threshold is not None else own,
        overlap=deployment.decode.overlap,
        batch=batch,
        prompt_s=prompt_s,
    )


def kv_bandwidth_needed(deployment: Deployment, bounds: Bounds, workload: Workload) -> float:
    """Return ``kv_bytes * v_p``: bytes per second that a prefill instance makes when it is never idle."""
    fresh = max(1.0, workload.isl * (1 - workload.hit_rate))
    return deployment.kv_bytes_per_token * fresh / bounds.prompt_s


def _prompt_s(engine: EngineProfile, tokens: float, start: float, deployment: Deployment) -> float:
    """Return the seconds of a prompt's rest; many prompts in a step share the fixed part, so none is counted."""
    if deployment.limits.max_num_batched_tokens >= 2 * tokens:
        return engine.prefill.per_token_s * tokens + engine.prefill.per_pair_s * tokens * (start + 0.5 * tokens)
    steps = max(1.0, tokens / deployment.limits.max_num_batched_tokens)
    return engine.prefill.seconds(tokens, tokens * (start + 0.5 * tokens)) + (steps - 1) * engine.prefill.fixed_s


def _largest_batch(deployment: Deployment, workload: Workload, slos: Mapping[str, float]) -> tuple[int, float]:
    """Return the most sequences whose steps keep the targets, and the seconds of such a step."""
    engine = deployment.decode
    speculation = deployment.speculation
    context = workload.isl + 0.5 * workload.osl
    queries = 1 + speculation.tokens
    limit = min(slos.get("itl", float("inf")), slos.get("tpot", float("inf")) * speculation.per_step) / 1e3

    def seconds(batch: float) -> float:
        return engine.decode.seconds(batch * queries, batch * context) + deployment.overheads.step_s

    # What prompts share is held once.
    own = workload.isl * (1 - workload.hit_rate) + 0.5 * workload.osl
    most = max(1, min(deployment.limits.max_num_seqs, int(engine.kv_tokens / own)))
    while most > 1 and seconds(most) > limit:
        most -= 1
    return most, seconds(most)


_COARSE_REQUESTS = 400
_COARSE_PRECISION = 0.1
_FINALISTS = 4
_IDLE_SHARE = 0.02
"""Share of a bound: a rate at which requests hardly ever overlap."""
_IDLE_REQUESTS = 40
_BEYOND_BOUND = 1.1
"""Share of a bound above which no rate is tried: a few requests at once keep the targets at any rate."""
_LENGTHENING = 4
"""Factor of the number of requests where they are too few to break the targets at that rate."""
_MOST_LENGTHENING = 16


@dataclass(frozen=True)
class Goal:
    """The targets, and what may be tried.

    Attributes:
        slos: Targets in milliseconds, by metric.
        attainment: Share of the requests that must keep all of them.
        gpus: To be used.
        tps: Tensor-parallel sizes to try.
        pps: Pipeline sizes to try.
        policy: Name of the router's placement policy.
        speculation: Speculative decoding of decode instances.
        cores: Processors that all instances share; ``None``: each has its own.
        threads: Processors that each instance keeps busy, if they are shared.
        precision: Width of the bracket of a goodput, as a share of it.
        seed: Seed of the router's choices.
    """

    slos: Mapping[str, float]
    attainment: float
    gpus: int
    tps: tuple[int, ...] = (1,)
    pps: tuple[int, ...] = (1,)
    policy: str = "match_minus_load"
    speculation: Speculation = dataclasses.field(default_factory=Speculation)
    cores: float | None = None
    threads: float = 1.0
    precision: float = 0.03
    seed: int = 0


@dataclass(frozen=True)
class CandidateResult:
    """A deployment's goodput.

    Attributes:
        deployment: The deployment.
        bounds: Upper bounds by the closed forms.
        rate: Highest rate that kept the targets, requests per second, at most the bound where none broke them;
            ``None``: none kept them.
        kept: Outcome at the highest rate that kept them.
        broke_at: Lowest rate that did not; ``None``: there are too few requests to break the targets at any rate.
        broken: Outcome at that rate, until too many requests had failed.
        requests: Number of simulated requests per rate.
    """

    deployment: Deployment
    bounds: Bounds
    rate: float | None
    kept: Outcome | None
    broke_at: float | None
    broken: Outcome | None
    requests: int

    @property
    def reached(self) -> bool:
        """Whether the search went up to where the targets break."""
        return self.broke_at is not None

    @property
    def per_gpu(self) -> float:
        return (self.rate or 0.0) / self.deployment.devices


def make_deployment(
    profile: Profile, goal: Goal, ratio: tuple[int, int], engines: tuple[EngineProfile, EngineProfile]
) -> Deployment:
    """Return a deployment; its decode instances bound their steps as ``slo.itl-ms`` of a deployment's file has them."""
    limits = profile.limits
    if "itl" in goal.slos:
        share = SLO_SHARE * goal.slos["itl"]
        given = limits.step_budget_ms
        limits = dataclasses.replace(limits, step_budget_ms=share if given is None else min(given, share))
    return Deployment(
        prefills=ratio[0],
        decodes=ratio[1],
        prefill=engines[0],
        decode=engines[1],
        limits=limits,
        link=profile.link,
        layers=profile.layers,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        overheads=profile.overheads,
        speculation=goal.speculation,
        policy=goal.policy,
        cores=goal.cores,
        threads=goal.threads,
    )


def strictly_apart(deployment: Deployment) -> Deployment:
    """Return the deployment with decode instances that compute only short prompts, however busy prefill is."""
    return dataclasses.replace(deployment, threshold=deployment.limits.remote_prefill_threshold)


def fitting_engines(profile: Profile, goal: Goal, longest: int) -> list[EngineProfile]:
    """Return the engines of the shapes to try whose KV pool holds a request of ``longest`` tokens.

    Raises:
        ConfigError: There is none.
    """
    shapes = [profile.engine(tp, pp) for tp in goal.tps for pp in goal.pps if tp * pp <= goal.gpus]
    engines = [engine for engine in shapes if engine is not None and engine.kv_tokens > longest]
    if not engines:
        raise ConfigError(
            f"no shape of the model fits into {goal.gpus} GPUs with room for the KV of the longest request "
            f"({longest} tokens)",
            field="gpus",
        )
    return engines


def candidates(profile: Profile, goal: Goal, longest: int = 0) -> Iterator[Deployment]:
    """Yield the deployments that use the GPUs as far as their instances' sizes allow.

    Args:
        profile: Speeds.
        goal: GPUs, and shapes to try.
        longest: Tokens of the longest request, output included.

    Raises:
        ConfigError: No shape has room for it.
    """
    engines = fitting_engines(profile, goal, longest)
    for decode in engines:
        if (count := goal.gpus // decode.devices) >= 1:
            yield make_deployment(profile, goal, (0, count), (decode, decode))
    for prefill in engines:
        for decode in engines:
            for x in range(1, goal.gpus // prefill.devices + 1):
                y = (goal.gpus - x * prefill.devices) // decode.devices
                left = goal.gpus - x * prefill.devices - y * decode.devices
                if y >= 1 and left < prefill.devices:
                    shared = make_deployment(profile, goal, (x, y), (prefill, decode))
                    yield shared
                    yield strictly_apart(shared)


class Search:
    """Simulates deployments under one workload.

    Args:
        workload: The requests.
        goal: Targets, GPUs and what may be tried.
    """

    def __init__(self, workload: Workload, goal: Goal) -> None:
        self.workload = workload
        self.goal = goal
        self.simulated = 0

    def at(self, deployment: Deployment, rate: float, workload: Workload | None = None) -> Outcome:
        """Simulate a deployment at a rate, to the end."""
        return self._simulate(deployment, rate, workload or self.workload, None)

    def _simulate(self, deployment: Deployment, rate: float, workload: Workload, most_failed: int | None) -> Outcome:
        self.simulated += 1
        simulation = Simulation(deployment, slos=self.goal.slos, most_failed=most_failed, seed=self.goal.seed)
        return simulation.run(workload.requests, rate / workload.rate)

    def goodput(
        self, deployment: Deployment, workload: Workload | None = None, precision: float | None = None
    ) -> CandidateResult:
        """Find the highest rate at which a deployment keeps the targets."""
        workload = workload or self.workload
        goal = self.goal
        bound = bounds(deployment, workload, goal.slos)
        outcomes: dict[float, Outcome] = {}
        most_failed = int((1 - goal.attainment) * len(workload.requests))

        async def keeps(rate: float) -> bool:
            outcome = outcomes[rate] = self._simulate(deployment, rate, workload, most_failed)
            return not outcome.stopped and outcome.attainment(goal.slos) >= goal.attainment

        idle = workload.first(_IDLE_REQUESTS)
        rate = _IDLE_SHARE * bound.rate
        outcome = self.at(deployment, rate, idle)
        if outcome.attainment(goal.slos) < goal.attainment:
            return CandidateResult(deployment, bound, None, None, rate, outcome, len(idle.requests))
        knee = asyncio.run(
            find_knee(
                keeps,
                start=0.6 * bound.rate,
                most=_BEYOND_BOUND * bound.rate,
                precision=precision or goal.precision,
            )
        )
        kept = outcomes.get(knee.rate or 0.0)
        if knee.broke_at is None and knee.rate is not None:
            # More than the bound cannot be served for long.
            rate = min(knee.rate, bound.rate)
            return CandidateResult(deployment, bound, rate, kept, None, None, len(workload.requests))
        broken = outcomes.get(knee.broke_at or 0.0)
        return CandidateResult(deployment, bound, knee.rate, kept, knee.broke_at, broken, len(workload.requests))

    def best(self, deployments: Sequence[Deployment], step: Step) -> list[CandidateResult]:
        """Return deployments with their goodput, best per GPU first; those that cannot be among the best are left out.

        All are tried with a few requests first, in the order of their bounds; the best of them with all requests.
        The best without prefill instances is always among those. Where the requests are too few to break the targets
        of one of them, all of those are tried with more; the workload is that longer one from then on.
        """
        coarse = self.workload.first(_COARSE_REQUESTS)
        bound = {each: bounds(each, coarse, self.goal.slos).rate / each.devices for each in deployments}
        order = sorted(deployments, key=bound.__getitem__, reverse=True)
        results: list[CandidateResult] = []
        for number, deployment in enumerate(order):
            step(describe(deployment), len(order) - number - 1 + _FINALISTS)
            rivals = [each.per_gpu for each in results if bool(each.deployment.prefills) == bool(deployment.prefills)]
            if len(rivals) >= _FINALISTS and bound[deployment] < sorted(rivals)[-_FINALISTS]:
                continue
            results.append(self.goodput(deployment, coarse, _COARSE_PRECISION))
        results.sort(key=lambda each: each.per_gpu, reverse=True)
        finalists = results[:_FINALISTS]
        finalists += [each for each in results[_FINALISTS:] if not each.deployment.prefills][:1]
        most = _MOST_LENGTHENING * len(self.workload.requests)
        while True:
            exact = []
            for number, each in enumerate(finalists):
                step(describe(each.deployment), len(finalists) - number - 1)
                exact.append(self.goodput(each.deployment))
            if all(each.reached for each in exact) or len(self.workload.requests) >= most:
                break
            self.workload = self.workload.repeated(_LENGTHENING)
        exact.sort(key=lambda each: each.per_gpu, reverse=True)
        rest = [each for each in results if each not in finalists]
        return exact + rest

    def sensitivity(self, best: CandidateResult, step: Step) -> list[tuple[str, float]]:
        """Return a deployment's goodput in requests per second after single changes of lengths, speeds and links."""
        deployment = best.deployment
        link = best.deployment.link
        replace = dataclasses.replace
        changes: list[tuple[str, Deployment, Workload]] = [
            ("prompts a quarter longer", deployment, self.workload.longer(isl=1.25)),
            ("outputs a quarter longer", deployment, self.workload.longer(osl=1.25)),
            ("prefill a quarter slower", replace(deployment, prefill=deployment.prefill.slower(prefill=1.25),
                                                 decode=deployment.decode.slower(prefill=1.25)), self.workload),
            ("decode a quarter slower", replace(deployment, decode=deployment.decode.slower(decode=1.25)),
             self.workload),
            ("half the KV pool", replace(deployment, decode=replace(deployment.decode,
                                         kv_tokens=deployment.decode.kv_tokens // 2)), self.workload),
        ]  # fmt: skip
        if deployment.prefills:
            slow = replace(deployment, link=replace(link, bytes_per_s=link.bytes_per_s / 4))
            changes.append(("a quarter of the bandwidth", slow, self.workload))
            late = replace(deployment, link=replace(link, layerwise=False))
            changes.append(("no transfer while layers are computed", late, self.workload))
            for x, y in ((1, -1), (-1, 1)):
                ratio = deployment.prefills + x, deployment.decodes + y
                if deployment.prefill.devices == deployment.decode.devices and min(ratio) >= 1:
                    other = replace(deployment, prefills=ratio[0], decodes=ratio[1])
                    changes.append((f"{other.ratio} instead", other, self.workload))
        results = []
        for number, (what, changed, workload) in enumerate(changes):
            step(what, len(changes) - number - 1)
            results.append((what, self.goodput(changed, workload).rate or 0.0))
        return results


def describe(deployment: Deployment) -> str:
    """Return a deployment's name: its ratio, and the shapes of instances with several GPUs.

    ``strict`` ones have ``--remote-prefill-threshold`` of the router: decode instances do not help out with prompts.
    """
    shapes = []
    for role, count, engine in (
        ("prefill", deployment.prefills, deployment.prefill),
        ("decode", deployment.decodes, deployment.decode),
    ):
        if count and engine.devices > 1:
            shapes.append(f"{role} tp {engine.tp}" + (f" pp {engine.pp}" if engine.pp > 1 else ""))
    name = deployment.ratio + (" strict" if deployment.threshold is not None else "")
    return " ".join([name, *([f"({', '.join(shapes)})"] if shapes else [])])


def limit_of(result: CandidateResult, goal: Goal) -> str:
    """Say what keeps a deployment from more: the target that breaks first, and what is busiest then."""
    outcome = result.broken
    if outcome is None:
        return f"not reached: {result.requests:,} requests keep the targets at any rate; the bound is shown"
    failed = min(goal.slos, key=lambda name: outcome.share_kept(name, goal.slos[name]))
    return f"{failed.upper()} breaks: {_busiest(result.deployment, outcome, failed)}"


def _busiest(deployment: Deployment, outcome: Outcome, failed: str) -> str:
    """Say what is used most of that which a target depends on."""
    prefill = outcome.prefill
    decode = outcome.decode
    results: list[tuple[float, str]] = []
    if failed in ("ttft", "e2e"):
        if prefill is not None:
            busy = prefill.prefill + prefill.decode
            results.append((busy, f"prefill instances compute {busy:.0%} of the time"))
            results.append((prefill.link, f"prefill's links carry KV {prefill.link:.0%} of the time"))
            results.append((prefill.kv, f"prefill's KV pools are {prefill.kv:.0%} full"))
        if decode is not None:
            results.append((decode.kv, f"decode's KV pools are {decode.kv:.0%} full, {decode.preemptions} preemptions"))
            if decode.prefill > 0:
                results.append((decode.prefill, f"{decode.prefill:.0%} of decode's time has prompts in its steps"))
    if decode is not None and (failed != "ttft" or not results):
        share = decode.batch / deployment.limits.max_num_seqs
        beside = f", prompts beside them {decode.prefill:.0%} of the time" if decode.prefill > 0.01 else ""
        results.append((share if failed == "e2e" else 1.0, f"steps of {decode.batch:.0f} sequences{beside}"))
    return max(results)[1] if results else "nothing was served"
