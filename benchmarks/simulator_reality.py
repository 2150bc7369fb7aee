"""What the simulator predicts for a trace of agents, and what real deployments do: TTFT, ITL, the order of policies.

Sessions of a trace are replayed in a closed loop (a session's next request comes its pause after its last answer has
ended), with lengths and pauses scaled alike for both sides: by ``baton bench serve``'s code against ``baton up``, and
by ``baton bench router``'s on virtual time. The simulator's instances have the speeds that ``baton profile`` measures
here, and what requests take beyond the engine on an idle 1P1D that is asked other prompts. Every ratio is run with
every policy; predicted and measured percentiles stand beside each other, and the policies' orders by mean TTFT.

Instances on this machine share its cores. By default steps are paced (``benchmarks/planner_parts/paced_executor.py``):
the model runs, everything around it is real, and a step takes a time that does not depend on the neighbours.
``--executor auto`` measures the model as fast as it goes; predictions then share ``--cores`` among the instances.

What else runs here is measured too: a run is repeated until others have had less than ``--quiet`` of the processors'
time (as root, ``nice -n -20`` keeps them off, where ``/proc/sys/kernel/sched_autogroup_enabled`` is 0).

    python benchmarks/simulator_reality.py --trace claude_code.jsonl.gz --write
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(Path(__file__).parent))]

import numpy as np
import psutil
from benchmarks.planner_parts.paced_plugin import paced_executors

from baton.cli.main import main as baton
from baton.config.flags import AccessConfig
from baton_bench.planner.profiling import measure_overheads
from baton_bench.report import Record, machine_facts
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.records import ServeRecord
from baton_bench.serve.run import Benchmark
from baton_bench.simulator.profile import Profile
from baton_bench.simulator.simulation import Deployment, Outcome, Simulation
from baton_bench.traces import TraceRequest, read_trace, scaled, scaled_block, write_trace
from baton_bench.tuning import deployment

MODEL = ROOT / "models" / "baton-tiny"
RESULT = ROOT / "benchmarks" / "results" / "simulator-reality.json"
RATIOS = ("1P1D", "2P1D", "2P2D")
POLICIES = ("match_minus_load", "round_robin", "random", "least_loaded", "session")
BLIND = POLICIES[2:]
"""Policies that choose as round_robin does where there is one pair; they are run where there are more."""
FIGURES = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms")
CONTEXT = 16_384
"""Tokens of the demo model's copy; its answers make no sense there, their times do."""
KV_BLOCKS = 8000
ISL = 2048
"""Prompt tokens of the requests that are compared with an idle deployment."""
APART = 0.1
"""Difference of two policies' measured means from which their order counts."""
SEEDS = 9
"""Simulations of a cell, whose medians are reported: policies draw, and hash the names of instances."""
JITTER = 0.02
"""Part by which a simulation's pauses differ from the trace's: a closed loop makes much of little."""


def sessions(path: Path, scale: float, count: int, turns: int) -> list[TraceRequest]:
    """Return the first requests, ``turns`` at most, of the first ``count`` sessions that fit the model."""
    by: dict[str, list[TraceRequest]] = {}
    for request in read_trace(path):
        by.setdefault(request.session, []).append(request)
    fitting = [
        own[:turns]
        for own in by.values()
        if all(each.input_tokens + each.output_tokens < CONTEXT for each in scaled(own[:turns], scale))
    ]
    chosen = [request for own in fitting[:count] for request in own]
    return sorted(chosen, key=lambda request: request.at_ms)


def copy_model(folder: Path) -> Path:
    """Return a copy of the demo model that takes longer prompts."""
    model = folder / "baton-tiny"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return model


def engine_flags(model: Path, executor: str) -> tuple[str, ...]:
    """Return the engine's flags, of profile and deployments alike."""
    return ("--model", str(model), "--executor", executor, "--kv-blocks", str(KV_BLOCKS), "--threads", "1")


@contextlib.contextmanager
def running(folder: Path, flags: Sequence[str], ratio: str, policy: str) -> Iterator[str]:
    """Run a deployment; yields its URL."""
    file = folder / f"{ratio}-{policy}.yaml"
    file.write_text(json.dumps({"ratio": ratio, "router": {"flags": {"policy": policy}}}))
    with deployment(file, *flags) as url:
        yield url


