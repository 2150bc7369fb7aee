"""``baton bench router``: the router's policies on a trace or a generated workload, on virtual time.

The requests go through the router's own code (:class:`~baton_bench.simulator.router.VirtualRouter`), which gets load
and KV events as from real instances. A prompt waits in its instance's queue, is computed as far as it was not cached,
its KV is transferred, and decode generates. What a worker would report is reported, so policies that learn do learn.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from baton.errors import ConfigError, shown
from baton.types import Role
from baton_bench.report import build_from, check_plot, command_line, make_table, show_document
from baton_bench.rival_policies import RIVALS, make_rival
from baton_bench.simulator.router import Fleet, PrefillReport, PrefixCache, Route, VirtualRouter
from baton_bench.simulator.timeline import Timeline
from baton_bench.traces import (
    BLOCK_TOKENS,
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

_LAYERS = 32
"""The last layer's share of a transfer is what layer-wise overlap cannot hide."""
_BETA_POLICIES = ("match_minus_load",)
_MANY = 64


@dataclass(frozen=True)
class Hardware:
    """Speeds and cache size of simulated instances.

    Attributes:
        prefill_tokens_per_s: Prompt tokens per second of a prefill instance.
        local_prefill_tokens_per_s: Prompt tokens per second of a decode instance, beside its decodes.
        gb_per_s: Bandwidth of the link between two instances in GB/s.
        kv_bytes_per_token: KV bytes of a token over all layers.
        itl_ms: Milliseconds between two tokens of a sequence that runs alone.
        itl_per_sequence_ms: Milliseconds that each other sequence on the instance adds to it.
        cache_blocks: Blocks of 512 tokens that an instance keeps; 0: all.

    Raises:
        ConfigError: A number is out of range; names the field.
    """

    prefill_tokens_per_s: float = 8000.0
    local_prefill_tokens_per_s: float = 6000.0
    gb_per_s: float = 12.5
    kv_bytes_per_token: int = 131_072
    itl_ms: float = 15.0
    itl_per_sequence_ms: float = 0.3
    cache_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "local_prefill_tokens_per_s", "gb_per_s", "kv_bytes_per_token", "itl_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}", field=name)
        for name in ("itl_per_sequence_ms", "cache_blocks"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}", field=name)

    def prefill_s(self, role: Role, tokens: int) -> float:
        """Return the seconds that an instance takes to compute a prompt's tokens."""
        speed = self.prefill_tokens_per_s if role is Role.PREFILL else self.local_prefill_tokens_per_s
        return 0.004 + tokens / speed

    def slower(self, factor: float) -> Hardware:
        """Return hardware that takes ``factor`` times as long for everything that it computes."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s / factor,
            local_prefill_tokens_per_s=self.local_prefill_tokens_per_s / factor,
            itl_ms=self.itl_ms * factor,
            itl_per_sequence_ms=self.itl_per_sequence_ms * factor,
        )

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds that the KV of ``tokens`` tokens takes over the link."""
        return 0.001 + tokens * self.kv_bytes_per_token / (1e9 * self.gb_per_s)


