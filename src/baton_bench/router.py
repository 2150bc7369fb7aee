"""``baton bench router``: the router's policies on traces or generated workloads, on virtual time.

The requests go through the router's own code (:class:`~baton_bench.simulator.router.VirtualRouter`), which gets load
and KV events as from real instances; these are the planner's (:mod:`baton_bench.simulator.engine`): chunked prompts
beside decodes, bounded pools, links with a bandwidth. What a worker would report is reported, so policies that learn do
learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from baton.errors import ConfigError, shown
from baton_bench.report import build_from, check_plot, command_line, make_table, show_document
from baton_bench.rival_policies import RIVALS
from baton_bench.serve.options import parse_slos
from baton_bench.simulator.profile import DecodeCost, EngineProfile, Limits, Link, PrefillCost, Profile
from baton_bench.simulator.router import Fleet, Routing, VirtualRouter
from baton_bench.simulator.simulation import Deployment, Outcome, Simulation
from baton_bench.traces import (
    BLOCK_TOKENS,
    GENERATED,
    GENERATED_REQUESTS,
    GeneratorOptions,
    TraceRequest,
    generate,
    in_bursts,
    read_trace,
    scaled,
    scaled_block,
    with_sessions,
    write_trace,
)
from baton_router.scheduler.policies import POLICIES, PolicyContext, make_policy

BOUND = "bound"
"""Row of what no policy can beat."""
_BETA_POLICIES = ("match_minus_load",)
_MANY = 64
_ALL_BLOCKS = 1 << 40
_TRACE_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
LLAMA_70B = Profile(
    model="llama-70b",
    source="roofline of 8 x h200-sxm, see examples/planner/llama-70b-h200.json",
    layers=80,
    kv_bytes_per_token=327_680.0,
    engines=(
        EngineProfile(
            tp=8,
            pp=1,
            prefill=PrefillCost(0.0046, 4.7e-5, 9.47e-10),
            decode=DecodeCost(0.0095, 1.14e-8, 6.7e-5),
            kv_tokens=2_667_000,
            overlap=1.0,
        ),
    ),
    link=Link(0.0001, 35e9),
    limits=Limits(max_num_seqs=256, max_num_batched_tokens=8192, prefill_chunk=2048),
)
"""Default instances: Llama 3.1 70B on eight H200s each, derived, not measured."""


@dataclass(frozen=True)
class Setup:
    """The deployment and the policy of a replay.

    Attributes:
        deployment: The instances; its policy is one of the router's, or of :data:`~baton_bench.rival_policies.RIVALS`.
        beta: Weight of load against match, where the policy has one.
        temperature: Softmax temperature of the choice; 0: the best score wins.
        seed: Seed of the policy's random choices.
        max_inflight: Requests that a decode instance may have; more wait in the router. 0: any number.
        closed: Whether requests with a known delay wait for their session's last answer.
    """

    deployment: Deployment
    beta: float = 0.5
    temperature: float = 0.0
    seed: int = 0
    max_inflight: int = 64
    closed: bool = True

    @property
    def policy(self) -> str:
        return self.deployment.policy


@dataclass(frozen=True)
class Replay:
    """One run of a trace.

    Attributes:
        router: The router, with its own view of the instances.
        simulation: The instances.
        outcome: Times of the requests.
    """

    router: VirtualRouter
    simulation: Simulation
    outcome: Outcome


def replay(setup: Setup, requests: Sequence[TraceRequest]) -> Replay:
    """Replay requests, which are in order of arrival."""
    routers: list[VirtualRouter] = []

    def make(fleet: Fleet, now: Any) -> Routing:
        own = dataclasses.replace(
            fleet, beta=setup.beta, temperature=setup.temperature, max_inflight=setup.max_inflight
        )
        routers.append(VirtualRouter(own, now, RIVALS.get(setup.policy)))
        return routers[0]

    simulation = Simulation(setup.deployment, make, seed=setup.seed)
    outcome = simulation.run(requests, closed=setup.closed)
    return Replay(routers[0], simulation, outcome)


# --- what no policy can beat ---


def fresh_tokens(
    requests: Sequence[TraceRequest], block_tokens: int = BLOCK_TOKENS, *, closed: bool = False
) -> list[int]:
    """Return the prompt tokens that each request must have computed, however it is placed.

    They are those after the blocks that an earlier request had; in a closed loop, where the order of arrivals depends
    on the answers, after those of an earlier request of its session or of any request of other sessions.
    """
    first: dict[int, int] = {}
    owners: dict[int, str | None] = {}
    for number, request in enumerate(requests):
        for name in request.blocks:
            first.setdefault(name, number)
            if closed:
                owners[name] = request.session if owners.get(name, request.session) == request.session else None
    fresh = []
    for number, request in enumerate(requests):
        full = request.blocks[: request.input_tokens // block_tokens]
        known = (first[name] < number or (closed and owners[name] is None) for name in full)
        matched = block_tokens * next((at for at, is_known in enumerate(known) if not is_known), len(full))
        if matched >= request.input_tokens:
            matched -= block_tokens  # the last token is computed for its logits
        fresh.append(request.input_tokens - matched)
    return fresh


def bound_ms(setup: Setup, requests: Sequence[TraceRequest]) -> list[float]:
    """Return lower bounds of the requests' times to first token in milliseconds, whose mean bounds the mean of all.

    A request takes at least the time in which the fastest instance, idle, computes what no cache can hold, in chunks. A
    step is never shorter than its prompts' part, so all instances together do no more prompt work than their number;
    the shortest remaining first on one such server of their joint speed has the least mean time (Schrage, 1968), and
    where that is above the mean of the first bound, all bounds are raised in proportion. Transfers, decodes and moving
    KV between instances cost nothing.
    """
    deployment = setup.deployment
    costs = deployment.prefill.prefill, deployment.decode.prefill
    sizes = deployment.prefills, deployment.decodes
    alone = min(sizes) <= deployment.slow and max(sizes) <= deployment.slow
    fastest = deployment.slow_factor if alone else 1.0
    chunk = min(deployment.limits.prefill_chunk, deployment.limits.max_num_batched_tokens)
    fresh = fresh_tokens(requests, deployment.block_tokens, closed=setup.closed)
    steps = [-(-tokens // chunk) for tokens in fresh]
    own = []
    for request, tokens, count in zip(requests, fresh, steps, strict=True):
        pairs = tokens * (request.input_tokens - 0.5 * tokens)
        own.append(fastest * min(cost.seconds(tokens, pairs) + (count - 1) * cost.fixed_s for cost in costs))
    if not (setup.closed and any(request.delay_ms is not None for request in requests)):
        slow = min(deployment.slow, sizes[0]) + min(deployment.slow, sizes[1])
        speed = sum(sizes) - slow + slow / deployment.slow_factor
        fixed_s = max(cost.fixed_s for cost in costs)
        work = [
            max(0.0, seconds / fastest - count * fixed_s) / speed for seconds, count in zip(own, steps, strict=True)
        ]
        least = mean_shortest_first([request.at_ms / 1000 for request in requests], work)
        raised = max(1.0, least / (sum(own) / len(own)))
        own = [raised * seconds for seconds in own]
    return [1000 * seconds for seconds in own]


def mean_shortest_first(arrivals: Sequence[float], work: Sequence[float]) -> float:
    """Return the mean seconds in one preemptive server that takes the job with the least remaining work first."""
    left: list[float] = []
    now = total = 0.0
    arrived = finished = 0
    while finished < len(work):
        if not left:
            now = max(now, arrivals[arrived])
        while arrived < len(work) and arrivals[arrived] <= now:
            heapq.heappush(left, work[arrived])
            total -= arrivals[arrived]
            arrived += 1
        until = arrivals[arrived] if arrived < len(work) else math.inf
        if now + left[0] <= until:
            now += heapq.heappop(left)
            total += now
            finished += 1
        else:
            heapq.heapreplace(left, left[0] - (until - now))
            now = until
    return total / len(work)


# --- the command ---


def replay_all(args: argparse.Namespace) -> int:
    """Replay every policy and show the results; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    cases = list(_cases(args))
    if args.plot:
        if len(cases) > 1:
            raise ConfigError("--plot draws one scenario", field="plot")
        check_plot(Path(args.plot))
    slos = parse_slos(args.slo)
    setups = [_setups(case) for _, _, case in cases]
    documents: list[dict[str, Any]] = []
    failed = []
    for (trace, scenario, case), runs in zip(cases, setups, strict=True):
        source, requests = _workload(case, trace)
        if scenario == "open" and not any(request.delay_ms is not None for request in requests):
            continue  # its requests have their times anyway
        records = []
        for setup in runs:
            if sys.stderr.isatty():
                sys.stderr.write(f"{source} {scenario} {setup.policy} ...\n")
            records.append(record(setup, requests, slos))
        documents.append({"scenario": scenario, **document(source, requests, runs[0], records)})
        failed += [f"{scenario} {text}".lstrip() for text in _missed(case, records)]
    if args.plot:
        draw(documents[0], Path(args.plot))
    if args.traces:
        show_document({"cells": documents}, print_cells, 160, as_json=args.json)
    elif args.scenarios:
        named = {each["scenario"]: each for each in documents}
        show_document({"scenarios": named}, print_tables, 190, as_json=args.json)
    else:
        show_document(documents[0], print_table, 190, as_json=args.json)
    for text in failed:
        sys.stderr.write(f"baton bench router: {text}\n")
    return 3 if failed else 0


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, str, argparse.Namespace]]:
    """Yield every trace and scenario with its flags; without ``--traces`` and ``--scenarios`` their names are empty."""
    size = max(args.instances, 1)
    known: dict[str, dict[str, Any]] = {
        "equal": {},
        "unequal": {"slow": max(1, size // 4), "slow_factor": 3.0},
        "bursts": {"bursts": 4.0},
        "bounded": {"cache_blocks": 2000},
        "unbounded": {"cache_blocks": 0},
        "open": {"open_loop": True},
        "many": {"instances": _MANY, "decode_instances": _MANY, "crowd": _MANY / size},
    }
    names = list(known) if args.scenarios == "all" else [name.strip() for name in args.scenarios.split(",")]
    for name in names if args.scenarios else []:
        if name not in known:
            raise ConfigError(f"scenarios are {', '.join(known)}, got {shown(name)}", field="scenarios")
    for trace in _traces(args):
        for name in names:
            yield trace, name, argparse.Namespace(**({"crowd": 1.0} | vars(args) | known.get(name, {})))


def _traces(args: argparse.Namespace) -> list[str]:
    given = [bool(args.trace), args.generate is not None, bool(args.traces)]
    if sum(given) != 1:
        raise ConfigError("give --trace FILE or --generate N, or --traces", field="trace")
    if not args.traces:
        return [args.trace]
    if args.traces != "all":
        return [name.strip() for name in args.traces.split(",")]
    folder = Path(args.trace_dir)
    files = sorted(str(path) for path in folder.glob("*") if path.name.endswith(_TRACE_SUFFIXES))
    return [*files, *GENERATED]


def _workload(args: argparse.Namespace, trace: str) -> tuple[str, list[TraceRequest]]:
    for field in ("speedup", "scale"):
        if not getattr(args, field) > 0:
            raise ConfigError(f"--{field} must be above 0, got {getattr(args, field)}", field=field)
    if args.save and args.generate is None:
        raise ConfigError("--save is for what --generate made", field="save")
    if trace in GENERATED:
        source = trace
        requests = GENERATED[trace](args.limit or GENERATED_REQUESTS, args.seed)
    elif trace:
        requests = with_sessions(read_trace(Path(trace), args.limit))
        source = Path(trace).name
    else:
        requests = generate(build_from(GeneratorOptions, args, requests=args.generate))
        source = "generated"
        if args.save:
            write_trace(Path(args.save), requests)
    if not args.bursts >= 1:
        raise ConfigError(f"--bursts must be at least 1, got {args.bursts}", field="bursts")
    if args.bursts > 1:
        requests = in_bursts(requests, args.bursts)
    requests = scaled(requests, args.scale, 1 / args.speedup)
    return source, [dataclasses.replace(item, at_ms=item.at_ms / args.crowd) for item in requests]


def _deployment(args: argparse.Namespace) -> Deployment:
    """Return the instances that flags describe.

    Raises:
        ConfigError: A number is out of range; names the field.
    """
    decodes = args.instances if args.decode_instances is None else args.decode_instances
    for name, value in (("instances", args.instances), ("decode_instances", decodes)):
        if not 1 <= value <= 1024:
            raise ConfigError(f"{name} must be between 1 and 1024, got {value}", field=name)
    for name, least in (("slow", 0), ("max_inflight", 0), ("slow_factor", 1.0), ("cache_blocks", 0)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{name} must be at least {least}, got {value}", field=name)
    speeds = "cores", "prefill_tokens_per_s", "local_prefill_tokens_per_s", "gb_per_s", "kv_bytes_per_token", "itl_ms"
    for name in (*speeds, "itl_per_sequence_ms", "patience_s"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be above 0, got {value}", field=name)
    profile = Profile.load(Path(args.profile)) if args.profile else LLAMA_70B
    prefill = decode = profile.engines[-1]
    if args.prefill_tokens_per_s is not None:
        prefill = dataclasses.replace(prefill, prefill=PrefillCost(0.004, 1 / args.prefill_tokens_per_s))
    if args.local_prefill_tokens_per_s is not None:
        decode = dataclasses.replace(decode, prefill=PrefillCost(0.004, 1 / args.local_prefill_tokens_per_s))
    steps = {"fixed_s": args.itl_ms, "per_sequence_s": args.itl_per_sequence_ms}
    steps = {name: value / 1e3 for name, value in steps.items() if value is not None}
    decode = dataclasses.replace(decode, decode=dataclasses.replace(decode.decode, **steps))
    if args.cache_blocks is not None:
        tokens = scaled_block(args.scale) * (args.cache_blocks or _ALL_BLOCKS)
        prefill, decode = (dataclasses.replace(each, kv_tokens=tokens) for each in (prefill, decode))
    link = profile.link
    if args.gb_per_s is not None:
        link = dataclasses.replace(link, bytes_per_s=1e9 * args.gb_per_s)
    return Deployment(
        prefills=args.instances,
        decodes=decodes,
        prefill=prefill,
        decode=decode,
        limits=profile.limits,
        link=link,
        layers=profile.layers,
        kv_bytes_per_token=args.kv_bytes_per_token or profile.kv_bytes_per_token,
        overheads=profile.overheads,
        threshold=args.threshold,
        slow=args.slow,
        slow_factor=args.slow_factor,
        patience_s=args.patience_s,
        cores=args.cores,
        block_tokens=scaled_block(args.scale),
    )


def _setups(args: argparse.Namespace) -> list[Setup]:
    groups = {"all": POLICIES, "rivals": RIVALS}
    names = [name for word in args.policy.split(",") for name in groups.get(word.strip(), (word.strip(),))]
    try:
        betas = [float(part) for part in args.beta.split(",")]
    except ValueError:
        raise ConfigError(f"--beta takes numbers, got {shown(args.beta)}", field="beta") from None
    deployment = _deployment(args)
    setups = []
    for name in names:
        for beta in betas if name in _BETA_POLICIES else betas[-1:]:
            if name not in RIVALS and name != BOUND:  # wrong ones are told at once
                make_policy(name, PolicyContext(beta=beta, temperature=args.temperature))
            own = dataclasses.replace(deployment, policy=name)
            setups.append(build_from(Setup, args, deployment=own, beta=beta, closed=not args.open_loop))
    return setups


def _missed(args: argparse.Namespace, records: Sequence[PolicyRecord]) -> list[str]:
    """Return what was required and not reached."""
    failed = []
    records = [item for item in records if item.policy != BOUND]
    for item in records:
        if args.require_hit_rate is not None and 100 * item.hit_rate < args.require_hit_rate:
            failed.append(f"{item.policy}: {item.hit_rate:.2%} hits, {args.require_hit_rate:g}% were required")
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
        policy: Name of the policy.
        beta: Weight of load, where the policy has one.
        hit_rate: Prompt tokens that were not computed, because a cache of the pair had them / all prompt tokens.
        load_max_over_mean: Prompt tokens computed by the busiest prefill instance over the mean of all.
        local_share: Share of requests whose prompt the decode instance computed.
        given_up_share: Share of requests that waited in the router too long; they count with the time they waited.
        ttft_ms: Time to first token: mean, and percentiles by name.
        itl_ms: Time between two tokens: percentiles.
        e2e_ms: Time to the last token: mean and percentiles.
        goodput: Requests per second that kept all targets; ``None``: no targets.
        sessions_per_hour: Conversations served per hour.
        preemptions: Sequences that lost their KV to make room.
        decision_us: The router's own time per decision, on the processor, measured while replaying: median.
    """

    policy: str
    beta: float | None
    hit_rate: float
    load_max_over_mean: float
    local_share: float
    given_up_share: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    goodput: float | None
    sessions_per_hour: float
    preemptions: int
    decision_us: float


def record(setup: Setup, requests: Sequence[TraceRequest], slos: dict[str, float]) -> PolicyRecord:
    """Replay requests and sum up."""
    total = sum(request.input_tokens for request in requests)
    if setup.policy == BOUND:
        hit_rate = 1 - sum(fresh_tokens(requests, setup.deployment.block_tokens, closed=setup.closed)) / total
        ttft = _percentiles(bound_ms(setup, requests))
        return PolicyRecord(BOUND, None, round(hit_rate, 6), 1.0, 0.0, 0.0, ttft, {}, {}, None, 0.0, 0, 0.0)
    run = replay(setup, requests)
    served = run.outcome.requests
    sessions = {request.session or str(number) for number, request in enumerate(requests)}
    hours = run.outcome.seconds / 3600
    return PolicyRecord(
        policy=setup.policy,
        beta=setup.beta if setup.policy in _BETA_POLICIES else None,
        hit_rate=round(1 - sum(each.computed for each in served) / total, 6),
        load_max_over_mean=_spread([float(engine.use.prompt_tokens) for engine in run.simulation.prefills]),
        local_share=round(sum(not each.remote for each in served) / len(requests), 4),
        given_up_share=round(len(run.outcome.given_up_ms) / len(requests), 4),
        ttft_ms=_percentiles([each.ttft_ms for each in served] + list(run.outcome.given_up_ms)),
        itl_ms={f"p{mark}": round(run.outcome.percentile("itl", mark), 2) for mark in (50, 99)},
        e2e_ms=_percentiles([each.e2e_ms for each in served]),
        goodput=round(run.outcome.goodput(slos), 4) if slos else None,
        sessions_per_hour=round(len(sessions) / hours, 1) if hours else 0.0,
        preemptions=sum(engine.use.preemptions for engine in (*run.simulation.prefills, *run.simulation.decodes)),
        decision_us=round(float(np.median(run.router.decision_us)), 1),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    marks = {f"p{mark}": round(float(np.percentile(values, mark)), 1) for mark in (50, 90, 99)}
    return {"mean": round(float(np.mean(values)), 1)} | marks


def document(
    source: str, requests: Sequence[TraceRequest], setup: Setup, records: Sequence[PolicyRecord]
) -> dict[str, Any]:
    """Return everything as one JSON object."""
    deployment = setup.deployment
    total = sum(request.input_tokens for request in requests)
    fresh = sum(fresh_tokens(requests, deployment.block_tokens, closed=setup.closed))
    return {
        "command": command_line(),
        "trace": source,
        "requests": len(requests),
        "prompt_tokens": total,
        "hours": round((requests[-1].at_ms - requests[0].at_ms) / 3.6e6, 3),
        "instances": deployment.prefills,
        "decode_instances": deployment.decodes,
        "cache_blocks": min(deployment.prefill.kv_tokens // deployment.block_tokens, _ALL_BLOCKS),
        "closed": setup.closed and any(request.delay_ms is not None for request in requests),
        "slow": deployment.slow,
        "slow_factor": deployment.slow_factor,
        "best_hit_rate": round(1 - fresh / total, 6),
        "policies": [dataclasses.asdict(item) for item in records],
    }


def print_tables(document: dict[str, Any], console: Console) -> None:
    """Print the documents of several scenarios."""
    for name, one in document["scenarios"].items():
        console.print(f"\n{name}", markup=False)
        print_table(one, console)


def print_cells(document: dict[str, Any], console: Console) -> None:
    """Print a row per trace and scenario: the first policy, the best of the others, and the bound."""
    columns = "trace", "scenario", "TTFT mean, p99 ms", "hits, of possible", "ITL p99 ms", "local"
    others = "best of the others", "its TTFT", "its ITL p99", "bound mean, p99", "mean / bound"
    table = make_table("", (*columns, *others), left=("trace", "scenario", "best of the others"))
    for cell in document["cells"]:
        first, *rest = (row for row in cell["policies"] if row["policy"] != BOUND)
        bound = next((row for row in cell["policies"] if row["policy"] == BOUND), None)
        best = min(rest, key=lambda row: row["ttft_ms"]["mean"], default=None)
        possible = cell["best_hit_rate"]
        table.add_row(
            cell["trace"].split(".")[0],
            cell["scenario"],
            _mean_and_p99(first),
            f"{first['hit_rate']:.1%}" + (f", {first['hit_rate'] / possible:.1%}" if possible else ""),
            f"{first['itl_ms']['p99']:.0f}",
            f"{first['local_share']:.0%}",
            *((best["policy"], _mean_and_p99(best), f"{best['itl_ms']['p99']:.0f}") if best else ("", "", "")),
            _mean_and_p99(bound) if bound else "",
            f"{first['ttft_ms']['mean'] / bound['ttft_ms']['mean']:.2f}" if bound else "",
        )
    console.print(table)


def _mean_and_p99(row: dict[str, Any]) -> str:
    return f"{row['ttft_ms']['mean']:,.0f}, {row['ttft_ms']['p99']:,.0f}"


def print_table(document: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    console.print(
        f"{document['requests']:,} requests, {document['prompt_tokens']:,} prompt tokens, {document['hours']:g} h; "
        f"{document['instances']} prefill and {document['decode_instances']} decode instances; "
        f"best possible hit rate {document['best_hit_rate']:.2%}",
        markup=False,
    )
    columns = "policy", "beta", "hits", "of best", "load max/mean", "local", "given up"
    times = "TTFT p50 ms", "p90", "p99", "mean", "ITL p50 ms", "p99", "E2E mean s", "goodput/s", "sessions/h"
    table = make_table("", (*columns, *times, "decision µs"), left=("policy",))
    table.columns[0].no_wrap = True
    for row in document["policies"]:
        ttft = row["ttft_ms"]
        served = row["policy"] != BOUND
        table.add_row(
            row["policy"],
            "" if row["beta"] is None else f"{row['beta']:g}",
            f"{row['hit_rate']:.2%}",
            f"{row['hit_rate'] / document['best_hit_rate']:.1%}" if document["best_hit_rate"] else "",
            f"{row['load_max_over_mean']:.3f}" if served else "",
            f"{row['local_share']:.1%}" if served else "",
            f"{row['given_up_share']:.1%}" if served else "",
            *(f"{ttft[name]:,.0f}" for name in ("p50", "p90", "p99", "mean")),
            *(f"{row['itl_ms'][name]:.1f}" if served else "" for name in ("p50", "p99")),
            f"{row['e2e_ms']['mean'] / 1000:,.1f}" if row["e2e_ms"] else "",
            "" if row["goodput"] is None else f"{row['goodput']:.3f}",
            f"{row['sessions_per_hour']:,.0f}" if served else "",
            f"{row['decision_us']:.0f}" if served else "",
        )
    console.print(table)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a document's hits, balance and predicted TTFT, a bar per policy, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    rows = document["policies"]
    names = [row["policy"] + ("" if row["beta"] is None else f" β={row['beta']:g}") for row in rows]
    figure = Figure(figsize=(15, 1.5 + 0.4 * len(rows)), layout="constrained")
    figure.suptitle(f"{document['requests']:,} requests on {document['instances']} instances")
    hits, balance, ttft = figure.subplots(1, 3, sharey=True)
    hits.barh(names, [100 * row["hit_rate"] for row in rows], label="hits")
    best = document["best_hit_rate"]
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
