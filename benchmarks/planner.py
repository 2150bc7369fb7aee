"""What ``baton plan`` predicts, and what ``baton up`` then does: TTFT, ITL and goodput of several ratios and rates.

The demo model is profiled here (``baton profile``), what requests take beyond the engine is measured on an idle 1P1D,
and 1P1D, 2P1D, 1P2D and 0P2D are predicted at 60 %, 95 % and 125 % of the goodput that the simulator finds for each.
Then each is started with ``baton up -f`` and put under the same requests at the same times by ``baton bench serve``'s
own code. Reported is every figure beside its prediction; it fails if the median error is above ``--within`` or another
ratio than the predicted one has most goodput. Which one has most per instance is reported, of all runs and of those
near the knee alone: overloaded ones have a goodput that a few milliseconds decide.

Instances on this machine share its cores, and so does whatever else runs here. By default steps are therefore paced
(``benchmarks/planner_parts/paced_executor.py``): the model runs, everything around it is real, and a step takes a time
that does not depend on the neighbours. ``--executor auto`` measures the model as fast as it goes; then predictions use
processor sharing (``--cores``).

    python benchmarks/planner.py --write
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(Path(__file__).parent))]

from benchmarks.planner_parts.paced_plugin import paced_executors

from baton.cli.main import main as baton
from baton.config.flags import AccessConfig
from baton_bench.planner.plan import cluster_yaml
from baton_bench.planner.profiling import measure_overheads
from baton_bench.planner.search import (
    CandidateResult,
    Goal,
    Search,
    bounds,
    limit_of,
    make_deployment,
)
from baton_bench.planner.workload import Workload
from baton_bench.report import Record, machine_facts
from baton_bench.serve.options import ServeOptions
from baton_bench.serve.prompts import PromptSource
from baton_bench.serve.records import ServeRecord
from baton_bench.serve.run import (
    Benchmark,
    arrival_times,
)
from baton_bench.simulator.profile import Profile
from baton_bench.simulator.simulation import (
    Deployment,
    Outcome,
)
from baton_bench.traces import BLOCK_TOKENS, TraceRequest
from baton_bench.tuning import deployment

MODEL = ROOT / "models" / "baton-tiny"
RESULT = ROOT / "benchmarks" / "results" / "planner.json"
RATIOS = ((1, 1), (2, 1), (1, 2), (0, 2))
LOADS = {"below": 0.6, "near": 0.95, "above": 1.25}
ISL = 256
OSL = 48
SLOS = {"ttft": 1500.0, "itl": 100.0}
FIGURES = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms", "goodput")


def flags(executor: str) -> tuple[str, ...]:
    """Return the engine's flags, of profile and deployments alike."""
    return ("--model", str(MODEL), "--executor", executor, "--dtype", "float32", "--kv-blocks", "2000")


def options(url: str, rate: float, requests: int, seed: int) -> ServeOptions:
    return ServeOptions(url=url, isl=ISL, osl=OSL, request_rate=rate, requests=requests, warmup=2, seed=seed)