@dataclass(frozen=True)
class Setup:
    """The deployment and the policy of a replay.

    Attributes:
        prefills: Number of prefill instances, 1 to 1024.
        decodes: Number of decode instances, 1 to 1024.
        policy: Name of the policy: one of the router's, or of :data:`~baton_bench.rival_policies.RIVALS`.
        beta: Weight of load against match.
        temperature: Softmax temperature of the choice; 0: the best score wins.
        threshold: Missing tokens below which decode prefills; ``None``: never, unless the policy says so.
        seed: Seed of the policy's random choices.
        hardware: Speeds of all instances.
        slow: Number of instances of each role that are slower.
        slow_factor: How many times as long they take for everything.
        max_inflight: Requests that a decode instance may have; more wait in the router. 0: any number.
        patience_s: Seconds after which a request that no instance has begun with is given up, in the router or in an
            instance's queue.

    Raises:
        ConfigError: A number is out of range; names the field.
    """

    prefills: int = 8
    decodes: int = 8
    policy: str = "match_minus_load"
    beta: float = 0.5
    temperature: float = 0.0
    threshold: int | None = None
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    slow: int = 0
    slow_factor: float = 3.0
    max_inflight: int = 64
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("prefills", "decodes"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{name} must be between 1 and 1024, got {getattr(self, name)}", field=name)
        for name, least in (("slow", 0), ("max_inflight", 0), ("slow_factor", 1.0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}", field=name)
        if not self.patience_s > 0:
            raise ConfigError(f"patience_s must be above 0, got {self.patience_s}", field="patience_s")


@dataclass(slots=True, eq=False)
class _Job:
    """A request that was placed.

    Attributes:
        request: The request.
        route: Where it was placed.
        instance: Where its prompt is computed.
        decode: The decode instance.
        computed: Prompt tokens to compute.
        moved: Prompt tokens whose KV is transferred.
        exposed_s: Seconds of the transfer after the computation.
    """

    request: TraceRequest
    route: Route
    instance: ReplayInstance
    decode: ReplayInstance
    computed: int = 0
    moved: int = 0
    exposed_s: float = 0.0


class ReplayInstance:
    """One instance: a queue of prompts, computed one after the other, and a cache of blocks.

    Args:
        role: Prefill or decode.
        hardware: Speeds of the instance.
        cache: Blocks of the instance.

    Attributes:
        queue: Requests whose prompts wait here; the first one is being computed.
        decoding: Number of sequences that decode.
        link_free_at: Virtual time at which its link has sent all blocks that were fetched from it.
        num_requests: Requests whose prompts were queued here, since the start.
        computed_tokens: Prompt tokens computed since the start.
    """

    def __init__(self, role: Role, hardware: Hardware, cache: PrefixCache) -> None:
        self.role = role
        self.hardware = hardware
        self.cache = cache
        self.queue: deque[_Job] = deque()
        self.decoding = 0
        self.link_free_at = 0.0
        self.num_requests = 0
        self.computed_tokens = 0


@dataclass(slots=True)
class ReplayResult:
    """What a replay counted.

    Attributes:
        ttft_ms: Milliseconds to the first token per request, in order of the first tokens. A request that was given up
            counts with the time that it waited, so that no policy is quick by serving less.
        decision_us: The router's processor time per placement in microseconds.
        hit_blocks: Blocks found in the cache of the instance that computed the prompt.
        reused_blocks: Blocks fetched from the decode instance, which alone held them.
        local: Requests whose prompt the decode instance computed.
        given_up: Requests that waited longer than the patience.
        prefills: The prefill instances.
        decodes: The decode instances.
    """

    ttft_ms: list[float] = field(default_factory=list)
    decision_us: list[float] = field(default_factory=list)
    hit_blocks: int = 0
    reused_blocks: int = 0
    local: int = 0
    given_up: int = 0
    prefills: list[ReplayInstance] = field(default_factory=list)
    decodes: list[ReplayInstance] = field(default_factory=list)


class Replay:
    """One run of a trace; call :meth:`run` once.

    The router is the simulator's: its own placement, index and learnt speeds. Instances are simpler than the planner's
    (:mod:`baton_bench.simulator.engine`): no batches of prompts, no chunks, no full KV pools. They need no engine
    installed, and what is compared here are policies.

    Args:
        setup: The deployment and the policy.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._timeline = Timeline()
        self._waiting: deque[TraceRequest] = deque()
        kv_bytes = setup.hardware.kv_bytes_per_token
        fleet = build_from(Fleet, setup, kv_bytes_per_token=kv_bytes, max_num_seqs=0, whole_blocks=True)
        rival = make_rival(setup.policy) if setup.policy in RIVALS else None
        self.router = VirtualRouter(fleet, lambda: self._timeline.now, rival)
        self._result = ReplayResult(
            decision_us=self.router.decision_us,
            prefills=[self._make_instance(Role.PREFILL, number) for number in range(setup.prefills)],
            decodes=[self._make_instance(Role.DECODE, number) for number in range(setup.decodes)],
        )

    def run(self, requests: Sequence[TraceRequest]) -> ReplayResult:
        """Replay requests, which are in order of arrival."""
        for request in requests:
            self._timeline.at(request.at_ms / 1000, partial(self._arrive, request))
        self._timeline.run_while(lambda: True)
        return self._result

    def _make_instance(self, role: Role, number: int) -> ReplayInstance:
        setup = self._setup
        hardware = setup.hardware.slower(setup.slow_factor) if number < setup.slow else setup.hardware
        capacity = hardware.cache_blocks * BLOCK_TOKENS or math.inf
        return ReplayInstance(
            role, hardware, PrefixCache(capacity, partial(self.router.on_blocks_changed, role, number))
        )

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timeline.at(self._timeline.now + seconds, action)

    def _arrive(self, request: TraceRequest) -> None:
        self._waiting.append(request)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place the request that has waited longest, and the next ones, while a decode instance has room."""
        while self._waiting:
            request = self._waiting[0]
            if self._is_late(request):
                self._give_up(request)
            elif not self._place(request):
                return
            self._waiting.popleft()

    def _is_late(self, request: TraceRequest) -> bool:
        return self._timeline.now - request.at_ms / 1000 > self._setup.patience_s

    def _give_up(self, request: TraceRequest) -> None:
        self._result.given_up += 1
        self._result.ttft_ms.append(1000 * self._timeline.now - request.at_ms)

    def _place(self, request: TraceRequest) -> bool:
        route = self.router.place(request)
        if route is None:
            return False
        decode = self._result.decodes[route.decode]
        instance = decode if route.prefill is None else self._result.prefills[route.prefill]
        self._result.local += route.prefill is None
        instance.num_requests += 1
        job = _Job(request, route, instance, decode)
        instance.queue.append(job)
        if len(instance.queue) == 1:
            self._start_prompt(job)
        return True

    def _start_next_prompt(self, instance: ReplayInstance) -> None:
        """Begin with the next prompt in a queue whose request was not given up."""
        instance.queue.popleft()
        while instance.queue and self._is_late(instance.queue[0].request):
            job = instance.queue.popleft()
            self._give_up(job.request)
            self.router.on_given_up(job.route)
        if instance.queue:
            self._start_prompt(instance.queue[0])

    def _start_prompt(self, job: _Job) -> None:
        instance = job.instance
        hardware = instance.hardware
        total = job.request.input_tokens
        own = instance.cache.match_prefix(job.request.blocks)
        at_decode = job.decode.cache.match_prefix(job.request.blocks)
        self._result.hit_blocks += own
        if instance is not job.decode:
            self._result.reused_blocks += max(0, at_decode - own)
        job.computed = max(1, total - BLOCK_TOKENS * max(own, at_decode))
        instance.computed_tokens += job.computed
        seconds = hardware.prefill_s(instance.role, job.computed)
        if instance is not job.decode:
            job.moved = max(0, total - BLOCK_TOKENS * at_decode)
            transfer = hardware.transfer_s(job.moved)
            job.exposed_s = max(transfer - seconds, transfer / _LAYERS)
            if at_decode > own:
                # What decode alone holds comes over its link before the rest is computed; the link does one at a time.
                fetched = min(total, BLOCK_TOKENS * at_decode) - BLOCK_TOKENS * own
                begin = max(self._timeline.now, job.decode.link_free_at)
                job.decode.link_free_at = begin + hardware.transfer_s(fetched)
                seconds += job.decode.link_free_at - self._timeline.now
        self._after(seconds, lambda: self._end_prompt(job))

    def _end_prompt(self, job: _Job) -> None:
        job.instance.cache.store(job.request.blocks)
        self._start_next_prompt(job.instance)
        self._after(job.exposed_s, lambda: self._start_decode(job))

    def _start_decode(self, job: _Job) -> None:
        request = job.request
        decode = job.decode
        ttft_s = self._timeline.now - request.at_ms / 1000
        self._result.ttft_ms.append(1000 * ttft_s)
        remote = job.instance is not decode
        if remote:
            decode.cache.store(request.blocks)
        cached = request.input_tokens - job.computed
        report = PrefillReport(remote, job.computed, cached, job.moved, job.exposed_s, ttft_s)
        self.router.on_first_token(job.route, report)
        decode.decoding += 1
        hardware = decode.hardware
        itl_s = (hardware.itl_ms + hardware.itl_per_sequence_ms * (decode.decoding - 1)) / 1000
        self._after(itl_s * (request.output_tokens - 1), lambda: self._end_decode(job))

    def _end_decode(self, job: _Job) -> None:
        job.decode.decoding -= 1
        self.router.on_finished(job.route, job.request.output_tokens)
        self._place_waiting()


def replay_all(args: argparse.Namespace) -> int:
    """Replay every policy and show the results; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    cases = _scenarios(args)
    setups = [_setups(case) for case in cases.values()]
    if args.plot:
        if len(cases) > 1:
            raise ConfigError("--plot draws one scenario", field="plot")
        check_plot(Path(args.plot))
    documents = {}
    failed = []
    for (name, case), runs in zip(cases.items(), setups, strict=True):
        source, requests = _workload(case)
        records = []
        for setup in runs:
            if sys.stderr.isatty():
                sys.stderr.write(f"{name} {setup.policy} ...\n")
            records.append(record(setup, Replay(setup).run(requests), requests))
        documents[name] = document(source, requests, runs[0], records)
        failed += [f"{name} {text}".lstrip() for text in _missed(case, records)]
    if args.plot:
        draw(next(iter(documents.values())), Path(args.plot))
    if args.scenarios:
        show_document({"scenarios": documents}, print_tables, 160, as_json=args.json)
    else:
        show_document(documents[""], print_table, 160, as_json=args.json)
    for text in failed:
        sys.stderr.write(f"baton bench router: {text}\n")
    return 3 if failed else 0


def _scenarios(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """Return the flags of each scenario by its name; without ``--scenarios`` the flags under an empty name."""
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
        requests = generate(build_from(GeneratorOptions, args, requests=args.generate))
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
    hardware = build_from(Hardware, args)
    decodes = args.instances if args.decode_instances is None else args.decode_instances
    setups = []
    for name in names:
        for beta in betas if name in _BETA_POLICIES else betas[-1:]:
            if name not in RIVALS:  # wrong ones are told at once
                make_policy(name, PolicyContext(beta=beta, temperature=args.temperature))
            size = {"prefills": args.instances, "decodes": decodes}
            setups.append(build_from(Setup, args, **size, policy=name, beta=beta, hardware=hardware))
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
        policy: Name of the policy.
        beta: Weight of load, where the policy has one.
        hit_rate: Blocks found in the cache of the instance that computed the prompt / all blocks.
        reused_rate: Blocks that only the decode instance held, fetched from there instead of computed / all blocks.
        load_max_over_mean: Prompt tokens computed by the busiest prefill instance over the mean of all.
        requests_max_over_mean: Prompts on the busiest prefill instance over the mean of all.
        local_share: Share of requests whose prompt the decode instance computed.
        given_up_share: Share of requests that waited too long; they count with the time that they waited.
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


def record(setup: Setup, run: ReplayResult, requests: Sequence[TraceRequest]) -> PolicyRecord:
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
    source: str, requests: Sequence[TraceRequest], setup: Setup, records: Sequence[PolicyRecord]
) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "command": command_line(),
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


def print_tables(document: dict[str, Any], console: Console) -> None:
    """Print the documents of several scenarios."""
    for name, one in document["scenarios"].items():
        console.print(f"\n{name}", markup=False)
        print_table(one, console)


def print_table(document: dict[str, Any], console: Console) -> None:
    """Print a document for people."""
    console.print(
        f"{document['requests']:,} requests, {document['blocks']:,} blocks of 512 tokens, {document['hours']:g} h; "
        f"{document['instances']} prefill and {document['decode_instances']} decode instances; "
        f"best possible block hit rate {document['best_hit_rate']:.2%}",
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
    for row in document["policies"]:
        ttft = row["ttft_ms"]
        table.add_row(
            row["policy"],
            "" if row["beta"] is None else f"{row['beta']:g}",
            f"{row['hit_rate']:.2%}",
            f"{row['hit_rate'] / document['best_hit_rate']:.1%}" if document["best_hit_rate"] else "",
            f"{row['reused_rate']:.2%}",
            f"{row['load_max_over_mean']:.3f}",
            f"{row['requests_max_over_mean']:.3f}",
            f"{row['local_share']:.1%}",
            f"{row['given_up_share']:.1%}",
            *(f"{ttft[name]:,.0f}" for name in ("p50", "p90", "p99", "mean")),
            f"{row['decision_us']:.0f}",
        )
    console.print(table)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a document's block hits, balance and predicted TTFT, a bar per policy, and write the file."""
    from matplotlib.figure import Figure  # a figure of its own: no window system, no global state

    rows = document["policies"]
    names = [row["policy"] + ("" if row["beta"] is None else f" β={row['beta']:g}") for row in rows]
    figure = Figure(figsize=(15, 1.5 + 0.4 * len(rows)), layout="constrained")
    figure.suptitle(f"{document['requests']:,} requests on {document['instances']} instances")
    hits, balance, ttft = figure.subplots(1, 3, sharey=True)
    hits.barh(
        names, [100 * (row["hit_rate"] + row["reused_rate"]) for row in rows], color="#9fb9dc", label="from decode"
    )
    hits.barh(names, [100 * row["hit_rate"] for row in rows], label="block hits")
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
