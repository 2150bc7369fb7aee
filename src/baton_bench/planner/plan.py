"""A plan: the deployments found, what limits the best one, its sensitivity, and closed forms to compare with."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.errors import ConfigError
from baton.terminal import Step
from baton_bench.planner.search import (
    CandidateResult,
    Goal,
    Search,
    candidates,
    describe,
    fitting_engines,
    kv_bandwidth_needed,
    limit_of,
    make_deployment,
    strictly_apart,
)
from baton_bench.planner.workload import Workload
from baton_bench.report import make_table
from baton_bench.simulator.profile import EngineProfile, Limits, Profile
from baton_bench.simulator.simulation import Deployment, Outcome

_CURVE = (0.3, 0.5, 0.7, 0.85, 1.0, 1.1, 1.25, 1.5)
"""Rates of the plot, as shares of a deployment's goodput."""


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for.

    Attributes:
        profile: Speeds.
        workload: Requests.
        goal: Targets and GPUs.
        rate: Requests per second to be served; ``None``: as many as can be.
        ratio: ``xPyD`` to look at alone; empty: all.
        sensitivity: Whether to try other lengths, speeds and links.
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
        options: Options of the plan.
        candidates: Deployments with their goodput, best per GPU first.
        at_rate: Outcome of the winner at the requested rate; ``None``: no rate was given.
        sensitivity: What was changed, and the winner's goodput in requests per second then.
        curves: Per deployment, rates and the share of requests that kept the targets.
        simulated: Runs that it took.
    """

    options: PlanOptions
    candidates: list[CandidateResult]
    at_rate: Outcome | None
    sensitivity: list[tuple[str, float]]
    curves: list[tuple[str, list[tuple[float, float]]]]
    simulated: int

    @property
    def winner(self) -> CandidateResult | None:
        """The best; ``None``: none keeps the targets at any rate."""
        return self.candidates[0] if self.candidates and self.candidates[0].rate is not None else None

    @property
    def colocated(self) -> CandidateResult | None:
        """The best without prefill instances; ``None``: none was tried."""
        return next((each for each in self.candidates if not each.deployment.prefills), None)

    @property
    def succeeded(self) -> bool:
        """Whether the targets are kept, at the requested rate if there is one."""
        if self.at_rate is not None:
            return self.at_rate.attainment(self.options.goal.slos) >= self.options.goal.attainment
        return self.winner is not None

    def headline(self) -> list[str]:
        """Return lines that describe the winner and the workload."""
        winner = self.winner
        goal = self.options.goal
        workload = self.options.workload
        if winner is None:
            return []
        targets = ", ".join(f"{name} {limit:g} ms" for name, limit in goal.slos.items())
        least = "" if winner.reached else "at least "
        return [
            f"baton plan: {describe(winner.deployment)} for {workload.name} "
            f"(mean prompt {workload.isl:.0f}, output {workload.osl:.0f} tokens)",
            f"expected: {least}{winner.rate:.3g} requests/s on {winner.deployment.devices} GPUs, {goal.attainment:.0%} "
            f"of them within {targets}",
            f"profile: {self.options.profile.source}",
        ]

    def document(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        options = self.options
        goal = self.options.goal
        workload = self.options.workload
        return {
            "profile": {"model": options.profile.model, "source": options.profile.source},
            "warnings": fit_warnings(options.profile),
            "workload": {
                "name": workload.name, "requests": len(workload.requests), "isl": round(workload.isl, 1),
                "osl": round(workload.osl, 1), "hit_rate": round(workload.hit_rate, 4),
            },
            "goal": {"slo_ms": dict(goal.slos), "attainment": goal.attainment, "gpus": goal.gpus,
                     "policy": goal.policy, "cores": goal.cores, "rate": options.rate},
            "deployments": [self._row(each) for each in self.candidates],
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

    def _row(self, result: CandidateResult) -> dict[str, Any]:
        deployment = result.deployment
        return {
            "deployment": describe(deployment),
            "ratio": deployment.ratio,
            "remote_prefill_threshold": deployment.threshold,
            "prefill": {"tp": deployment.prefill.tp, "pp": deployment.prefill.pp} if deployment.prefills else None,
            "decode": {"tp": deployment.decode.tp, "pp": deployment.decode.pp},
            "gpus": deployment.devices,
            "goodput": result.rate,
            "reached": result.reached,
            "requests": result.requests,
            "goodput_per_gpu": round(result.per_gpu, 5),
            "bound": round(result.bounds.rate, 4),
            "bound_by": result.bounds.limit,
            "at_goodput": None if result.kept is None else self._outcome(result.kept),
            "limit": limit_of(result, self.options.goal),
        }

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        result: dict[str, Any] = {"attainment": round(outcome.attainment(self.options.goal.slos), 4)}
        for metric in ("ttft", "itl", "tpot", "e2e"):
            for share in (50, 90, 99):
                value = outcome.percentile(metric, share)
                result[f"{metric}_p{share}_ms"] = None if math.isnan(value) else round(value, 2)
        for role in ("prefill", "decode"):
            use = getattr(outcome, role)
            result[role] = None if use is None else {
                name: round(value, 4) for name, value in dataclasses.asdict(use).items()
            }  # fmt: skip
        return result

    def _checks(self) -> list[dict[str, Any]]:
        """Return figures of the winner: simulated, and by closed forms."""
        winner = self.winner
        if winner is None or winner.kept is None or winner.rate is None:
            return []
        deployment = winner.deployment
        bounds = winner.bounds
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


_MEDIAN_ERROR = 0.2
_WORST_ERROR = 0.5
"""Errors of a fit, as shares of what was measured, from which a profile is shown with a warning."""


def fit_warnings(profile: Profile) -> list[str]:
    """Say which of a profile's lines do not fit what was measured."""
    return [
        f"the profile's fit of {name} (tp {engine.tp}, pp {engine.pp}) is off by {fit.median_error:.0%} in the median "
        f"and {fit.worst_error:.0%} at most, and the figures below with it: measure again on an idle machine"
        for engine in profile.engines
        for name, fit in engine.residuals.items()
        if fit.median_error > _MEDIAN_ERROR or fit.worst_error > _WORST_ERROR
    ]


