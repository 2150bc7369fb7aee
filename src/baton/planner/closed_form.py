"""What can be said of a deployment without simulating it: a bound for the search, and a check of the simulation.

Queues of prompts as M/D/1 (Poisson arrivals, one length; Pollaczek-Khinchine), as in DistServe; decode by Little's law;
transfer by ``kv_bytes * v_p <= B``: a prefill instance's speed in tokens per second times the bytes of a token's KV is
no more than what its link carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.planner.profile import EngineProfile
from baton.planner.simulator.simulation import Deployment
from baton.planner.workload import Workload


def md1_wait_s(rate: float, service_s: float) -> float:
    """Return the mean time in the queue of an M/D/1 system, in seconds; infinite from full load on."""
    load = rate * service_s
    return load * service_s / (2 * (1 - load)) if load < 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Requests per second that parts of a deployment can take at most, however they are scheduled.

    Attributes:
        prefill: Prompts that prefill instances compute; 0: there are none.
        link: Prompts whose KV travels; infinite where none does.
        decode: Outputs that decode instances generate within the targets, if they compute no prompts.
        decodes: Decode instances.
        busy_s: Seconds of a decode instance per output.
        own_s: Seconds of a decode instance per prompt that it computes; infinite: it does not.
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
        """What all of it can take: decode instances compute prompts that prefill instances have no time for."""
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
        """What bounds it: ``decode``, ``prefill`` or ``link``."""
        if min(self.prefill, self.link) >= self.decode:
            return "decode"
        return "link" if self.link < self.prefill else "prefill"

    def md1_ttft_s(self, rate: float, deployment: Deployment) -> float:
        """Return the mean time to first token if the prompts' queue is all that there is, spread evenly."""
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
    engine, speculation = deployment.decode, deployment.speculation
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
