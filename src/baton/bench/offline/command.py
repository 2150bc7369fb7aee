"""``baton bench offline``: its flags, and what it does with them."""

from __future__ import annotations

import argparse

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.demo_model import default_model
from baton.errors import ConfigError

_EPILOG = """what is measured:
  latency     one batch of --batch-size prompts, --repeats times: seconds, TTFT, time per output token
  throughput  --requests prompts at once: requests and tokens per second

exit status:
  0  measured
  1  the engine failed
  2  it cannot run as asked: a flag, a model
  130  interrupted
"""
FILE_WIDTH = 100
"""Columns of tables that go to a file or a pipe."""
MODES = ("both", "latency", "throughput")


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``offline``."""
    parser = benches.add_parser(
        "offline",
        help="latency and throughput of the engine, without a server",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mode", choices=MODES, default="both", help="what to measure (default: both)")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens (default: 512)")
    parser.add_argument("--osl", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="latency: prompts at once (default: 8)")
    parser.add_argument("--repeats", type=int, default=5, help="latency: batches that count (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, help="batches before those that count (default: 1)")
    parser.add_argument("--requests", type=int, default=64, help="throughput: prompts (default: 64)")
    parser.add_argument("--prompt-seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output instead of a table")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the latencies into a .png or .svg file")
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or the model cannot work.
        InternalError: The engine failed.
    """
    import dataclasses
    from importlib.util import find_spec

    from baton.bench.core.progress import progress
    from baton.bench.core.report import Report, run_and_show

    if find_spec("torch") is None:
        raise ConfigError("the engine needs torch: pip install 'baton-serve[engine]'", field="model")
    from baton.bench.offline.measure import Options, draw, measure, print_tables

    engine = from_flags(EngineConfig, args)
    if engine.model == EngineConfig.model:
        engine = dataclasses.replace(engine, model=default_model())
    options = Options(args.mode, args.isl, args.osl, args.batch_size, args.repeats, args.warmup, args.requests,
                      args.prompt_seed)  # fmt: skip

    def measured(report: Report) -> int:
        with progress() as step:
            return measure(engine, options, report, step)

    return run_and_show(args, measured, print_tables, draw, FILE_WIDTH)
