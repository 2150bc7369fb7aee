"""A plan: the search's answer, what limits it, what it hangs on, and the closed forms beside it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError
from baton.planner.closed_form import kv_bandwidth_needed
from baton.planner.profile import Profile
from baton.planner.search import (
    Found,
    Goal,
    Search,
    candidates,
    describe,
    fitting_engines,
    limit_of,
    make_deployment,
    strictly_apart,
)
from baton.planner.simulator.outcome import Outcome
from baton.planner.simulator.routing import MakeRouting
from baton.planner.simulator.simulation import Deployment
from baton.planner.workload import Workload

_CURVE = (0.3, 0.5, 0.7, 0.85, 1.0, 1.1, 1.25, 1.5)
"""Rates of the plot, as shares of a deployment's goodput."""
Step = Callable[[str, int], None]


@dataclass(frozen=True)
class PlanOptions:
    """What is asked.

    Attributes:
        profile: Speeds.
        workload: Requests.
        goal: Targets and GPUs.
        rate: Requests per second to be served; ``None``: as many as can be.
        ratio: ``xPyD`` to look at alone; empty: all.
        sensitivity: Whether to try what is otherwise.
        curves: Whether to find how the best of them keep the targets over the rate.
    """

    profile: Profile
    workload: Workload
    goal: Goal
    rate: float | None = None
    ratio: str = ""
    sensitivity: bool = True
    curves: bool = False


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        options: What was asked.
        found: Deployments with their goodput, best per GPU first.
        at_rate: What happens to the winner at the rate that was asked for.
        sensitivity: What was otherwise, and the winner's goodput then.
        curves: Per deployment, rates and the share of requests that kept the targets.
        simulated: Runs that it took.
    """

    options: PlanOptions
    found: list[Found]
    at_rate: Outcome | None
    sensitivity: list[tuple[str, float]]
    curves: list[tuple[str, list[tuple[float, float]]]]
    simulated: int

    @property
    def winner(self) -> Found | None:
        """The best; ``None``: none keeps the targets at any rate."""
        return self.found[0] if self.found and self.found[0].rate is not None else None

    @property
    def colocated(self) -> Found | None:
        """The best without prefill instances; ``None``: none was tried."""
        return next((each for each in self.found if not each.deployment.prefills), None)

    @property
    def succeeded(self) -> bool:
        """Whether the targets are kept, at the rate that was asked for if one was."""
        if self.at_rate is not None:
            return self.at_rate.attainment(self.options.goal.slos) >= self.options.goal.attainment
        return self.winner is not None

    def headline(self) -> list[str]:
        """Return lines that say what the winner is and what for."""
        winner, goal, workload = self.winner, self.options.goal, self.options.workload
        if winner is None:
            return []
        targets = ", ".join(f"{name} {limit:g} ms" for name, limit in goal.slos.items())
        return [
            f"baton plan: {describe(winner.deployment)} for {workload.name} "
            f"(mean prompt {workload.isl:.0f}, output {workload.osl:.0f} tokens)",
            f"expected: {winner.rate:.3g} requests/s on {winner.deployment.devices} GPUs, {goal.attainment:.0%} "
            f"of them within {targets}",
            f"profile: {self.options.profile.source}",
        ]

    def document(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        options, goal, workload = self.options, self.options.goal, self.options.workload
        return {
            "profile": {"model": options.profile.model, "source": options.profile.source},
            "workload": {
                "name": workload.name, "requests": len(workload.requests), "isl": round(workload.isl, 1),
                "osl": round(workload.osl, 1), "hit_rate": round(workload.hit_rate, 4),
            },
            "goal": {"slo_ms": dict(goal.slos), "attainment": goal.attainment, "gpus": goal.gpus,
                     "policy": goal.policy, "cores": goal.cores, "rate": options.rate},
            "deployments": [self._row(each) for each in self.found],
            "at_rate": None if self.at_rate is None else self._outcome(self.at_rate),
            "gpus_for_rate": self._gpus_for_rate(),
            "sensitivity": [{"what": what, "goodput": round(rate, 4)} for what, rate in self.sensitivity],
            "checks": self._checks(),
            "simulated": self.simulated,
        }  # fmt: skip

    def _gpus_for_rate(self) -> int | None:
        if self.options.rate is None or self.winner is None:
            return None
        return math.ceil(self.options.rate / self.winner.per_gpu)

    def _row(self, found: Found) -> dict[str, Any]:
        deployment = found.deployment
        return {
            "deployment": describe(deployment),
            "ratio": deployment.ratio,
            "remote_prefill_threshold": deployment.threshold,
            "prefill": {"tp": deployment.prefill.tp, "pp": deployment.prefill.pp} if deployment.prefills else None,
            "decode": {"tp": deployment.decode.tp, "pp": deployment.decode.pp},
            "gpus": deployment.devices,
            "goodput": found.rate,
            "goodput_per_gpu": round(found.per_gpu, 5),
            "bound": round(found.bounds.rate, 4),
            "bound_by": found.bounds.limit,
            "at_goodput": None if found.kept is None else self._outcome(found.kept),
            "limit": limit_of(found, self.options.goal),
        }

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        found: dict[str, Any] = {"attainment": round(outcome.attainment(self.options.goal.slos), 4)}
        for metric in ("ttft", "itl", "tpot", "e2e"):
            for share in (50, 90, 99):
                value = outcome.percentile(metric, share)
                found[f"{metric}_p{share}_ms"] = None if math.isnan(value) else round(value, 2)
        for role in ("prefill", "decode"):
            use = getattr(outcome, role)
            found[role] = None if use is None else {
                name: round(value, 4) for name, value in dataclasses.asdict(use).items()
            }  # fmt: skip
        return found

    def _checks(self) -> list[dict[str, Any]]:
        """Return what closed forms say of the winner, beside what was simulated."""
        winner = self.winner
        if winner is None or winner.kept is None or winner.rate is None:
            return []
        deployment, bounds = winner.deployment, winner.bounds
        checks = [
            {"what": "goodput, requests/s; closed form: what prefill, links and decode can take at most",
             "simulated": round(winner.rate, 4), "closed_form": round(bounds.rate, 4)},
            {"what": "mean TTFT at that rate, ms; closed form: M/D/1, nothing but prompts of mean length",
             "simulated": round(sum(each.ttft_ms for each in winner.kept.requests) / len(winner.kept.requests), 2),
             "closed_form": round(1e3 * bounds.md1_ttft_s(winner.rate, deployment), 2)},
        ]  # fmt: skip
        if deployment.prefills:
            needed = kv_bandwidth_needed(deployment, bounds, self.options.workload)
            there = deployment.link.bytes_per_s * min(deployment.prefill.devices, deployment.decode.devices)
            checks.append(
                {"what": "GB/s of KV that a busy prefill instance makes; closed form: what its link carries",
                 "simulated": round(needed / 1e9, 3), "closed_form": round(there / 1e9, 3)}
            )  # fmt: skip
        return checks


def make_plan(options: PlanOptions, make_routing: MakeRouting, step: Step) -> Plan:
    """Search for the best deployment.

    Raises:
        ConfigError: Nothing fits into the GPUs, or the ratio takes more of them.
    """
    search = Search(options.workload, options.goal, make_routing)
    found = search.best(_candidates(options), step)
    winner = found[0] if found and found[0].rate is not None else None
    at_rate, sensitivity = None, list[tuple[str, float]]()
    if winner is not None:
        if options.rate is not None:
            at_rate = search.at(winner.deployment, options.rate)
        if options.sensitivity:
            sensitivity = search.sensitivity(winner, step)
    curves = []
    colocated = next((each for each in found if not each.deployment.prefills), None)
    shown = [*found[:2], *([colocated] if colocated is not None and colocated not in found[:2] else [])]
    for each in shown if options.curves else []:
        if each.rate is not None:
            step(f"curve of {describe(each.deployment)}", 0)
            rates = [share * each.rate for share in _CURVE]
            points = [(rate, search.at(each.deployment, rate).attainment(options.goal.slos)) for rate in rates]
            curves.append((describe(each.deployment), points))
    return Plan(options, found, at_rate, sensitivity, curves, search.simulated)


def _candidates(options: PlanOptions) -> list[Deployment]:
    if not options.ratio:
        return list(candidates(options.profile, options.goal, options.workload.longest))
    match = re.fullmatch(r"(\d+)[pP](\d+)[dD]", options.ratio)
    if match is None or int(match[2]) < 1:
        raise ConfigError(f"--ratio must look like 2P3D, got {options.ratio!r}", field="ratio")
    ratio = int(match[1]), int(match[2])
    found = [each for each in _of_ratio(options, ratio) if each.devices <= options.goal.gpus]
    if not found:
        raise ConfigError(f"--ratio {options.ratio} takes more than {options.goal.gpus} GPUs", field="ratio")
    return found


def _of_ratio(options: PlanOptions, ratio: tuple[int, int]) -> list[Deployment]:
    goal = options.goal
    engines = fitting_engines(options.profile, goal, options.workload.longest)
    if not ratio[0]:
        return [make_deployment(options.profile, goal, ratio, (engine, engine)) for engine in engines]
    shared = [make_deployment(options.profile, goal, ratio, (p, d)) for p in engines for d in engines]
    return [*shared, *map(strictly_apart, shared)]