def make_plan(options: PlanOptions, step: Step) -> Plan:
    """Search for the best deployment.

    Raises:
        ConfigError: Nothing fits into the GPUs, or the ratio takes more of them.
    """
    search = Search(options.workload, options.goal)
    result = search.best(_candidates(options), step)
    winner = result[0] if result and result[0].rate is not None else None
    at_rate = None
    sensitivity = list[tuple[str, float]]()
    if winner is not None:
        if options.rate is not None:
            at_rate = search.at(winner.deployment, options.rate)
        if options.sensitivity:
            sensitivity = search.sensitivity(winner, step)
    curves = []
    colocated = next((each for each in result if not each.deployment.prefills), None)
    shown = [*result[:2], *([colocated] if colocated is not None and colocated not in result[:2] else [])]
    for each in shown if options.curves else []:
        if each.rate is not None:
            step(f"curve of {describe(each.deployment)}", 0)
            rates = [share * each.rate for share in _CURVE]
            points = [(rate, search.at(each.deployment, rate).attainment(options.goal.slos)) for rate in rates]
            curves.append((describe(each.deployment), points))
    return Plan(options, result, at_rate, sensitivity, curves, search.simulated)


def _candidates(options: PlanOptions) -> list[Deployment]:
    if not options.ratio:
        return list(candidates(options.profile, options.goal, options.workload.longest))
    match = re.fullmatch(r"(\d+)[pP](\d+)[dD]", options.ratio)
    if match is None or int(match[2]) < 1:
        raise ConfigError(f"--ratio must look like 2P3D, got {options.ratio!r}", field="ratio")
    ratio = int(match[1]), int(match[2])
    results = [each for each in _of_ratio(options, ratio) if each.devices <= options.goal.gpus]
    if not results:
        raise ConfigError(f"--ratio {options.ratio} takes more than {options.goal.gpus} GPUs", field="ratio")
    return results


def _of_ratio(options: PlanOptions, ratio: tuple[int, int]) -> list[Deployment]:
    goal = options.goal
    engines = fitting_engines(options.profile, goal, options.workload.longest)
    if not ratio[0]:
        return [make_deployment(options.profile, goal, ratio, (engine, engine)) for engine in engines]
    shared = [make_deployment(options.profile, goal, ratio, (p, d)) for p in engines for d in engines]
    return [*shared, *map(strictly_apart, shared)]


