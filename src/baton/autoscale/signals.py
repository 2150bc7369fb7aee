"""What the controller looks at: one look at a router, and how pressed a role was over several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.client import Instance, Stats
from baton.config.autoscale import AutoscaleConfig
from baton.types import Role

ROLES = (Role.PREFILL, Role.DECODE)
_NEARLY_FULL = 0.75
"""Share of decode's targets, or of its batches, from which what waits in the router is taken to wait for decode."""
_MOST_BY_WORK = 0.99
"""What a role's being at work counts at most: that alone makes no role pressed, it only keeps instances there."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What the instances of a role have to do; sums over those that take requests.

    Attributes:
        instances: How many.
        waiting_tokens: Prompt tokens not computed yet.
        tokens_per_s: How fast they compute prompts; 0: unknown.
        waiting: Requests that wait.
        running: Sequences in their batches.
        slots: Sequences that their batches can have; 0: unknown.
        kv: Share of the KV blocks in use, from 0 to 1.
        working: Share of the instances that have something to do.
    """

    instances: int
    waiting_tokens: int
    tokens_per_s: float
    waiting: int
    running: int
    slots: int
    kv: float
    working: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One look.

    Attributes:
        at: Monotonic seconds.
        loads: By role.
        stats: How requests fared over the window.
        unsettled: Instances that are not ready: they come, go or drain.
    """

    at: float
    loads: Mapping[Role, RoleLoad]
    stats: Stats
    unsettled: tuple[str, ...] = ()

    def count(self, role: Role) -> int:
        """Return the instances of a role."""
        return self.loads[role].instances


@dataclass(frozen=True, slots=True)
class Pressure:
    """How pressed a role is.

    Attributes:
        role: Which.
        signals: By name, each as a share of its target: above 1 is too much.
        facts: By name, the signal in words.
        growth: By name, which part of the signal grows as the work of each instance does, from 0 to 1; not named: all.
    """

    role: Role
    signals: Mapping[str, float]
    facts: Mapping[str, str]
    growth: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The strongest signal."""
        return max(self.signals, key=lambda name: self.signals[name])

    @property
    def value(self) -> float:
        """The strongest signal's share of its target."""
        return self.signals[self.name]

    def without_one(self, instances: int) -> float:
        """Return what it would be with one instance fewer and the same work."""
        if instances < 2:
            return float("inf") if self.value > 0 else 0.0
        return max(x * (1 + self.growth.get(name, 1.0) / (instances - 1)) for name, x in self.signals.items())

    def __str__(self) -> str:
        return f"{self.role} {self.value:.2f} ({self.facts[self.name]})"


def look(instances: Sequence[Instance], stats: Stats, now: float) -> Observation:
    """Read a look off what a router knows.

    Args:
        instances: All of them.
        stats: How requests fared.
        now: Monotonic seconds.
    """
    known = [each for each in instances if each.role in ROLES and not each.refused]
    ready = [each for each in known if each.healthy and not each.load.draining]
    loads = {role: _role_load([each for each in ready if each.role is role]) for role in ROLES}
    unsettled = tuple(sorted(each.instance_id for each in known if each not in ready))
    return Observation(now, loads, stats, unsettled)


def _role_load(instances: Sequence[Instance]) -> RoleLoad:
    loads = [each.load for each in instances]
    blocks = sum(load.blocks_total for load in loads)
    working = sum(load.num_running + load.num_waiting + load.num_loading > 0 for load in loads)
    return RoleLoad(
        instances=len(loads),
        waiting_tokens=sum(load.waiting_prompt_tokens for load in loads),
        tokens_per_s=sum(load.prefill_tokens_per_s for load in loads),
        waiting=sum(load.num_waiting for load in loads),
        running=sum(load.num_running for load in loads),
        slots=sum(each.max_num_seqs for each in instances),
        kv=sum(load.blocks_active for load in loads) / blocks if blocks else 0.0,
        working=working / len(loads) if loads else 0.0,
    )


