"""Signals of the controller: an observation of the router, and the pressure on a role over several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.client import Instance, Stats
from baton.config.autoscale import AutoscaleConfig
from baton.types import Role

ROLES = (Role.PREFILL, Role.DECODE)
_NEARLY_FULL = 0.75
"""Share of decode's targets or batches, from which requests waiting in the router are counted as decode's."""
_MAX_WORK_PRESSURE = 0.99
"""Largest pressure of the working time: below 1, so it only keeps instances in a role and never adds one."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Load of a role: sums over its instances that accept requests.

    Attributes:
        instances: Number of instances.
        waiting_tokens: Number of prompt tokens not computed yet.
        tokens_per_s: Prompt tokens computed per second; 0: unknown.
        waiting: Number of waiting requests.
        running: Number of sequences in the batches.
        slots: Largest number of sequences in the batches; 0: unknown.
        kv: Share of the KV blocks in use, from 0 to 1.
        working: Share of the instances that have work, from 0 to 1.
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
    """Load and latencies at one moment.

    Attributes:
        at: Time of the observation, in monotonic seconds.
        loads: Load by role.
        stats: Statistics of the requests in the window.
        unsettled: Names of instances that are starting, ending or draining.
    """

    at: float
    loads: Mapping[Role, RoleLoad]
    stats: Stats
    unsettled: tuple[str, ...] = ()

    def count(self, role: Role) -> int:
        """Return the number of instances of a role."""
        return self.loads[role].instances


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure on a role.

    Attributes:
        role: The role.
        signals: Signals by name, each as a share of its target; above 1 the role needs instances.
        facts: Descriptions of the signals, by name.
        growth: Share of a signal that grows with the work of each instance, from 0 to 1, by name; default 1.
    """

    role: Role
    signals: Mapping[str, float]
    facts: Mapping[str, str]
    growth: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the strongest signal."""
        return max(self.signals, key=lambda name: self.signals[name])

    @property
    def value(self) -> float:
        """Strongest signal, as a share of its target."""
        return self.signals[self.name]

    def without_one(self, instances: int) -> float:
        """Return the pressure with one instance fewer and the same work.

        Args:
            instances: Current number of instances of the role.
        """
        if instances < 2:
            return float("inf") if self.value > 0 else 0.0
        return max(x * (1 + self.growth.get(name, 1.0) / (instances - 1)) for name, x in self.signals.items())

    def __str__(self) -> str:
        return f"{self.role} {self.value:.2f} ({self.facts[self.name]})"


def observe(instances: Sequence[Instance], stats: Stats, now: float) -> Observation:
    """Return an observation of a router's state.

    Args:
        instances: All instances that the router knows.
        stats: Statistics of the requests in the window.
        now: Current time in monotonic seconds.
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
    """Return the mean number of sequences per decode instance."""
    return sum(x.loads[Role.DECODE].running / max(1, x.count(Role.DECODE)) for x in window) / len(window)


def pressures(window: Sequence[Observation], config: AutoscaleConfig, itl_growth: float = 1.0) -> dict[Role, Pressure]:
    """Return the pressure on each role.

    Latency signals count for the role that causes them. While requests wait on decode instances, a late first token
    counts for decode; while prompts wait and decode instances compute some themselves, slow tokens count for prefill.
    Requests that wait in the router count for decode if decode's KV, batches or queues are nearly full, else for
    prefill.

    Args:
        window: Observations, the latest last; at least one.
        config: Targets.
        itl_growth: Share of the time between tokens that grows with the sequences per instance, from 0 to 1.
    """

    def mean(of: Callable[[Observation], float]) -> float:
        return sum(map(of, window)) / len(window)

    prefill, decode = ROLES
    kv = mean(lambda x: x.loads[decode].kv)
    own_waiting = mean(lambda x: x.loads[decode].waiting / max(1, x.count(decode)))
    slots = mean(lambda x: x.loads[decode].running / max(1, x.loads[decode].slots) if x.loads[decode].slots else 0.0)
    full = max(kv / config.scale_kv, own_waiting / config.scale_decode_queue, slots) >= _NEARLY_FULL
    queue_s = mean(lambda x: _queue_s(x, in_router=not full))
    waiting = own_waiting + mean(lambda x: x.stats.num_waiting / max(1, x.count(decode)) if full else 0.0)
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
    p["work"] = _MAX_WORK_PRESSURE * working
    p_facts["work"] = f"at work {working:.0%} of the time"
    # A first token takes its prompt's time, however many instances there are, and a wait that grows with their work.
    return {
        prefill: Pressure(prefill, p, p_facts, {"ttft": working}),
        decode: Pressure(decode, d, d_facts, {"itl": itl_growth}),
    }


def _queue_s(x: Observation, *, in_router: bool) -> float:
    """Return the seconds of waiting prompts; without prefill instances, decode instances compute them."""
    load = x.loads[Role.PREFILL if x.count(Role.PREFILL) else Role.DECODE]
    waiting = load.waiting_tokens + (x.stats.waiting_prompt_tokens if in_router else 0)
    return waiting / load.tokens_per_s if load.tokens_per_s > 0 else 0.0