def workload(rate: float, requests: int, seed: int) -> Workload:
    """Return what the benchmark will send, with its times."""
    load = options("http://127.0.0.1:1", rate, requests, seed)
    planned = PromptSource(load).requests(0)
    times = arrival_times(load, planned, rate, 0) or []
    results = []
    name = 0
    for each, at in zip(planned, times, strict=True):
        blocks = -(-len(each.prompt) // BLOCK_TOKENS)
        results.append(TraceRequest(1e3 * at, len(each.prompt), each.output_tokens, tuple(range(name, name + blocks))))
        name += blocks
    return Workload.of("benchmark", results)


def predicted(outcome: Outcome) -> dict[str, float]:
    result = {}
    for name in FIGURES[:4]:
        metric, share, _ = name.split("_")
        result[name] = outcome.percentile(metric, float(share[1:]))
    return {**result, "goodput": outcome.goodput(SLOS)}


def measured(url: str, rate: float, requests: int, seed: int) -> dict[str, float]:
    """Put the load on a deployment; returns the same figures."""
    records: list[Record] = []
    Benchmark(options(url, rate, requests, seed), AccessConfig(), SLOS).run(records.append, lambda what, left: None)
    load = next(each for each in records if isinstance(each, ServeRecord))
    if load.failed or load.ttft_ms is None or load.itl_ms is None or load.goodput is None:
        raise SystemExit(f"requests failed: {load.errors}")
    return {
        "ttft_p50_ms": load.ttft_ms.median,
        "ttft_p90_ms": load.ttft_ms.p90,
        "itl_p50_ms": load.itl_ms.median,
        "itl_p90_ms": load.itl_ms.p90,
        "goodput": load.goodput,
    }


def write_file(path: Path, deployment: Deployment, load: Workload) -> None:
    """Write a deployment's file as ``baton plan --output`` does."""
    result = CandidateResult(deployment, bounds(deployment, load, SLOS), None, None, None, None)
    path.write_text(cluster_yaml(result, str(MODEL), SLOS, ["benchmarks/planner.py"]))


def profile_model(folder: Path, executor: str) -> Profile:
    """Run ``baton profile``, then measure what requests take beyond the engine on an idle 1P1D."""
    path = folder / "profile.json"
    if baton(["profile", *flags(executor), "--isl", str(ISL), "--repeats", "3", "--output", str(path)]):
        raise SystemExit("baton profile failed")
    profile = Profile.load(path)
    goal = Goal(slos=SLOS, attainment=0.9, gpus=2)
    engine = profile.engines[0]
    fleet = make_deployment(profile, goal, (1, 1), (engine, engine))
    write_file(folder / "1P1D.yaml", fleet, workload(1.0, 60, 0))
    with deployment(folder / "1P1D.yaml", *flags(executor)) as url:
        result = measure_overheads(
            url, AccessConfig(), profile, isl=ISL, step=lambda what, left: print(what, file=sys.stderr)
        )
    return dataclasses.replace(profile, overheads=result)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Predict, measure, and return everything."""
    kept = Path(args.profile) if args.profile else None
    if kept is not None and kept.exists():
        profile = Profile.load(kept)
    else:
        profile = profile_model(folder, args.executor)
        if kept is not None:
            profile.save(kept)
    cores = None if args.executor == "paced" else float(args.cores)
    goal = Goal(slos=SLOS, attainment=0.9, gpus=3, precision=0.02, cores=cores)
    engine = profile.engines[0]
    rows = []
    knees: dict[str, float] = {}
    for ratio in (each for each in RATIOS if f"{each[0]}P{each[1]}D" in args.ratios.split(",")):
        fleet = make_deployment(profile, goal, ratio, (engine, engine))
        search = Search(workload(1.0, 400, args.seed), goal)
        knee = search.goodput(fleet)
        if knee.rate is None:
            raise SystemExit(f"{fleet.ratio} keeps the targets at no rate")
        knees[fleet.ratio] = knee.rate
        print(f"{fleet.ratio}: goodput {knee.rate:.2f} requests/s; {limit_of(knee, goal)}", flush=True)
        write_file(folder / f"{fleet.ratio}.yaml", fleet, search.workload)
        with deployment(folder / f"{fleet.ratio}.yaml", *flags(args.executor)) as url:
            for number, (load, share) in enumerate(LOADS.items()):
                rate = share * knee.rate
                seed = args.seed + number
                requests = workload(rate, args.requests, seed)
                expected = predicted(Search(requests, goal).at(fleet, rate))
                result = measured(url, rate, args.requests, seed)
                errors = {
                    name: round(expected[name] / result[name] - 1, 4) if result[name] else None for name in FIGURES
                }
                rows.append(
                    {"ratio": fleet.ratio, "load": load, "rate": round(rate, 3), "instances": sum(ratio),
                     "predicted": {k: round(v, 2) for k, v in expected.items()},
                     "measured": {k: round(v, 2) for k, v in result.items()}, "error": errors}
                )  # fmt: skip
                print_row(rows[-1])
    return {"executor": args.executor, "isl": ISL, "osl": OSL, "slo_ms": SLOS, "requests": args.requests,
            "machine": machine_facts(), "overheads": dataclasses.asdict(profile.overheads),
            "knees": {name: round(rate, 3) for name, rate in knees.items()}, "rows": rows}  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    """Print a row: of each figure what was predicted and what was measured."""
    cells = (f"{row['predicted'][name]:>9.1f} {row['measured'][name]:>9.1f}" for name in FIGURES)
    print(
        f"{row['ratio']:>5} {row['load']:>6} {row['rate']:>6.2f}" + "".join(f"{cell:>22}" for cell in cells), flush=True
    )


def judge(document: dict[str, Any]) -> dict[str, Any]:
    """Return the median error, and which ratio is best by prediction and by measurement."""
    errors = [abs(error) for row in document["rows"] for error in row["error"].values() if error is not None]
    by = {
        figure: statistics.median(
            abs(row["error"][figure]) for row in document["rows"] if row["error"][figure] is not None
        )
        for figure in FIGURES
    }
    best = {}
    for kind in ("predicted", "measured"):
        for name, share in (("goodput", lambda row: 1), ("goodput per instance", lambda row: row["instances"])):
            for where, loads in (("", tuple(LOADS)), (" near the knee", ("near",))):
                goodputs = {row["ratio"]: 0.0 for row in document["rows"]}
                for row in (each for each in document["rows"] if each["load"] in loads):
                    goodputs[row["ratio"]] = max(goodputs[row["ratio"]], row[kind]["goodput"] / share(row))
                best[f"{kind} {name}{where}"] = max(goodputs, key=lambda ratio: goodputs[ratio])
    return {
        "median_error": round(statistics.median(errors), 4),
        "median_error_by_figure": {name: round(error, 4) for name, error in by.items()},
        "best": best,
    }


def main() -> int:
    """Compare; returns 1 if the predictions were wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("paced", "auto"), default="paced", help="steps (default: paced)")
    names = ",".join(f"{x}P{y}D" for x, y in RATIOS)
    parser.add_argument(
        "--ratios", default=names, help=f"to measure (default: {names}); --write keeps the others' rows"
    )
    parser.add_argument("--profile", default="", help="keep the profile in this file, and use it if it is there")
    parser.add_argument("--requests", type=int, default=80, help="per run (default: 80)")
    parser.add_argument("--cores", type=float, default=os.cpu_count(), help="of this machine, for --executor auto")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals (default: 1)")
    parser.add_argument("--within", type=float, default=0.25, help="largest median error (default: 0.25)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    print(" " * 20 + "".join(f"{name + ' pred. meas.':>22}" for name in FIGURES))
    with paced_executors(), tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    if args.write and RESULT.exists():
        before = json.loads(RESULT.read_text())
        now = {row["ratio"] for row in result["rows"]}
        result["rows"] += [row for row in before["rows"] if row["ratio"] not in now]
        result["knees"] = before["knees"] | result["knees"]
    result |= judge(result)
    print(json.dumps({name: result[name] for name in ("median_error", "median_error_by_figure", "best")}, indent=1))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    best = result["best"]
    right = best["predicted goodput"] == best["measured goodput"]
    return int(result["median_error"] > args.within or not right)


if __name__ == "__main__":
    sys.exit(main())
