"""``baton profile`` and ``baton plan``: their flags, and what they do with them."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.flags import AccessConfig
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.planner.plan import PlanOptions
    from baton.planner.profile import Profile
    from baton.planner.simulator.routing import MakeRouting

_PROFILE_EPILOG = """examples:
  baton profile --model Qwen/Qwen3-0.6B --output profile.json
  baton profile --pipe tcp --url http://127.0.0.1:8000 --output profile.json
  baton profile --roofline h100-sxm --geometry llama-70b --params 70.6e9 --width 8192 --heads 64 --tp-sizes 2,4,8 \\
      --output llama-70b-h100.json

exit status:
  0  the file is written
  1  the engine, a transfer or the deployment failed
  2  it cannot run as asked: a flag, a model, a pipe
  130  interrupted
"""
_PLAN_EPILOG = """examples:
  baton plan --profile profile.json --trace trace.jsonl --slo ttft:2s --slo itl:50ms --gpus 16 --output cluster.yaml
  baton plan --profile profile.json --isl 2048 --osl 256 --rate 12 --slo ttft:500ms --slo itl:30ms --gpus 8
  baton plan --profile profile.json --isl 2048 --osl 256 --rate 12 --slo ttft:500ms --ratio 2P1D --gpus 3

exit status:
  0  there is a deployment that keeps the targets (at --rate, where that is given)
  2  it cannot run as asked: a flag, a file
  3  there is none
  130  interrupted
"""
FILE_WIDTH = 150
"""Columns of tables that go to a file or a pipe."""


def add_profile_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``profile``."""
    parser = commands.add_parser(
        "profile",
        help="measure the engine on this hardware, for baton plan",
        epilog=_PROFILE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="where the profile goes (JSON)")
    parser.add_argument("--isl", type=int, default=512, help="longest prompt measured, in tokens (default: 512)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement; medians count (default: 5)")
    parser.add_argument("--pipe", default="shm", help="pipe whose transfers are measured; empty: none (default: shm)")
    text = "an idle deployment of this engine, with a prefill instance: what requests take beyond the engine"
    parser.add_argument("--url", default="", help=text)
    derived = parser.add_argument_group("without hardware")
    text = "derive a profile from a GPU's published figures: h100-sxm, h200-sxm, a100-sxm"
    derived.add_argument("--roofline", default="", metavar="GPU", help=text)
    derived.add_argument("--geometry", default="", help="KV geometry, as of baton bench kv, or a model directory")
    derived.add_argument("--params", type=float, default=0.0, help="weights of the model, e.g. 70.6e9")
    derived.add_argument("--width", type=int, default=0, help="hidden size of the model")
    derived.add_argument("--heads", type=int, default=0, help="query heads of the model")
    derived.add_argument("--tp-sizes", default="1,2,4,8", help="tensor-parallel sizes (default: 1,2,4,8)")
    add_flags(parser, EngineConfig)
    add_flags(parser, AccessConfig)
    parser.set_defaults(run=run_profile)


def run_profile(args: argparse.Namespace) -> int:
    """Measure or derive, and write the file; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag, a model or a pipe cannot work.
        BatonError: Something failed.
    """
    import dataclasses
    from importlib.util import find_spec

    from baton.bench.core.progress import progress
    from baton.bench.core.report import check_ranges, result_console
    from baton.config.demo_model import default_model
    from baton.planner.report import print_profile

    output = Path(args.output)
    if not output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {output.parent}", field="output")
    if find_spec("torch") is None:
        raise ConfigError("the engine needs torch: pip install 'baton-serve[engine]'", field="model")
    if args.roofline:
        profile = _derived(args)
    else:
        from baton.planner.profiling.measure import profile_engine

        check_ranges(args, {"isl": (16, 1 << 20), "repeats": (1, 1000)})
        engine = from_flags(EngineConfig, args)
        if engine.model == EngineConfig.model:
            engine = dataclasses.replace(engine, model=default_model())
        with progress() as step:
            profile = profile_engine(engine, isl=args.isl, repeats=args.repeats, pipe=args.pipe, step=step)
            if args.url:
                from baton.planner.profiling.overheads import measure_overheads

                access = from_flags(AccessConfig, args)
                found = measure_overheads(args.url, access, profile, make_router(), isl=args.isl, step=step)
                profile = dataclasses.replace(profile, overheads=found)
    profile.save(output)
    print_profile(profile, result_console(FILE_WIDTH))
    return 0