def cluster_yaml(
    result: CandidateResult, model: str, slos: Mapping[str, float], comments: Sequence[str], *, device: str = "cpu"
) -> str:
    """Return the file's text.

    Args:
        result: The deployment, with its goodput.
        model: A directory, or a name on the Hugging Face hub.
        slos: Targets in milliseconds, by metric.
        comments: Lines at its beginning.
        device: Device of the engines, as ``--device`` takes it.
    """
    deployment = result.deployment
    limits = result.deployment.limits
    lines = [f"# {line}" for line in comments]
    lines += [f"model: {json.dumps(model)}", f"ratio: {deployment.ratio}", "", "slo:"]
    lines += [f"  {metric}-ms: {limit:g}" for metric, limit in slos.items()]
    lines += ["", "worker:", "  flags:", *([f"    device: {device}"] if device != "cpu" else []), *_limit_flags(limits)]
    for role, count, engine in (
        ("prefill", deployment.prefills, deployment.prefill),
        ("decode", deployment.decodes, deployment.decode),
    ):
        if count and (flags := _shape_flags(engine)):
            lines += ["", f"{role}:", "  flags:", *flags]
    lines += ["", "router:", "  flags:", f"    policy: {deployment.policy}"]
    if deployment.threshold is not None:
        lines.append(f"    remote-prefill-threshold: {deployment.threshold}")
    return "\n".join(lines) + "\n"


def _limit_flags(limits: Limits) -> list[str]:
    flags = {
        "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_num_batched_tokens,
        "prefill-chunk": limits.prefill_chunk,
        "block-size": limits.block_size,
        "remote-prefill-threshold": limits.remote_prefill_threshold,
    }
    return [f"    {name}: {value}" for name, value in flags.items()]


def _shape_flags(engine: EngineProfile) -> list[str]:
    sizes = {"tp": engine.tp, "pp": engine.pp}
    return [f"    {name}: {size}" for name, size in sizes.items() if size > 1]


_ROWS = 12


def print_profile(profile: Profile, console: Console) -> None:
    """Print a profile's lines and how well they fit."""
    console.print(f"{profile.model}: {profile.source}", markup=False)
    columns = ("tp", "pp", "prefill: fixed ms", "µs/token", "ns/pair", "decode: fixed ms", "ns/context token",
               "µs/sequence", "overlap", "KV tokens")  # fmt: skip
    table = make_table("Steps", columns, left=())
    for engine in profile.engines:
        p = engine.prefill
        d = engine.decode
        figures = (1e3 * p.fixed_s, 1e6 * p.per_token_s, 1e9 * p.per_pair_s, 1e3 * d.fixed_s, 1e9 * d.per_context_s,
                   1e6 * d.per_sequence_s, engine.overlap)  # fmt: skip
        table.add_row(str(engine.tp), str(engine.pp), *(f"{x:.3g}" for x in figures), f"{engine.kv_tokens:,}")
    console.print(table)
    for engine in profile.engines:
        for name, fit in engine.residuals.items():
            console.print(
                f"{name}: {fit.points} points, error of the fit {fit.median_error:.1%} in the median, "
                f"{fit.worst_error:.1%} at most"
            )
    for warning in fit_warnings(profile):
        console.print(warning, style="yellow", markup=False)
    link = profile.link
    more = profile.overheads
    console.print(
        f"transfer: {1e3 * link.latency_s:.3g} ms and {link.bytes_per_s / 1e9:.3g} GB/s; beyond the engine: "
        f"{1e3 * more.request_s:.3g} ms per request, {1e3 * more.handover_s:.3g} ms per hand-over, "
        f"{1e3 * more.step_s:.3g} ms per step"
    )


