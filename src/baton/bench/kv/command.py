"""``baton bench kv``: its flags, one side or the other, and progress while it measures."""

from __future__ import annotations

import argparse
import logging
import sys

_EPILOG = """exit status:
  0  everything asked for was measured, and every byte was right
  1  a transfer failed, or a block was not what it should be
  2  it cannot run as asked: a flag, too little memory, a pipe named with --pipe that does not work here
  3  a pipe was slower than --require-gbps at the largest size
  130  interrupted
"""
FILE_WIDTH = 132
"""Columns of tables that go to a file or a pipe."""


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``kv``."""
    parser = benches.add_parser(
        "kv",
        help="KV transfer over each pipe, against the machine's limits",
        epilog=_EPILOG,
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
    how.add_argument(
        "--pipe",
        default=None,
        help="pipes to compare: shm,tcp,nixl,gloo, and cuda_ipc with --memory (default: those that work)",
    )
    how.add_argument(
        "--memory",
        default="host",
        help="where blocks lie: host; cuda, cuda:1 or cuda:0,cuda:1 (sources, targets): from device to device, to the "
        "host and from it; interpret: memory that stands in for a device's (TRITON_INTERPRET=1)",
    )
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Listen, or measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag that cannot work.
        BatonError: An agent ended, or the other host is out of reach.
    """
    return _listen(args) if args.listen else _measure(args)


def _measure(args: argparse.Namespace) -> int:
    # Imported here, as in what follows: other commands need none of it.
    from baton.bench.core.progress import progress
    from baton.bench.core.report import Report, run_and_show
    from baton.bench.kv.driver import Driver
    from baton.bench.kv.plan import Options
    from baton.bench.kv.records import draw, print_tables

    options = Options.from_args(args)

    def measure(report: Report) -> int:
        with progress() as step:
            return Driver(options, report, step).run()

    return run_and_show(args, measure, print_tables, draw, FILE_WIDTH)


def _listen(args: argparse.Namespace) -> int:
    from baton.bench.core.agents import Listener
    from baton.bench.kv.driver import AGENT_MODULE
    from baton.errors import ConfigError, PipeClosedError
    from baton.kv_transfer.protocol.connect import split_address
    from baton.rpc.service_token import read_token

    if args.connect:
        raise ConfigError("give --listen on one host and --connect on the other", field="listen")
    try:
        host, port = split_address(args.listen)
    except PipeClosedError as error:
        raise ConfigError(f"--listen: {error.message}", field="listen") from error
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listener = Listener(host, port, read_token(args.token_file), args.token_file, AGENT_MODULE)
    try:
        sys.stderr.write(f"listening on {listener.address}; Ctrl-C ends\n")
        sys.stderr.flush()
        listener.serve()
    finally:
        listener.close()
    return 0
