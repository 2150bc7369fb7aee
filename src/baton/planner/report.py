"""What ``baton profile`` and ``baton plan`` print and draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from baton.bench.core.report import make_table
from baton.planner.plan import Plan
from baton.planner.profile import Profile
from baton.planner.search import describe

_ROWS = 12


def print_profile(profile: Profile, console: Console) -> None:
    """Print a profile's lines and how well they fit."""
    console.print(f"{profile.model}: {profile.source}", markup=False)
    columns = ("tp", "pp", "prefill: fixed ms", "µs/token", "ns/pair", "decode: fixed ms", "ns/context token",
               "µs/sequence", "overlap", "KV tokens")  # fmt: skip
    table = make_table("Steps", columns, left=())
    for engine in profile.engines:
        p, d = engine.prefill, engine.decode
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
    link, more = profile.link, profile.overheads
    console.print(
        f"transfer: {1e3 * link.latency_s:.3g} ms and {link.bytes_per_s / 1e9:.3g} GB/s; beyond the engine: "
        f"{1e3 * more.request_s:.3g} ms per request, {1e3 * more.handover_s:.3g} ms per hand-over, "
        f"{1e3 * more.step_s:.3g} ms per step"
    )


def print_plan(found: dict[str, Any], console: Console) -> None:
    """Print a plan's document for people."""
    workload, goal = found["workload"], found["goal"]
    targets = ", ".join(f"{name} {limit:g} ms" for name, limit in goal["slo_ms"].items())
    console.print(
        f"{workload['name']}: {workload['requests']:,} requests, mean prompt {workload['isl']:,.0f} and output "
        f"{workload['osl']:,.0f} tokens, {workload['hit_rate']:.0%} of the prompts' blocks come again; "
        f"{goal['attainment']:.0%} within {targets}; {goal['gpus']} GPUs",
        markup=False,
    )
    console.print(f"profile of {found['profile']['model']}: {found['profile']['source']}", markup=False)
    columns = ("deployment", "GPUs", "goodput req/s", "per GPU", "bound", "TTFT p50 ms", "p90", "ITL p50 ms", "p90")
    table = make_table(f"Goodput, {found['simulated']} simulations", (*columns, "what limits it"),
                       left=("deployment", "what limits it"))  # fmt: skip
    for row in found["deployments"][:_ROWS]:
        at = row["at_goodput"]
        times = [at[name] for name in ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms")] if at else [None] * 4
        table.add_row(
            row["deployment"],
            str(row["gpus"]),
            "none" if row["goodput"] is None else f"{row['goodput']:.3g}",
            f"{row['goodput_per_gpu']:.3g}",
            f"{row['bound']:.3g}",
            *("" if x is None else f"{x:,.4g}" for x in times),
            row["limit"],
        )
    console.print(table)
    _print_verdict(found, console)
    if found["sensitivity"]:
        best = found["deployments"][0]["goodput"]
        table = make_table("If it is otherwise, the winner's goodput", ("what", "req/s", "change"), left=("what",))
        for row in found["sensitivity"]:
            table.add_row(row["what"], f"{row['goodput']:.3g}", f"{row['goodput'] / best - 1:+.0%}")
        console.print(table)
    if found["checks"]:
        table = make_table("Beside closed forms", ("what", "simulated", "closed form"), left=("what",))
        for row in found["checks"]:
            table.add_row(row["what"], f"{row['simulated']:.4g}", f"{row['closed_form']:.4g}")
        console.print(table)


def _print_verdict(found: dict[str, Any], console: Console) -> None:
    rows = found["deployments"]
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
    if (at := found["at_rate"]) is not None:
        console.print(
            f"At {found['goal']['rate']:g} requests/s it keeps the targets for {at['attainment']:.1%}: TTFT "
            f"{at['ttft_p50_ms']:,.4g} ms (p90 {at['ttft_p90_ms']:,.4g}); {found['gpus_for_rate']} GPUs would be "
            "enough at its goodput per GPU.",
            markup=False,
        )


def draw(plan: Plan, path: Path) -> None:
    """Draw goodput per GPU of the deployments, and how the best of them keep the targets, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = plan.found[:_ROWS]
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