def make_router() -> MakeRouting:
    """Return the router's own code on virtual time.

    Services are above this package: as their processes are started by the names of modules, so is this read.
    """
    found: MakeRouting = importlib.import_module("baton_router.bench.planning").VirtualRouter
    return found


def _derived(args: argparse.Namespace) -> Profile:
    from baton.bench.core.report import numbers
    from baton.planner.profiling.roofline import Efficiency, known_shape, roofline_profile

    for name in ("params", "width", "heads"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--roofline needs --{name}", field=name)
    if not args.geometry:
        raise ConfigError("--roofline needs --geometry", field="geometry")
    shape = known_shape(args.geometry, args.params, args.width, args.heads, "bfloat16")
    return roofline_profile(args.roofline, shape, numbers(args.tp_sizes, "tp-sizes"), Efficiency())


def add_plan_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``plan``."""
    parser = commands.add_parser(
        "plan",
        help="how many prefill and decode instances serve most requests within the targets",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", required=True, metavar="FILE", help="what baton profile wrote")
    parser.add_argument("--model", default="", help="model in cluster.yaml (default: the profile's)")
    what = parser.add_argument_group("workload")
    what.add_argument("--trace", default="", metavar="FILE", help="JSON lines as Mooncake publishes them")
    what.add_argument("--isl", type=int, default=None, help="mean prompt tokens, without --trace")
    what.add_argument("--osl", type=int, default=None, help="mean output tokens, without --trace")
    what.add_argument("--spread", type=float, default=0.0, help="lengths from (1 - X) to (1 + X) times the mean")
    what.add_argument("--rate", type=float, default=None, help="requests per second that are to be served")
    what.add_argument("--requests", type=int, default=1000, help="simulated per rate (default: 1000)")
    goal = parser.add_argument_group("goal")
    text = "target, e.g. ttft:500ms; metrics ttft, tpot, itl (95 %% of a request's gaps), e2e; may be repeated"
    goal.add_argument("--slo", action="append", default=[], metavar="METRIC:TIME", help=text)
    goal.add_argument("--attainment", type=float, default=0.9, help="share of requests that keep them (default: 0.9)")
    goal.add_argument("--gpus", type=int, required=True, help="GPUs (or other devices) to use")
    space = parser.add_argument_group("what is tried")
    space.add_argument("--ratio", default="", metavar="xPyD", help="this one alone")
    space.add_argument("--tp-sizes", default="", help="tensor-parallel sizes, e.g. 1,2,4 (default: the profile's)")
    space.add_argument("--pp-sizes", default="1", help="pipeline sizes (default: 1)")
    space.add_argument("--policy", default="match_minus_load", help="routing policy (default: match_minus_load)")
    space.add_argument("--gb-per-s", type=float, default=None, help="of a GPU's link (default: the profile's)")
    space.add_argument("--link-latency-ms", type=float, default=None, help="of a transfer (default: the profile's)")
    space.add_argument("--draft-tokens", type=int, default=0, help="drafted per step by speculative decoding")
    space.add_argument("--acceptance", type=float, default=0.0, help="chance that a drafted token is accepted")
    text = "processors of one machine that all instances share (default: each has its own)"
    space.add_argument("--cores", type=float, default=None, help=text)
    space.add_argument("--threads", type=float, default=1.0, help="of them that each instance keeps busy (default: 1)")
    space.add_argument("--precision", type=float, default=0.03, help="of a goodput, as a share of it (default: 0.03)")
    space.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and the router's choices")
    out = parser.add_argument_group("answers")
    out.add_argument("--output", "-o", default="", metavar="FILE", help="write the winner for baton up -f")
    out.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    out.add_argument("--plot", default="", metavar="FILE", help="draw into a .png or .svg file (needs matplotlib)")
    text = "what changes when lengths, speeds or links are otherwise"
    out.add_argument("--sensitivity", action=argparse.BooleanOptionalAction, default=True, help=text)
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Search and show; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file cannot work.
    """
    from importlib.util import find_spec

    from baton.bench.core.progress import progress
    from baton.bench.core.report import check_plot, show_document

    if find_spec("torch") is None:  # the engine's own rules are simulated
        raise ConfigError("baton plan needs torch: pip install 'baton-serve[engine]'", field="profile")
    from baton.planner.cluster import cluster_yaml, write_cluster
    from baton.planner.plan import make_plan
    from baton.planner.report import draw, print_plan

    for name in ("output", "plot"):
        path = Path(getattr(args, name))
        if getattr(args, name) and not path.parent.is_dir():
            raise ConfigError(f"--{name}: there is no folder {path.parent}", field=name)
    if args.plot:
        check_plot(Path(args.plot))
    options = _options(args)
    with progress() as step:
        plan = make_plan(options, make_router(), step)
    if args.output and plan.winner is not None:
        text = cluster_yaml(plan.winner, args.model or options.profile.model, options.goal.slos, plan.headline())
        write_cluster(Path(args.output), text)
    if args.plot:
        draw(plan, Path(args.plot))
    show_document(plan.document(), print_plan, FILE_WIDTH, as_json=args.json)
    return 0 if plan.succeeded else 3


def _options(args: argparse.Namespace) -> PlanOptions:
    """Check the flags.

    Raises:
        ConfigError: Names the flag.
    """
    import dataclasses

    from baton.bench.core.report import check_positive, check_ranges, numbers
    from baton.bench.serve.options import parse_slos
    from baton.planner.plan import PlanOptions
    from baton.planner.profile import Profile
    from baton.planner.search import Goal
    from baton.planner.simulator.sequences import Speculation
    from baton.planner.workload import from_lengths, from_trace

    most = 10**7
    check_ranges(args, {"isl": (1, most), "osl": (1, most), "requests": (50, most), "gpus": (1, 4096),
                        "draft_tokens": (0, 64), "seed": (0, 2**32)})  # fmt: skip
    check_positive(args, "rate", "gb_per_s", "cores", "threads", "precision")
    for name, low, high in (("attainment", 0.01, 1.0), ("acceptance", 0.0, 1.0), ("spread", 0.0, 0.99)):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name} must be between {low:g} and {high:g}", field=name)
    if bool(args.trace) == (args.isl is not None or args.osl is not None):
        raise ConfigError("give --trace FILE, or --isl and --osl", field="trace")
    if not args.trace and (args.isl is None or args.osl is None):
        raise ConfigError("--isl and --osl go together", field="isl")
    slos = parse_slos(args.slo)
    if not slos:
        raise ConfigError("--slo is needed: what counts as served, e.g. --slo ttft:500ms --slo itl:50ms", field="slo")
    profile = Profile.load(Path(args.profile))
    link = profile.link
    if args.gb_per_s is not None:
        link = dataclasses.replace(link, bytes_per_s=1e9 * args.gb_per_s)
    if args.link_latency_ms is not None:
        link = dataclasses.replace(link, latency_s=args.link_latency_ms / 1e3)
    profile = dataclasses.replace(profile, link=link)
    if args.trace:
        workload = from_trace(Path(args.trace), args.requests)
    else:
        workload = from_lengths(args.isl, args.osl, args.requests, spread=args.spread, seed=args.seed)
    tps = numbers(args.tp_sizes, "tp-sizes") or tuple(sorted({engine.tp for engine in profile.engines}))
    pps = numbers(args.pp_sizes, "pp-sizes")
    if not pps or min(*tps, *pps) < 1:
        raise ConfigError("--tp-sizes and --pp-sizes take numbers from 1 on", field="tp_sizes")
    goal = Goal(
        slos=slos,
        attainment=args.attainment,
        gpus=args.gpus,
        tps=tps,
        pps=pps,
        policy=args.policy,
        speculation=Speculation(args.draft_tokens, args.acceptance),
        cores=args.cores,
        threads=args.threads,
        precision=args.precision,
        seed=args.seed,
    )
    return PlanOptions(profile, workload, goal, args.rate, args.ratio, args.sensitivity, bool(args.plot))
