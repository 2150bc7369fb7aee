"""The inside of ``baton bench router``: from flags to a workload, a run per policy, and what is shown."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from baton.errors import ConfigError, shown
from baton_bench.report import check_plot, make_table, show_document
from baton_bench.router.rivals import RIVALS
from baton_bench.router.simulation import Hardware, Replay, Run, Setup
from baton_bench.traces import (
    GeneratorOptions,
    TraceRequest,
    best_hit_rate,
    generate,
    in_bursts,
    read_trace,
    with_sessions,
    write_trace,
)
from baton_router.scheduler.policies import POLICIES, PolicyContext, make_policy

_BETA_POLICIES = ("match_minus_load",)
_MANY = 64


def replay_all(args: argparse.Namespace, command: str, width: int) -> int:
    """Replay every policy and show what came out, see :func:`show_document`; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    cases = _scenarios(args)
    setups = [_setups(case) for case in cases.values()]
    if args.plot:
        if len(cases) > 1:
            raise ConfigError("--plot draws one scenario", field="plot")
        check_plot(Path(args.plot))
    documents, failed = {}, []
    for (name, case), runs in zip(cases.items(), setups, strict=True):
        source, requests = _workload(case)
        records = []
        for setup in runs:
            if sys.stderr.isatty():
                sys.stderr.write(f"{name} {setup.policy} ...\n")
            records.append(record(setup, Replay(setup).run(requests), requests))
        documents[name] = document(command, source, requests, runs[0], records)
        failed += [f"{name} {text}".lstrip() for text in _missed(case, records)]
    if args.plot:
        draw(next(iter(documents.values())), Path(args.plot))
    if args.scenarios:
        show_document({"scenarios": documents}, print_tables, width, as_json=args.json)
    else:
        show_document(documents[""], print_table, width, as_json=args.json)
    for text in failed:
        sys.stderr.write(f"baton bench router: {text}\n")
    return 3 if failed else 0


