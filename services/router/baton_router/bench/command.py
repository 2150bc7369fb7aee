"""``baton bench router``: its flags and what it does."""

from __future__ import annotations

import argparse
import shlex
import sys

_EPILOG = """exit status:
  0  every policy was replayed
  2  it cannot run as asked: a flag, a file, a policy that there is not
  3  a policy stayed below --require-hit-rate, or above --require-balance or --require-ttft
  130  interrupted

policies:
  all     Baton's own
  rivals  formulae that other routers have published: dynamo_cost, sglang_cache_aware, llmd_scorer, preble_e2,
          bounded_hashing

scenarios, each with the other flags as they are given:
  equal    as it is
  unequal  --slow: a quarter of the instances of each role, at a third of the speed
  bursts   --bursts 4
  bounded  --cache-blocks 1000
  many     64 instances of each role, and as many times faster arrivals as that is more
"""
FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``router``."""
    parser = benches.add_parser(
        "router",
        help="routing policies on a trace, with the router's own index and placement, on virtual time",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to replay")
    what.add_argument("--trace", default="", metavar="FILE", help="JSON lines as Mooncake publishes them")
    what.add_argument("--limit", type=int, default=None, help="requests of it at most")
    what.add_argument("--speedup", type=float, default=1.0, help="let requests arrive so many times faster")
    what.add_argument("--bursts", type=float, default=1.0, help="let each minute's requests arrive so much faster")
    what.add_argument("--generate", type=int, default=None, metavar="N", help="N requests with shared prefixes instead")
    what.add_argument("--save", default="", metavar="FILE", help="write the generated requests as a trace")
    made = parser.add_argument_group("what to generate")
    made.add_argument("--prefixes", type=int, default=1, help="system prompts; the k-th is chosen with weight 1/k")
    made.add_argument("--prefix-blocks", type=int, default=20, help="length of each, in blocks of 512 tokens")
    made.add_argument("--turns", type=float, default=1.0, help="mean turns of a conversation")
    made.add_argument("--turn-blocks", type=float, default=4.0, help="mean new blocks per turn")
    made.add_argument("--output-tokens", type=float, default=200.0, help="mean output")
    made.add_argument("--rate", type=float, default=5.0, help="requests per second")
    made.add_argument("--think-s", type=float, default=20.0, help="mean pause between two turns")
    how = parser.add_argument_group("how")
    how.add_argument("--instances", type=int, default=8, help="prefill instances")
    how.add_argument("--decode-instances", type=int, default=None, help="decode instances (default: as many)")
    how.add_argument("--policy", default="match_minus_load", help="policies to compare: a,b,c; all, rivals")
    how.add_argument("--scenarios", default="", help="replay in each of them: a,b,c, or all (see below)")
    how.add_argument("--beta", default="0.5", help="weights of load for match_minus_load, one run each")
    how.add_argument("--temperature", type=float, default=0.0, help="softmax temperature of match_minus_load")
    how.add_argument("--threshold", type=int, default=None, help="missing tokens below which decode prefills")
    how.add_argument("--max-inflight", type=int, default=64, help="requests a decode instance may have; 0: any number")
    how.add_argument("--patience-s", type=float, default=60.0, help="give up requests that waited so long in a queue")
    how.add_argument("--seed", type=int, default=0, help="of ties, draws and what is generated")
    add_hardware(parser.add_argument_group("simulated instances"))
    out = parser.add_argument_group("answers")
    out.add_argument("--json", action="store_true", help="one JSON object on standard output instead of a table")
    out.add_argument(
        "--plot",
        default="",
        metavar="FILE",
        help="draw the policies into a .png or .svg file (needs matplotlib)",
    )
    out.add_argument("--require-hit-rate", type=float, default=None, help="exit status 3 below this, in percent")
    out.add_argument("--require-balance", type=float, default=None, help="exit status 3 if load max/mean is above this")
    out.add_argument(
        "--require-ttft",
        type=float,
        default=None,
        metavar="RATIO",
        help="exit status 3 if the first policy's mean time to first token is above so many times the best one's",
    )
    parser.set_defaults(run=run)


def add_hardware(group: argparse._ArgumentGroup) -> None:
    """Declare how fast instances are."""
    group.add_argument("--prefill-tokens-per-s", type=float, default=8000.0, help="of a prefill instance")
    group.add_argument("--local-prefill-tokens-per-s", type=float, default=6000.0, help="of a decode instance")
    group.add_argument("--gb-per-s", type=float, default=12.5, help="that a pair's pipe carries")
    group.add_argument("--kv-bytes-per-token", type=int, default=131_072, help="that it has to")
    group.add_argument("--itl-ms", type=float, default=15.0, help="between two tokens of a sequence by itself")
    group.add_argument("--itl-per-sequence-ms", type=float, default=0.3, help="that each other sequence adds")
    group.add_argument("--slow", type=int, default=0, metavar="N", help="N instances of each role are slower")
    group.add_argument("--slow-factor", type=float, default=3.0, help="so many times")
    group.add_argument("--cache-blocks", type=int, default=0, help="blocks of 512 tokens an instance keeps; 0: all")


def run(args: argparse.Namespace) -> int:
    """Replay; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    from baton_router.bench.report import replay_all  # other commands need none of it

    return replay_all(args, shlex.join(["baton", *sys.argv[1:]]), FILE_WIDTH)
