"""What can be said of a deployment without simulating it: a bound for the search, and a check of the simulation.

Queues of prompts as M/D/1 (Poisson arrivals, one length; Pollaczek-Khinchine), as in DistServe; decode by Little's law;
transfer by ``kv_bytes * v_p <= B``: a prefill instance's speed in tokens per second times the bytes of a token's KV is
no more than what its link carries.
"""

from __future__ import annotations

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
        prefill: Prompts that are computed; infinite where decode instances do that.
        decode: Outputs that are generated within the targets, and prompts where decode computes them.
        link: KV that travels; infinite where none does.
        batch: Sequences per decode instance within the targets and the pool.
        prompt_s: Seconds of a prompt of mean length, less what can be cached.
        step_s: Seconds of a decode step of such a batch.
    """

    prefill: float
    decode: float
    link: float
    batch: int
    prompt_s: float
    step_s: float

    @property
    def rate(self) -> float:
        """The lowest of them."""
        return min(self.prefill, self.decode, self.link)

    @property
    def limit(self) -> str:
        """Which one that is."""
        return min(("prefill", "decode", "link"), key=lambda name: getattr(self, name))

    def md1_ttft_s(self, rate: float, deployment: Deployment) -> float:
        """Return the mean time to first token if the prompts' queue is all that there is, spread evenly."""
        instances = deployment.prefills or deployment.decodes
        overheads = deployment.overheads
        more = overheads.request_s + (overheads.handover_s if deployment.prefills else 0.0)
        return self.prompt_s + md1_wait_s(rate / instances, self.prompt_s) + more


def bounds(deployment: Deployment, workload: Workload, slos: Mapping[str, float]) -> Bounds:
    """Return a deployment's bounds for a workload."""
    engine = deployment.prefill if deployment.prefills else deployment.decode
    fresh = max(1.0, workload.isl * (1 - workload.hit_rate))
    prompt_s = _prompt_s(engine, fresh, workload.isl - fresh, deployment)
    batch, step_s = _largest_batch(deployment, workload, slos)
    steps = max(0.0, workload.osl - 1) / deployment.speculation.per_step
    busy = steps * step_s / batch  # seconds of a decode instance per request
    if not deployment.prefills:
        own = max(0.0, prompt_s - deployment.decode.overlap * deployment.decode.fixed_s)
        return Bounds(float("inf"), deployment.decodes / (own + busy), float("inf"), batch, prompt_s, step_s)
    rate = deployment.link.bytes_per_s * min(deployment.prefill.devices, deployment.decode.devices)
    moved = deployment.kv_bytes_per_token * fresh / rate
    ends = min(deployment.prefills, deployment.decodes)
    return Bounds(
        prefill=deployment.prefills / prompt_s,
        decode=deployment.decodes / busy if busy else float("inf"),
        link=ends / moved,
        batch=batch,
        prompt_s=prompt_s,
        step_s=step_s,
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