def _scenarios(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """Return the flags of each scenario that was asked for; without any, the flags as they are under no name."""
    size = max(args.instances, 1)
    known: dict[str, dict[str, Any]] = {
        "equal": {},
        "unequal": {"slow": max(1, size // 4), "slow_factor": 3.0},
        "bursts": {"bursts": 4.0},
        "bounded": {"cache_blocks": 1000},
        "many": {"instances": _MANY, "decode_instances": _MANY, "speedup": args.speedup * _MANY / size},
    }
    if not args.scenarios:
        return {"": args}
    names = list(known) if args.scenarios == "all" else [name.strip() for name in args.scenarios.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"scenarios are {', '.join(known)}, got {shown(name)}", field="scenarios")
    return {name: argparse.Namespace(**(vars(args) | known[name])) for name in names}


def _workload(args: argparse.Namespace) -> tuple[str, list[TraceRequest]]:
    if bool(args.trace) == (args.generate is not None):
        raise ConfigError("give --trace FILE or --generate N", field="trace")
    if not args.speedup > 0:
        raise ConfigError(f"--speedup must be above 0, got {args.speedup}", field="speedup")
    if args.trace:
        if args.save:
            raise ConfigError("--save is for what --generate made", field="save")
        requests = with_sessions(read_trace(Path(args.trace), args.limit))
        source = Path(args.trace).name
    else:
        names = {item.name for item in dataclasses.fields(GeneratorOptions)} - {"requests"}
        requests = generate(GeneratorOptions(requests=args.generate, **{name: getattr(args, name) for name in names}))
        source = "generated"
        if args.save:
            write_trace(Path(args.save), requests)
    if not args.bursts >= 1:
        raise ConfigError(f"--bursts must be at least 1, got {args.bursts}", field="bursts")
    if args.bursts > 1:
        requests = in_bursts(requests, args.bursts)
    if args.speedup != 1.0:
        requests = [dataclasses.replace(item, at_ms=item.at_ms / args.speedup) for item in requests]
    return source, requests


def _setups(args: argparse.Namespace) -> list[Setup]:
    groups = {"all": POLICIES, "rivals": RIVALS}
    names = [name for word in args.policy.split(",") for name in groups.get(word.strip(), (word.strip(),))]
    try:
        betas = [float(part) for part in args.beta.split(",")]
    except ValueError:
        raise ConfigError(f"--beta takes numbers, got {shown(args.beta)}", field="beta") from None
    hardware = Hardware(**{item.name: getattr(args, item.name) for item in dataclasses.fields(Hardware)})
    decodes = args.instances if args.decode_instances is None else args.decode_instances
    setups = []
    for name in names:
        for beta in betas if name in _BETA_POLICIES else betas[-1:]:
            if name not in RIVALS:  # wrong ones are told at once
                make_policy(name, PolicyContext(beta=beta, temperature=args.temperature))
            setups.append(
                Setup(
                    prefills=args.instances,
                    decodes=decodes,
                    policy=name,
                    beta=beta,
                    temperature=args.temperature,
                    threshold=args.threshold,
                    seed=args.seed,
                    hardware=hardware,
                    slow=args.slow,
                    slow_factor=args.slow_factor,
                    max_inflight=args.max_inflight,
                    patience_s=args.patience_s,
                )
            )
    return setups


def _missed(args: argparse.Namespace, records: Sequence[PolicyRecord]) -> list[str]:
    """Return what was required and not reached."""
    failed = []
    for item in records:
        if args.require_hit_rate is not None and 100 * item.hit_rate < args.require_hit_rate:
            failed.append(f"{item.policy}: {item.hit_rate:.2%} block hits, {args.require_hit_rate:g}% were required")
        if args.require_balance is not None and item.load_max_over_mean > args.require_balance:
            failed.append(
                f"{item.policy}: load max/mean {item.load_max_over_mean:.3f}, {args.require_balance:g} was required"
            )
    best = min(records, key=lambda item: item.ttft_ms["mean"])
    ratio = records[0].ttft_ms["mean"] / best.ttft_ms["mean"]
    if args.require_ttft is not None and ratio > args.require_ttft:
        failed.append(
            f"{records[0].policy}: {ratio:.2f} times the mean TTFT of {best.policy}, {args.require_ttft:g} was required"
        )
    return failed


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
        given_up_share: Requests that waited too long; they count in the times with how long that was.
        ttft_ms: Predicted time to first token: mean, and percentiles by name.
        decision_us: The router's own time per decision, on the processor, measured while replaying: median.
    """

    policy: str
    beta: float | None
    hit_rate: float
    reused_rate: float
    load_max_over_mean: float
    requests_max_over_mean: float
    local_share: float
    given_up_share: float
    ttft_ms: dict[str, float]
    decision_us: float


def record(setup: Setup, run: Run, requests: Sequence[TraceRequest]) -> PolicyRecord:
    """Sum up a run."""
    blocks = sum(len(request.blocks) for request in requests)
    marks = np.percentile(run.ttft_ms, (50, 90, 99))
    names = ("p50", "p90", "p99")
    return PolicyRecord(
        policy=setup.policy,
        beta=setup.beta if setup.policy in _BETA_POLICIES else None,
        hit_rate=round(run.hit_blocks / blocks, 6),
        reused_rate=round(run.reused_blocks / blocks, 6),
        load_max_over_mean=_spread([float(x.computed_tokens) for x in run.prefills]),
        requests_max_over_mean=_spread([float(x.num_requests) for x in run.prefills]),
        local_share=round(run.local / len(requests), 4),
        given_up_share=round(run.given_up / len(requests), 4),
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
        "slow": setup.slow,
        "slow_factor": setup.slow_factor,
        "best_hit_rate": round(best_hit_rate([request.blocks for request in requests]), 6),
        "policies": [dataclasses.asdict(item) for item in records],
    }


def print_tables(found: dict[str, Any], console: Console) -> None:
    """Print the documents of several scenarios."""
    for name, one in found["scenarios"].items():
        console.print(f"\n{name}", markup=False)
        print_table(one, console)


def print_table(found: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    console.print(
        f"{found['requests']:,} requests, {found['blocks']:,} blocks of 512 tokens, {found['hours']:g} h; "
        f"{found['instances']} prefill and {found['decode_instances']} decode instances; "
        f"best possible block hit rate {found['best_hit_rate']:.2%}",
        markup=False,
    )
    columns = (
        "policy",
        "beta",
        "block hits",
        "of best",
        "from decode",
        "load max/mean",
        "requests max/mean",
        "local",
        "given up",
    )
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
            f"{row['given_up_share']:.1%}",
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
