"""``baton bench``: measures what a deployment depends on. ``baton bench kv``: KV transfer.

Services bring benchmarks of their own by entry points of the group ``baton.benchmarks``: functions that declare a
command.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points

GROUP = "baton.benchmarks"
EXIT_CODES = """exit status:
  0  everything asked for was measured, and every byte was right
  1  a transfer failed, or a block was not what it should be
  2  it cannot run as asked: a flag, too little memory, a pipe named with --pipe that does not work here
  3  a pipe was slower than --require-gbps at the largest size
  130  interrupted
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    parser = commands.add_parser("bench", help="measure KV transfer, replay traces against the router's policies")
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    add_kv_parser(benches)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            declare = point.load()
        except (ImportError, AttributeError) as error:
            print(f"baton: the benchmark {point.name} cannot be imported: {error}", file=sys.stderr)
            continue
        declare(benches)


def add_kv_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``kv``."""
    parser = commands.add_parser(
        "kv",
        help="KV transfer over each pipe, against the machine's limits",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to move")
    what.add_argument("--model", default="", help="model directory whose config.json tells the KV's geometry")
    what.add_argument("--geometry", default="", help="a known model's geometry (default: llama-8b)")
    what.add_argument("--isl", default="4096", help="prompt tokens: 4096, 128,1024 or 128:131072 (doubling)")
    what.add_argument("--block-size", type=int, default=16, help="tokens per block of the source")
    what.add_argument("--dst-block-size", type=int, default=None, help="tokens per block of the target (default: same)")
    what.add_argument("--kv-dtype", default="bfloat16", help="dtype of the KV")
    what.add_argument(
        "--dst-kv-dtype", default=None, help="dtype of the target, which converts what it reads (default: same)"
    )
    for side, name in (("src", "source"), ("dst", "target")):
        what.add_argument(f"--{side}-tp", type=int, default=1, help=f"tensor-parallel ranks of the {name}")
        what.add_argument(f"--{side}-pp", type=int, default=1, help=f"pipeline stages of the {name}")
    what.add_argument("--bytes", type=int, default=None, help="move so many bytes instead of a model's KV")
    what.add_argument("--descriptors", type=int, default=1, help="cut --bytes into so many blocks, in random order")
    how = parser.add_argument_group("how")
    how.add_argument("--pipe", default=None, help="pipes to compare: shm,tcp,nixl,gloo (default: those that work)")
    how.add_argument("--streams", default="1,4", help="TCP connections per transfer, one measurement each")
    how.add_argument("--pattern", default="1-1", help="1-1, N-1 (incast), 1-N or NxM; every flow moves the whole size")
    how.add_argument("--n", type=int, default=2, help="sources of N-1 and NxM")
    how.add_argument("--m", type=int, default=2, help="targets of 1-N and NxM")
    how.add_argument("--warmup", type=int, default=1, help="rounds before those that count")
    how.add_argument("--repeat", type=int, default=7, help="rounds that count")
    how.add_argument("--seed", type=int, default=0, help="seed of the bytes and of the blocks' order")
    how.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare every byte")
    how.add_argument(
        "--reference",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the standing comparison: 256 MiB contiguous and paged, small exchanges (pattern 1-1 only)",
    )
    hosts = parser.add_argument_group("two hosts")
    hosts.add_argument("--listen", default="", metavar="HOST:PORT", help="serve the sources of drivers that connect")
    hosts.add_argument("--connect", default="", metavar="HOST:PORT", help="take the sources from a host that listens")
    hosts.add_argument("--token-file", default="", help="file with the shared token; needed off loopback")
    out = parser.add_argument_group("questions and answers")
    out.add_argument("--prefill-tokens-per-s", type=float, default=None, help="does the link carry this prefill speed?")
    out.add_argument("--overlap", action="store_true", help="time exposed under simulated compute")
    out.add_argument("--chunk", type=int, default=512, help="tokens per prefill chunk, for --overlap")
    out.add_argument("--require-gbps", type=float, default=None, help="exit status 3 if a pipe is slower (GB/s)")
    out.add_argument("--json", action="store_true", help="JSON lines on standard output instead of tables")
    out.add_argument("--plot", default="", metavar="FILE", help="draw GB/s over size into a .png or .svg file")
    parser.set_defaults(run=run_kv)


def run_kv(args: argparse.Namespace) -> int:
    """Run the benchmark; returns the exit status, see ``EXIT_CODES``."""
    # Imported here: other commands need none of it.
    from baton.bench.core.report import guarded
    from baton.bench.kv.command import run

    return guarded("kv", lambda: run(args))
