"""What a replay found: one record per policy, as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from baton.bench.core.report import make_table
from baton_router.bench.simulation import Run, Setup
from baton_router.bench.workload import TraceRequest


@dataclass(frozen=True)
class PolicyRecord:
    """One policy's run.

    Attributes:
        policy: Its name.
        beta: Weight of load, where the policy has one.
        hit_rate: Blocks found in the cache of the instance that computed the prompt / all blocks.
        reused_rate: Blocks that only the decode instance held, fetched from there instead of computed / all blocks.
        load_max_over_mean: Prompt tokens computed by the busiest prefill instance over the mean of all.
        requests_max_over_mean: Prompts on the busiest prefill instance over the mean of all.
        local_share: Requests whose prompt the decode instance computed.
        ttft_ms: Predicted time to first token: mean, and percentiles by name.
        decision_us: The router's own time per decision, measured while replaying: median.
    """

    policy: str
    beta: float | None
    hit_rate: float
    reused_rate: float
    load_max_over_mean: float
    requests_max_over_mean: float
    local_share: float
    ttft_ms: dict[str, float]
    decision_us: float


def best_hit_rate(requests: Sequence[TraceRequest]) -> float:
    """Return the share of blocks that one instance with endless memory would find."""
    seen: set[int] = set()
    total = hits = 0
    for request in requests:
        total += len(request.blocks)
        hits += next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
    return hits / total


def record(setup: Setup, run: Run, requests: Sequence[TraceRequest]) -> PolicyRecord:
    """Sum up a run."""
    blocks = sum(len(request.blocks) for request in requests)
    marks = np.percentile(run.ttft_ms, (50, 90, 99))
    names = ("p50", "p90", "p99")
    return PolicyRecord(
        policy=setup.policy,
        beta=setup.beta if setup.policy == "match_minus_load" else None,
        hit_rate=round(run.hit_blocks / blocks, 6),
        reused_rate=round(run.reused_blocks / blocks, 6),
        load_max_over_mean=_spread([float(x.computed_tokens) for x in run.prefills]),
        requests_max_over_mean=_spread([float(x.num_requests) for x in run.prefills]),
        local_share=round(run.local / len(requests), 4),
        ttft_ms={"mean": round(float(np.mean(run.ttft_ms)), 1)}
        | {name: round(float(mark), 1) for name, mark in zip(names, marks, strict=True)},
        decision_us=round(float(np.median(run.decision_us)), 1),
    )


def document(
    command: str, source: str, requests: Sequence[TraceRequest], setup: Setup, records: Sequence[PolicyRecord]
) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "command": command,
        "trace": source,
        "requests": len(requests),
        "blocks": sum(len(request.blocks) for request in requests),
        "hours": round((requests[-1].at_ms - requests[0].at_ms) / 3.6e6, 3),
        "instances": setup.prefills,
        "decode_instances": setup.decodes,
        "hardware": dataclasses.asdict(setup.hardware),
        "best_hit_rate": round(best_hit_rate(requests), 6),
        "policies": [dataclasses.asdict(item) for item in records],
    }


def print_table(found: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    console.print(
        f"{found['requests']:,} requests, {found['blocks']:,} blocks of 512 tokens, {found['hours']:g} h; "
        f"{found['instances']} prefill and {found['decode_instances']} decode instances; "
        f"best possible block hit rate {found['best_hit_rate']:.2%}",
        markup=False,
    )
    columns = ("policy", "beta", "block hits", "of best", "from decode", "load max/mean", "requests max/mean", "local")
    table = make_table("", (*columns, "TTFT p50 ms", "p90", "p99", "mean", "decision µs"), left=("policy",))
    table.columns[0].no_wrap = True
    for row in found["policies"]:
        ttft = row["ttft_ms"]
        table.add_row(
            row["policy"],
            "" if row["beta"] is None else f"{row['beta']:g}",
            f"{row['hit_rate']:.2%}",
            f"{row['hit_rate'] / found['best_hit_rate']:.1%}" if found["best_hit_rate"] else "",
            f"{row['reused_rate']:.2%}",
            f"{row['load_max_over_mean']:.3f}",
            f"{row['requests_max_over_mean']:.3f}",
            f"{row['local_share']:.1%}",
            *(f"{ttft[name]:,.0f}" for name in ("p50", "p90", "p99", "mean")),
            f"{row['decision_us']:.0f}",
        )
    console.print(table)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw a document's block hits, balance and predicted TTFT, a bar per policy, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    rows = found["policies"]
    names = [row["policy"] + ("" if row["beta"] is None else f" β={row['beta']:g}") for row in rows]
    figure = Figure(figsize=(15, 1.5 + 0.4 * len(rows)), layout="constrained")
    figure.suptitle(f"{found['requests']:,} requests on {found['instances']} instances")
    hits, balance, ttft = figure.subplots(1, 3, sharey=True)
    hits.barh(
        names, [100 * (row["hit_rate"] + row["reused_rate"]) for row in rows], color="#9fb9dc", label="from decode"
    )
    hits.barh(names, [100 * row["hit_rate"] for row in rows], label="block hits")
    best = found["best_hit_rate"]
    hits.axvline(100 * best, color="#c0392b", linestyle="--", label=f"best possible, {best:.2%}")
    hits.set_xlabel("%")
    balance.barh(names, [row["load_max_over_mean"] for row in rows])
    balance.set_xlabel("load: busiest over mean")
    for name, color in (("p90", "#9fb9dc"), ("p50", None)):
        ttft.barh(names, [row["ttft_ms"][name] for row in rows], color=color, label=name)
    ttft.set_xlabel("predicted TTFT, ms")
    hits.legend(fontsize="small")
    ttft.legend(fontsize="small")
    hits.invert_yaxis()
    figure.savefig(path, dpi=150)


def _spread(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return round(max(values) / mean, 4) if mean else 1.0