def profile_model(folder: Path, flags: Sequence[str]) -> Profile:
    """Run ``baton profile``, then measure what requests take beyond the engine on an idle 1P1D."""
    path = folder / "profile.json"
    if baton(["profile", *flags, "--isl", str(CONTEXT // 2), "--repeats", "3", "--output", str(path)]):
        raise SystemExit("baton profile failed")
    profile = Profile.load(path)
    with running(folder, flags, "1P1D", "round_robin") as url:
        found = measure_overheads(
            url, AccessConfig(), profile, isl=ISL, step=lambda what, left: print(what, file=sys.stderr)
        )
    return dataclasses.replace(profile, overheads=found, model=str(MODEL.relative_to(ROOT)))


class Neighbours:
    """Measures the share of the processors' time that other processes have; this one's children must have ended."""

    def __init__(self) -> None:
        self._all = self._busy()
        self._own = self._used()
        self._began = time.monotonic()

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice

    @staticmethod
    def _used() -> float:
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in uses)

    def share(self) -> float:
        """Return the share since the start, 0 to 1."""
        seconds = time.monotonic() - self._began
        others = self._busy() - self._all - (self._used() - self._own)
        return max(0.0, others / (seconds * (os.cpu_count() or 1)))


def figures(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the figures of milliseconds by ``ttft`` and ``itl``, and the mean TTFT."""
    result = {}
    for name in FIGURES:
        metric, share, _ = name.split("_")
        result[name] = float(np.percentile(values[metric], float(share[1:])))
    return result | {"ttft_mean_ms": float(np.mean(values["ttft"]))}


def predicted(outcome: Outcome) -> dict[str, float]:
    """Return the same figures of a simulation."""
    result = {}
    for name in FIGURES:
        metric, share, _ = name.split("_")
        result[name] = outcome.percentile(metric, float(share[1:]))
    return result | {"ttft_mean_ms": float(np.mean([each.ttft_ms for each in outcome.requests]))}


def middle(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}


def simulate(fleet: Deployment, requests: Sequence[TraceRequest]) -> dict[str, float]:
    """Return the figures that the simulator predicts."""
    results = []
    for seed in range(SEEDS):
        factors = np.random.default_rng(seed).uniform(1 - JITTER, 1 + JITTER, len(requests)).tolist()
        jittered = [
            dataclasses.replace(request, delay_ms=None if request.delay_ms is None else factor * request.delay_ms)
            for request, factor in zip(requests, factors, strict=True)
        ]
        results.append(predicted(Simulation(fleet, seed=seed).run(jittered, closed=True)))
    return middle(results)


def measure(url: str, file: Path, args: argparse.Namespace) -> dict[str, float]:
    """Replay the trace; returns the figures."""
    options = ServeOptions(url=url, trace=str(file), scale=args.scale, speedup=args.speedup, warmup=2, seed=args.seed)
    records: list[Record] = []
    benchmark = Benchmark(options, AccessConfig(), {})
    benchmark.run(records.append, lambda what, left: None)
    load = next(each for each in records if isinstance(each, ServeRecord))
    if load.failed:
        raise SystemExit(f"requests failed: {load.errors}")
    samples = benchmark.samples
    gaps = [gap for sample in samples for gap in sample.itl_ms]
    return figures({"ttft": [sample.ttft_ms for sample in samples], "itl": gaps})


def quiet_runs(folder: Path, flags: Sequence[str], cell: tuple[str, str], file: Path, args: argparse.Namespace) -> Any:
    """Return the medians of ``--repeats`` runs beside few others, and the share that others had at most."""
    runs: list[tuple[dict[str, float], float]] = []
    for left in range(3 * args.repeats, 0, -1):
        neighbours = Neighbours()
        with running(folder, flags, *cell) as url:
            found = measure(url, file, args)
        share = neighbours.share()
        if share > args.quiet and left > args.repeats - len(runs):
            print(f"{cell[0]} {cell[1]}: others had {share:.1%}; once more", flush=True)
            continue
        runs.append((found, share))
        if len(runs) == args.repeats:
            break
    return middle([found for found, _ in runs]), max(share for _, share in runs)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Predict, measure, and return everything."""
    flags = engine_flags(copy_model(folder), args.executor)
    kept = Path(args.profile) if args.profile else None
    if kept is not None and kept.exists():
        profile = Profile.load(kept)
    else:
        profile = profile_model(folder, flags)
        if kept is not None:
            profile.save(kept)
    chosen = sessions(Path(args.trace), args.scale, args.sessions, args.turns)
    file = folder / "sessions.jsonl"
    write_trace(file, chosen)
    requests = scaled(read_trace(file), args.scale, 1 / args.speedup)
    engine = profile.engines[0]
    rows = []
    for ratio, policy in itertools.product(args.ratios.split(","), args.policies.split(",")):
        prefills, decodes = (int(word) for word in ratio.removesuffix("D").split("P"))
        if prefills == decodes == 1 and policy in BLIND:
            continue
        fleet = Deployment(
            prefills,
            decodes,
            engine,
            engine,
            profile.limits,
            profile.link,
            profile.layers,
            profile.kv_bytes_per_token,
            overheads=profile.overheads,
            policy=policy,
            cores=None if args.executor.startswith("paced") else float(args.cores),
            block_tokens=scaled_block(args.scale),
        )
        expected = simulate(fleet, requests)
        found, others = quiet_runs(folder, flags, (ratio, policy), file, args)
        errors = {name: round(expected[name] / found[name] - 1, 4) for name in FIGURES}
        rows.append({"ratio": ratio, "policy": policy, "predicted": expected, "measured": found, "error": errors,
                     "others_share": round(others, 4)})  # fmt: skip
        print_row(rows[-1])
    return {"executor": args.executor, "scale": args.scale, "speedup": args.speedup, "sessions": args.sessions,
            "requests": len(requests), "repeats": args.repeats, "machine": machine_facts(),
            "prompt_tokens_mean": round(float(np.mean([each.input_tokens for each in requests])), 1),
            "output_tokens_mean": round(float(np.mean([each.output_tokens for each in requests])), 1),
            "profile": json.loads(profile.to_json()), "rows": rows}  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    """Print a row: of each figure what was predicted and what was measured."""
    names = (*FIGURES, "ttft_mean_ms")
    cells = (f"{row['predicted'][name]:>9.1f} {row['measured'][name]:>9.1f}" for name in names)
    text = f"{row['ratio']} {row['policy']:<18}" + "".join(f"{cell:>22}" for cell in cells)
    print(f"{text} {row['others_share']:>7.1%}", flush=True)


def order(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """Return the policies by their mean TTFT, shortest first."""
    return [row["policy"] for row in sorted(rows, key=lambda row: row[kind]["ttft_mean_ms"])]


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median errors, and per ratio the orders and the pairs whose order was predicted wrongly."""
    errors = {name: [abs(row["error"][name]) for row in rows] for name in FIGURES}
    orders = {}
    for ratio in dict.fromkeys(row["ratio"] for row in rows):
        own = [row for row in rows if row["ratio"] == ratio]
        wrong = []
        apart = 0
        for one, other in itertools.combinations(own, 2):
            measured = one["measured"]["ttft_mean_ms"] / other["measured"]["ttft_mean_ms"]
            if max(measured, 1 / measured) < 1 + APART:
                continue
            apart += 1
            if (measured > 1) != (one["predicted"]["ttft_mean_ms"] > other["predicted"]["ttft_mean_ms"]):
                wrong.append([one["policy"], other["policy"]])
        orders[ratio] = {"predicted": order(own, "predicted"), "measured": order(own, "measured"),
                         "pairs_apart": apart, "wrong": wrong}  # fmt: skip
    return {
        "median_error": {name: round(statistics.median(own), 4) for name, own in errors.items()},
        "worst_error": {name: round(max(own), 4) for name, own in errors.items()},
        "orders": orders,
    }


def with_others(result: Mapping[str, Any], before: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows, and those of an earlier run of the same load whose cells were not run now."""
    rows = list(result["rows"])
    now = {(row["ratio"], row["policy"]) for row in rows}
    if all(before.get(name) == result[name] for name in ("scale", "speedup", "sessions", "requests")):
        rows += [row for row in before["rows"] if (row["ratio"], row["policy"]) not in now]
    return sorted(rows, key=lambda row: (RATIOS.index(row["ratio"]), POLICIES.index(row["policy"])))


def main() -> int:
    """Compare; returns 1 if a median error is above ``--within``, or a pair of policies has the other order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="a trace with sessions and pauses, as baton bench router reads")
    parser.add_argument("--executor", choices=("paced_agents", "auto"), default="paced_agents", help="steps")
    names = ",".join(RATIOS)
    parser.add_argument("--ratios", default=names, help=f"to run (default: {names}); --write keeps the others' rows")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"to run (default: {','.join(POLICIES)})")
    parser.add_argument("--sessions", type=int, default=16, help="first sessions of the trace (default: 16)")
    parser.add_argument("--turns", type=int, default=15, help="requests of a session at most (default: 15)")
    parser.add_argument("--scale", type=float, default=1 / 32, help="of lengths; 1/32: blocks of 16 tokens (default)")
    parser.add_argument("--speedup", type=float, default=6.0, help="of pauses and arrivals (default: 6)")
    parser.add_argument("--repeats", type=int, default=1, help="of each cell; medians count (default: 1)")
    parser.add_argument("--quiet", type=float, default=1.0, help="most that others may have of the processors (0 to 1)")
    parser.add_argument("--cores", type=float, default=os.cpu_count(), help="of this machine, for --executor auto")
    parser.add_argument("--profile", default="", help="keep the profile in this file, and use it if it is there")
    parser.add_argument("--seed", type=int, default=1, help="of prompts (default: 1)")
    parser.add_argument("--within", type=float, default=0.15, help="largest median error of a figure (default: 0.15)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    print(" " * 23 + "".join(f"{name + ' pred. meas.':>22}" for name in (*FIGURES, "ttft_mean_ms")))
    with paced_executors(), tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    written = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if args.write:
        result["rows"] = with_others(result, written.get(args.executor, {}))
    verdict = judge(result["rows"])
    print(json.dumps(verdict, indent=1))
    if args.write:
        RESULT.write_text(json.dumps(written | {args.executor: {**result, **verdict}}, indent=1) + "\n")
    wrong = any(each["wrong"] for each in verdict["orders"].values())
    return int(wrong or max(verdict["median_error"].values()) > args.within)


if __name__ == "__main__":
    sys.exit(main())