def print_plan(document: dict[str, Any], console: Console) -> None:
    """Print a plan's document for people."""
    workload = document["workload"]
    goal = document["goal"]
    targets = ", ".join(f"{name} {limit:g} ms" for name, limit in goal["slo_ms"].items())
    console.print(
        f"{workload['name']}: {workload['requests']:,} requests, mean prompt {workload['isl']:,.0f} and output "
        f"{workload['osl']:,.0f} tokens, {workload['hit_rate']:.0%} of the prompts' blocks come again; "
        f"{goal['attainment']:.0%} within {targets}; {goal['gpus']} GPUs",
        markup=False,
    )
    console.print(f"profile of {document['profile']['model']}: {document['profile']['source']}", markup=False)
    for warning in document["warnings"]:
        console.print(warning, style="yellow", markup=False)
    columns = ("deployment", "GPUs", "goodput req/s", "per GPU", "bound", "TTFT p50 ms", "p90", "ITL p50 ms", "p90")
    table = make_table(f"Goodput, {document['simulated']} simulations", (*columns, "what limits it"),
                       left=("deployment", "what limits it"))  # fmt: skip
    for row in document["deployments"][:_ROWS]:
        at = row["at_goodput"]
        times = [at[name] for name in ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms")] if at else [None] * 4
        table.add_row(
            row["deployment"],
            str(row["gpus"]),
            "none" if row["goodput"] is None else f"{'' if row['reached'] else '≥ '}{row['goodput']:.3g}",
            f"{row['goodput_per_gpu']:.3g}",
            f"{row['bound']:.3g}",
            *("" if x is None else f"{x:,.4g}" for x in times),
            row["limit"],
        )
    console.print(table)
    _print_verdict(document, console)
    if document["sensitivity"]:
        best = document["deployments"][0]["goodput"]
        table = make_table("If it is otherwise, the winner's goodput", ("what", "req/s", "change"), left=("what",))
        for row in document["sensitivity"]:
            table.add_row(row["what"], f"{row['goodput']:.3g}", f"{row['goodput'] / best - 1:+.0%}")
        console.print(table)
    if document["checks"]:
        table = make_table("Beside closed forms", ("what", "simulated", "closed form"), left=("what",))
        for row in document["checks"]:
            table.add_row(row["what"], f"{row['simulated']:.4g}", f"{row['closed_form']:.4g}")
        console.print(table)


def _print_verdict(document: dict[str, Any], console: Console) -> None:
    rows = document["deployments"]
    winner = rows[0]
    if winner["goodput"] is None:
        console.print("no deployment keeps the targets at any rate", style="red")
        return
    colocated = next((row for row in rows if row["prefill"] is None), None)
    if winner["prefill"] is None:
        best = next((row for row in rows if row["prefill"] is not None), None)
        than = f"; the best with prefill apart, {best['deployment']}, has {best['goodput_per_gpu']:.3g}" if best else ""
        console.print(f"Prefill and decode together: {winner['deployment']}{than}.", markup=False)
    else:
        than = ""
        if colocated is not None and colocated["goodput"]:
            gain = winner["goodput_per_gpu"] / colocated["goodput_per_gpu"]
            than = f", {gain:.2f} times what {colocated['deployment']} does per GPU"
        elif colocated is not None:
            than = "; without prefill instances the targets are not kept at any rate"
        console.print(f"Prefill apart: {winner['deployment']}{than}.", markup=False)
    if (at := document["at_rate"]) is not None:
        console.print(
            f"At {document['goal']['rate']:g} requests/s it keeps the targets for {at['attainment']:.1%}: TTFT "
            f"{at['ttft_p50_ms']:,.4g} ms (p90 {at['ttft_p90_ms']:,.4g}); {document['gpus_for_rate']} GPUs would be "
            "enough at its goodput per GPU.",
            markup=False,
        )


def draw(plan: Plan, path: Path) -> None:
    """Draw goodput per GPU of the deployments, and how the best of them keep the targets, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = plan.candidates[:_ROWS]
    colours = ["#2a78b5" if each.deployment.prefills else "#d98a29" for each in rows]
    left.barh(range(len(rows)), [each.per_gpu for each in rows], color=colours)
    left.set_yticks(range(len(rows)), [describe(each.deployment) for each in rows])
    left.invert_yaxis()
    left.set_xlabel("goodput per GPU, requests/s (orange: prefill and decode together)")
    for name, points in plan.curves:
        right.plot([rate for rate, _ in points], [100 * share for _, share in points], "-o", label=name)
    right.axhline(100 * plan.options.goal.attainment, color="#888888", linestyle="--")
    right.set_xlabel("requests/s")
    right.set_ylabel("% of the requests within the targets")
    right.set_ylim(0, 102)
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=150)