def running_per_decode(window: Sequence[Observation]) -> float:
    """Return the sequences per decode instance."""
    return sum(x.loads[Role.DECODE].running / max(1, x.count(Role.DECODE)) for x in window) / len(window)


def pressures(window: Sequence[Observation], config: AutoscaleConfig, itl_growth: float = 1.0) -> dict[Role, Pressure]:
    """Return how pressed the roles were.

    Some signals are of whoever is to blame. Where requests wait on decode instances, a late first token is decode's
    doing; where prompts wait and decode instances compute some by themselves, slow tokens are prefill's. What waits in
    the router waits for decode where decode's KV, batches or queues are nearly full, else for prefill.

    Args:
        window: Looks, the latest last; at least one.
        config: Has the targets.
        itl_growth: Which part of the time between tokens grows with the sequences per instance, from 0 to 1.
    """

    def mean(of: Callable[[Observation], float]) -> float:
        return sum(map(of, window)) / len(window)

    prefill, decode = ROLES
    kv, own = mean(lambda x: x.loads[decode].kv), mean(lambda x: x.loads[decode].waiting / max(1, x.count(decode)))
    slots = mean(lambda x: x.loads[decode].running / max(1, x.loads[decode].slots) if x.loads[decode].slots else 0.0)
    full = max(kv / config.scale_kv, own / config.scale_decode_queue, slots) >= _NEARLY_FULL
    queue_s = mean(lambda x: _queue_s(x, in_router=not full))
    waiting = own + mean(lambda x: x.stats.num_waiting / max(1, x.count(decode)) if full else 0.0)
    p = {"queue": queue_s / config.scale_prefill_queue_s}
    d = {"kv": kv / config.scale_kv, "queue": waiting / config.scale_decode_queue}
    p_facts = {"queue": f"{queue_s:.2g} s of prompts wait, {config.scale_prefill_queue_s:g} are wanted"}
    d_facts = {
        "kv": f"{kv:.0%} of the KV blocks are in use, {config.scale_kv:.0%} are wanted",
        "queue": f"{waiting:.2g} requests wait per instance, {config.scale_decode_queue:g} are wanted",
    }
    stats = window[-1].stats
    if config.scale_ttft_ms and stats.ttft_ms is not None:
        at_decode = max(d.values()) > 1
        signals, facts = (d, d_facts) if at_decode else (p, p_facts)
        signals["ttft"] = stats.ttft_ms.p90 / config.scale_ttft_ms
        facts["ttft"] = f"first tokens take {stats.ttft_ms.p90:.0f} ms, {config.scale_ttft_ms:g} are wanted"
    if config.scale_itl_ms and stats.itl_ms is not None:
        helps = p["queue"] > 1 and mean(lambda x: x.loads[decode].waiting_tokens) > 0
        signals, facts = (p, p_facts) if helps else (d, d_facts)
        signals["itl"] = stats.itl_ms.p90 / config.scale_itl_ms
        facts["itl"] = f"{stats.itl_ms.p90:.0f} ms between tokens, {config.scale_itl_ms:g} are wanted"
    working = mean(lambda x: x.loads[prefill].working)
    p["work"] = _MOST_BY_WORK * working
    p_facts["work"] = f"at work {working:.0%} of the time"
    # A first token takes its prompt's time, however many instances there are, and what it waits, which work makes.
    return {
        prefill: Pressure(prefill, p, p_facts, {"ttft": working}),
        decode: Pressure(decode, d, d_facts, {"itl": itl_growth}),
    }


def _queue_s(x: Observation, *, in_router: bool) -> float:
    """Seconds of prompts that wait, on instances or in the router; without prefill instances decode's compute them."""
    load = x.loads[Role.PREFILL if x.count(Role.PREFILL) else Role.DECODE]
    waiting = load.waiting_tokens + (x.stats.waiting_prompt_tokens if in_router else 0)
    return waiting / load.tokens_per_s if load.tokens_per_s > 0 else 0.0
