"""``baton bench serve``: its flags, and what it does with them."""

from __future__ import annotations

import argparse

from baton.config import add_flags, from_flags
from baton.config.flags import AccessConfig

_EPILOG = """examples:
  baton bench serve --request-rate 4 --isl 512 --osl 128 --slo ttft:500ms --slo itl:50ms
  baton bench serve --max-concurrency 16 --dataset shared-prefix --json > a.json
  baton bench serve --dataset mooncake --file trace.jsonl --speedup 4 --plot serve.png
  baton bench serve --find-knee --slo ttft:500ms --slo itl:50ms
  baton bench serve --compare a.json b.json

exit status:
  0  every request succeeded
  1  a request failed
  2  it cannot run as asked: a flag, a file, no service at --url
  130  interrupted
"""
FILE_WIDTH = 120
"""Columns of tables that go to a file or a pipe."""


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``serve``."""
    # Imported here, as in what follows: other commands need none of it.
    from baton.bench.serve.options import ServeOptions

    parser = benches.add_parser(
        "serve",
        help="load on a running service: TTFT, TPOT, ITL, throughput, goodput, and the rate at which targets break",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, ServeOptions)
    slo = "target, e.g. ttft:500ms; metrics ttft, tpot, itl (95 %% of a request's gaps), e2e; may be repeated"
    parser.add_argument("--slo", action="append", default=[], metavar="METRIC:TIME", help=slo)
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output instead of the report")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the distributions, or the sweep (.png, .svg)")
    text = "compare two files that --json wrote, and measure nothing"
    parser.add_argument("--compare", nargs=2, default=None, metavar=("A", "B"), help=text)
    text = "a deployment's file: its slo section is --slo, where that is not given"
    parser.add_argument("--config", "-f", default="", metavar="FILE", help=text)
    add_flags(parser, AccessConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure or compare; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file that cannot work.
        BatonError: The service does not answer.
    """
    from pathlib import Path

    from baton.bench.core.progress import progress
    from baton.bench.core.report import Report, run_and_show, show_document
    from baton.bench.serve.compare import compare, print_comparison
    from baton.bench.serve.options import ServeOptions, parse_slos
    from baton.bench.serve.records import draw, print_report
    from baton.bench.serve.run import Benchmark
    from baton.config.cluster_file import ClusterFile

    if args.compare:
        show_document(compare(*map(Path, args.compare)), print_comparison, FILE_WIDTH, as_json=args.json)
        return 0
    options = from_flags(ServeOptions, args, env={})
    access = from_flags(AccessConfig, args)
    slos = parse_slos(args.slo) or (ClusterFile(args.config, {}).slos() if args.config else {})
    benchmark = Benchmark(options, access, slos)

    def measure(report: Report) -> int:
        with progress() as step:
            return benchmark.run(report, step)

    return run_and_show(
        args, measure, print_report, lambda records, path: draw(records, benchmark.samples, path), FILE_WIDTH
    )
