"""``baton bench store``: its flags and what it does."""

from __future__ import annotations

import argparse
import shlex
import sys

_EPILOG = """exit status:
  0  everything asked for was measured, and every byte was right
  1  a request failed, or a block was not what it should be
  2  it cannot run as asked: a flag, too little memory or disk
  3  a ratio was below --require-dram, --require-disk or --require-redis
  130  interrupted
"""
FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``store``."""
    parser = benches.add_parser(
        "store",
        help="a KV store's tiers beside memcpy, plain reads and Redis; its eviction policies on a trace",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to move")
    what.add_argument("--geometry", default="llama-8b,llama-1b,baton-tiny", help="known models whose blocks to take")
    what.add_argument("--model", default="", help="model directory whose config.json tells the KV's geometry instead")
    what.add_argument("--block-size", type=int, default=16, help="tokens per block")
    what.add_argument("--kv-dtype", default="bfloat16", help="dtype of the KV")
    what.add_argument("--request-bytes", type=int, default=32 << 20, help="of a request, cut into blocks")
    what.add_argument("--total-bytes", type=int, default=1 << 30, help="that a store holds while it is read")
    how = parser.add_argument_group("how")
    how.add_argument("--tier", default="shm,tcp,disk", help="memory over shm, memory over tcp, disk")
    how.add_argument("--op", default="put,get,contains", help="operations")
    how.add_argument("--clients", default="1,4,16", help="processes that ask at the same time, up to 64")
    how.add_argument("--hits", default="100,50", help="percent of the chains asked for that are there")
    how.add_argument("--dir", default="/var/tmp", help="folder on the file system to measure")
    how.add_argument("--disk-readers", type=int, default=4, help="threads that read, of the store and of plain reads")
    how.add_argument("--redis", action=argparse.BooleanOptionalAction, default=True, help="Redis in the same run")
    how.add_argument("--warmup", type=int, default=1, help="rounds before those that count")
    how.add_argument("--repeat", type=int, default=5, help="rounds that count")
    how.add_argument("--seconds", type=float, default=0.4, help="of each turn in a round")
    how.add_argument("--seed", type=int, default=0, help="of names and bytes")
    trace = parser.add_argument_group("eviction policies on a trace, instead of all that")
    trace.add_argument("--trace", default="", metavar="FILE", help="JSON lines with hash_ids, as Mooncake's")
    trace.add_argument("--limit", type=int, default=None, help="requests of it at most")
    trace.add_argument("--blocks", default="10000,30000,100000", help="sizes of the memory, in blocks of the trace")
    trace.add_argument("--policy", default="lru,s3fifo,belady", help="lru, s3fifo, s3fifo-paper, belady (the bound)")
    out = parser.add_argument_group("answers")
    out.add_argument("--require-dram", type=float, default=None, help="exit status 3 below this share of memcpy")
    out.add_argument("--require-disk", type=float, default=None, help="exit status 3 below this share of plain reads")
    out.add_argument("--require-redis", type=float, default=None, help="exit status 3 below so many times Redis' GET")
    out.add_argument("--json", action="store_true", help="JSON lines (of a trace: one object) instead of tables")
    out.add_argument("--plot", default="", metavar="FILE", help="draw GB/s over clients into a .png or .svg file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file that cannot work.
        BatonError: A client or a server ended.
    """
    return _replay(args) if args.trace else _measure(args)


def _replay(args: argparse.Namespace) -> int:
    # Imported here, as in what follows: other commands need none of it.
    from baton_kvstore.bench.replay import replay_all

    return replay_all(args, shlex.join(["baton", *sys.argv[1:]]), FILE_WIDTH)


def _measure(args: argparse.Namespace) -> int:
    from rich.console import Console

    from baton.bench.core.report import Report, run_and_show
    from baton_kvstore.bench.driver import Driver
    from baton_kvstore.bench.plan import Options
    from baton_kvstore.bench.records import draw, print_tables

    options = Options.from_args(args)

    def measure(report: Report) -> int:
        with Console(stderr=True).status("starting") as status:
            return Driver(options, report, status.update).run()

    return run_and_show(args, measure, print_tables, draw, FILE_WIDTH)
