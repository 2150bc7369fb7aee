"""The commands of this package: ``baton bench ...``, ``baton profile``, ``baton plan`` and ``baton tune``.

``baton`` finds :func:`add_parsers` by the entry point group ``baton.commands``. What a command runs is imported when it
runs: other commands start without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.demo_model import default_model
from baton.config.flags import ENV_PREFIX, AccessConfig
from baton.errors import ConfigError
from baton.terminal import progress
from baton_bench.report import (
    build_from,
    check_folder,
    check_plot,
    check_positive,
    check_ranges,
    numbers,
    result_console,
    run_and_show,
    show_document,
    words,
    write_file,
)
from baton_bench.serve.options import ServeOptions, parse_slos


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure KV transfer, replay traces against the router's policies")
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK", dest="benchmark")
    add_kv_parser(benches)
    add_serve_parser(benches)
    add_offline_parser(benches)
    add_quality_parser(benches)
    add_prefixes_parser(benches)
    add_router_parser(benches)
    add_store_parser(benches)
    add_profile_parser(commands)
    add_plan_parser(commands)
    add_tune_parser(commands)


def _add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add a command; ``text`` is its line in the list of commands, ``epilog`` ends its own help as it is written."""
    parser = commands.add_parser(name, help=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=run)
    return parser


def _require_torch(what: str, field: str = "model") -> None:
    if find_spec("torch") is None:
        raise ConfigError(f"{what} needs torch: pip install 'baton-serve[engine]'", field=field)


def _engine_config(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> EngineConfig:
    """Return the engine's configuration by flags and environment; its model is the demo's, unless one is named."""
    config = from_flags(EngineConfig, args, env=env)
    return config if config.model != EngineConfig.model else dataclasses.replace(config, model=default_model())


# --- kv ---

_KV_EPILOG = """exit status:
  0  everything asked for was measured, and every byte was right
  1  a transfer failed, or a block was not what it should be
  2  it cannot run as asked: a flag, too little memory, a pipe named with --pipe that does not work here
  3  a pipe was slower than --require-gbps at the largest size
  130  interrupted
"""


def add_kv_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(benches, "kv", run_kv, "KV transfer over each pipe, against the machine's limits", _KV_EPILOG)
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


def run_kv(args: argparse.Namespace) -> int:
    """Listen, or measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag that cannot work.
        BatonError: An agent ended, or the other host is out of reach.
    """
    return _serve_kv_sources(args) if args.listen else _measure_kv(args)


def _measure_kv(args: argparse.Namespace) -> int:
    from baton_bench.kv.driver import Driver
    from baton_bench.kv.plan import Options
    from baton_bench.kv.records import draw, print_tables

    options = Options.from_args(args)
    return run_and_show(args, lambda report, step: Driver(options, report, step).run(), print_tables, draw, width=132)


def _serve_kv_sources(args: argparse.Namespace) -> int:
    from baton.errors import PipeClosedError
    from baton.kv_transfer.streams import split_address
    from baton.rpc.service_token import read_token
    from baton_bench.agents import Listener
    from baton_bench.kv.driver import AGENT_MODULE

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


# --- serve ---

_SERVE_EPILOG = """examples:
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


def add_serve_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        benches,
        "serve",
        run_serve,
        "load on a running service: TTFT, TPOT, ITL, throughput, goodput, and the rate at which targets break",
        _SERVE_EPILOG,
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


def run_serve(args: argparse.Namespace) -> int:
    """Measure or compare; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file that cannot work.
        BatonError: The service does not answer.
    """
    from baton.config.cluster_file import ClusterFile
    from baton_bench.serve.records import compare, draw, print_comparison, print_report
    from baton_bench.serve.run import Benchmark

    if args.compare:
        show_document(compare(*map(Path, args.compare)), print_comparison, width=120, as_json=args.json)
        return 0
    options = from_flags(ServeOptions, args, env={})
    access = from_flags(AccessConfig, args)
    slos = parse_slos(args.slo) or (ClusterFile(args.config, {}).slos() if args.config else {})
    benchmark = Benchmark(options, access, slos)
    return run_and_show(
        args, benchmark.run, print_report, lambda records, path: draw(records, benchmark.samples, path), width=120
    )


# --- offline ---

_OFFLINE_EPILOG = """what is measured:
  latency     one batch of --batch-size prompts, --repeats times: seconds, TTFT, time per output token
  throughput  --requests prompts at once: requests and tokens per second

exit status:
  0  measured
  1  the engine failed
  2  it cannot run as asked: a flag, a model
  130  interrupted
"""
MODES = ("both", "latency", "throughput")


def add_offline_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        benches, "offline", run_offline, "latency and throughput of the engine, without a server", _OFFLINE_EPILOG
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


def run_offline(args: argparse.Namespace) -> int:
    """Measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or the model cannot work.
        InternalError: The engine failed.
    """
    _require_torch("the engine")
    from baton_bench.offline import Options, draw, measure, print_tables

    engine = _engine_config(args)
    options = build_from(Options, args)
    return run_and_show(args, partial(measure, engine, options), print_tables, draw, width=100)


# --- quality ---

_QUALITY_EPILOG = """what is measured:
  The first row is the reference: the model as the engine's flags say, plain as a rule. Each --config is one more row:
  fields of the engine that differ, such as --config "quantization=int4 quantized_activations=int8", or another file of
  the same model, --config model=model-q4_0.gguf. Each runs in a process of its own.

  perplexity  of the text, in windows of --window tokens
  KL, top-1   of the next token's distribution from the reference's, in nats per token; share of tokens after which
              both think the same token is the most likely one
  tokens/s    prefill of --isl tokens; decode of 1 and of --batch-size sequences after as many tokens
  weights     memory that the process took to load the model, libraries included (some 220 MiB)
  KV          bytes per token

exit status:
  0  measured
  1  the engine failed
  2  it cannot run as asked: a flag, a model, a text
  130  interrupted
"""


def add_quality_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        benches,
        "quality",
        run_quality,
        "perplexity, KL, speed and memory of quantized configurations beside a plain one",
        _QUALITY_EPILOG,
    )
    parser.add_argument(
        "--config", action="append", default=None, metavar="FIELDS", help="engine fields of one more row, as name=value"
    )
    parser.add_argument("--text", default="", metavar="FILE", help="text to read (default: one of Baton's own)")
    parser.add_argument("--tokens", type=int, default=1024, help="of that text, from its beginning (default: 1024)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a context (default: 512)")
    parser.add_argument("--isl", type=int, default=256, help="prompt tokens of the speeds (default: 256)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of the second decode (default: 8)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps that count, 0: no speeds (default: 16)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="seconds, or those of the CPU (default: wall)",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines on standard output instead of a table")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw KL over memory into a .png or .svg file")
    add_flags(parser, EngineConfig)


def run_quality(args: argparse.Namespace) -> int:
    """Measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag, the model or the text cannot work.
        InternalError: The engine failed.
    """
    _require_torch("the engine")
    from baton_bench.quality import Options, draw, measure, print_tables

    configs = {"reference": parse_row_config(args, "")} | {
        text: parse_row_config(args, text) for text in args.config or ()
    }
    options = build_from(Options, args)
    return run_and_show(args, partial(measure, configs, options), print_tables, draw, width=150)


def parse_row_config(args: argparse.Namespace, text: str) -> EngineConfig:
    """Return the engine's configuration with the fields that ``--config`` names.

    Raises:
        ConfigError: No such field, or a value that it cannot take.
    """
    given = argparse.Namespace(**vars(args))
    env = dict(os.environ)
    for part in text.split():
        name, sign, value = part.replace("-", "_", part.partition("=")[0].count("-")).partition("=")
        if not sign or name not in EngineConfig.__dataclass_fields__:
            raise ConfigError(f"--config {part!r} is no field of the engine and its value, name=value", field="config")
        if hasattr(given, name):
            delattr(given, name)
        env[ENV_PREFIX + name.upper()] = value
    return _engine_config(given, env)


# --- router ---

_ROUTER_EPILOG = """exit status:
  0  every policy was replayed
  2  it cannot run as asked: a flag, a file, a policy that there is not
  3  a policy stayed below --require-hit-rate, or above --require-balance or --require-ttft
  130  interrupted

policies:
  all     Baton's own
  rivals  formulae that other routers have published: dynamo_cost, dynamo_agentic, dynamo_lmetric, llmd_scorer,
          llmd_predicted, production_stack, sglang_cache_aware, aibrix_prefix_cache
  bound   what no policy can beat

scenarios, each with the other flags as they are given:
  equal      as it is
  unequal    --slow: a quarter of the instances of each role, at a third of the speed
  bursts     --bursts 4
  bounded    --cache-blocks 2000
  unbounded  --cache-blocks 0
  open       --open-loop, for traces that have delays
  many       64 instances of each role, and as many times faster arrivals as that is more
"""


def add_router_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        benches,
        "router",
        run_router,
        "routing policies on a trace, with the router's own index and placement, on virtual time",
        _ROUTER_EPILOG,
    )
    what = parser.add_argument_group("what to replay")
    what.add_argument("--trace", default="", metavar="FILE", help="a trace: Mooncake's, Azure's or LMCache's form")
    what.add_argument("--traces", default="", help="one table over several: files, servegen, shared_prefix; or all")
    what.add_argument("--trace-dir", default=".", metavar="DIR", help="folder whose traces --traces all reads")
    what.add_argument("--limit", type=int, default=None, help="requests of it at most")
    what.add_argument("--open-loop", action="store_true", help="requests do not wait for their session's last answer")
    what.add_argument("--speedup", type=float, default=1.0, help="let requests follow so many times faster")
    what.add_argument("--scale", type=float, default=1.0, help="share of prompts', answers' and blocks' lengths")
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
    how.add_argument("--policy", default="match_minus_load", help="policies to compare: a,b,c; all, rivals, bound")
    how.add_argument("--scenarios", default="", help="replay in each of them: a,b,c, or all (see below)")
    how.add_argument("--beta", default="0.5", help="weights of load for match_minus_load, one run each")
    how.add_argument("--temperature", type=float, default=0.0, help="softmax temperature of match_minus_load")
    how.add_argument("--threshold", type=int, default=None, help="missing tokens below which decode prefills")
    how.add_argument("--max-inflight", type=int, default=64, help="requests a decode instance may have; 0: any number")
    how.add_argument("--patience-s", type=float, default=60.0, help="give up requests that waited so long in a queue")
    how.add_argument("--seed", type=int, default=0, help="of ties, draws and what is generated")
    group = parser.add_argument_group("simulated instances")
    group.add_argument("--profile", default="", metavar="FILE", help="from baton profile; default: Llama 70B, 8 H200s")
    group.add_argument("--prefill-tokens-per-s", type=float, default=None, help="of a prefill instance")
    group.add_argument("--local-prefill-tokens-per-s", type=float, default=None, help="of a decode instance")
    group.add_argument("--gb-per-s", type=float, default=None, help="that a GPU's link carries")
    group.add_argument("--kv-bytes-per-token", type=int, default=None, help="that it has to")
    group.add_argument("--itl-ms", type=float, default=None, help="between two tokens of a sequence by itself")
    group.add_argument("--itl-per-sequence-ms", type=float, default=None, help="that each other sequence adds")
    group.add_argument("--slow", type=int, default=0, metavar="N", help="N instances of each role are slower")
    group.add_argument("--slow-factor", type=float, default=3.0, help="so many times")
    group.add_argument("--cache-blocks", type=int, default=None, help="blocks of 512 tokens of a pool; 0: any number")
    group.add_argument("--cores", type=float, default=None, help="processors that all share; default: one each")
    out = parser.add_argument_group("answers")
    out.add_argument(
        "--slo", action="append", default=[], metavar="METRIC:TIME", help="target of goodput: ttft:2s, itl:50ms, e2e:1s"
    )
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


def run_router(args: argparse.Namespace) -> int:
    """Replay; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    from baton_bench.router import replay_all

    return replay_all(args)


# --- prefixes ---


def add_prefixes_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser("prefixes", help="how many conversations of a data set begin like others")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="FILE",
        help="JSON lines with hash_ids (blocks), token_ids, prompt, messages or conversations (characters)",
    )
    parser.add_argument("--longer-than", default="1,2,4,8,16,32,64", help="prefix lengths, in the data set's unit")
    parser.add_argument("--seen", default="2,3,5,10", help="how many conversations must begin so")
    parser.add_argument("--limit", type=int, default=None, help="lines at most")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of a table")
    parser.set_defaults(run=run_prefixes)


def run_prefixes(args: argparse.Namespace) -> int:
    """Count shared prefixes; returns the exit status.

    Raises:
        ConfigError: A flag or a file cannot work.
    """
    from baton_bench.prefixes import count_prefixes

    return count_prefixes(args)


# --- store ---

_STORE_EPILOG = """exit status:
  0  everything asked for was measured, and every byte was right
  1  a request failed, or a block was not what it should be
  2  it cannot run as asked: a flag, too little memory or disk
  3  a ratio was below --require-dram, --require-disk or --require-redis
  130  interrupted
"""


def add_store_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        benches,
        "store",
        run_store,
        "a KV store's tiers beside memcpy, plain reads and Redis; its eviction policies on a trace",
        _STORE_EPILOG,
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
    trace.add_argument("--trace", default="", metavar="FILE,...", help="traces as of baton bench router, or generated")
    trace.add_argument("--limit", type=int, default=None, help="requests of each at most")
    trace.add_argument("--blocks", default="5%,15%,30%", help="sizes of the memory, in blocks or %% of a trace's")
    trace.add_argument(
        "--policy", default="pool,session,belady", help="lru, s3fifo, s3fifo-paper, pool, session, belady"
    )
    out = parser.add_argument_group("answers")
    out.add_argument("--require-dram", type=float, default=None, help="exit status 3 below this share of memcpy")
    out.add_argument("--require-disk", type=float, default=None, help="exit status 3 below this share of plain reads")
    out.add_argument("--require-redis", type=float, default=None, help="exit status 3 below so many times Redis' GET")
    out.add_argument("--json", action="store_true", help="JSON lines (of a trace: one object) instead of tables")
    out.add_argument("--plot", default="", metavar="FILE", help="draw GB/s over clients into a .png or .svg file")


def run_store(args: argparse.Namespace) -> int:
    """Measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file that cannot work.
        BatonError: A client or a server ended.
    """
    if args.trace:
        from baton_bench.store.replay import replay_all

        return replay_all(args)
    from baton_bench.store.driver import Driver
    from baton_bench.store.plan import Options
    from baton_bench.store.records import draw, print_tables

    options = Options.from_args(args)
    return run_and_show(args, lambda report, step: Driver(options, report, step).run(), print_tables, draw, width=160)


# --- planner ---

if TYPE_CHECKING:
    from baton_bench.planner.plan import PlanOptions
    from baton_bench.simulator.profile import Profile

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


def add_profile_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        commands, "profile", run_profile, "measure the engine on this hardware, for baton plan", _PROFILE_EPILOG
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


def run_profile(args: argparse.Namespace) -> int:
    """Measure or derive, and write the file; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag, a model or a pipe cannot work.
        BatonError: Something failed.
    """
    from baton_bench.planner.plan import print_profile

    check_folder(args.output, "output")
    _require_torch("the engine")
    if args.roofline:
        profile = _roofline_profile(args)
    else:
        from baton_bench.planner.profiling import measure_overheads, profile_engine

        check_ranges(args, {"isl": (16, 1 << 20), "repeats": (1, 1000)})
        engine = _engine_config(args)
        with progress() as step:
            profile = profile_engine(engine, isl=args.isl, repeats=args.repeats, pipe=args.pipe, step=step)
            if args.url:
                access = from_flags(AccessConfig, args)
                result = measure_overheads(args.url, access, profile, isl=args.isl, step=step)
                profile = dataclasses.replace(profile, overheads=result)
    profile.save(Path(args.output))
    print_profile(profile, result_console(150))
    return 0


def _roofline_profile(args: argparse.Namespace) -> Profile:
    from baton_bench.planner.profiling import known_shape, roofline_profile

    for name in ("params", "width", "heads"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--roofline needs --{name}", field=name)
    if not args.geometry:
        raise ConfigError("--roofline needs --geometry", field="geometry")
    shape = known_shape(args.geometry, args.params, args.width, args.heads)
    return roofline_profile(args.roofline, shape, numbers(args.tp_sizes, "tp-sizes"))


def add_plan_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        commands,
        "plan",
        run_plan,
        "how many prefill and decode instances serve most requests within the targets",
        _PLAN_EPILOG,
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


def run_plan(args: argparse.Namespace) -> int:
    """Search and show; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file cannot work.
    """
    _require_torch("baton plan", "profile")  # the engine's own rules are simulated
    from baton_bench.planner.plan import cluster_yaml, draw, make_plan, print_plan

    check_folder(args.output, "output")
    if args.plot:
        check_plot(Path(args.plot))
    options = _plan_options(args)
    with progress() as step:
        plan = make_plan(options, step)
    if args.output and plan.winner is not None:
        profile = options.profile
        model = args.model or profile.model
        text = cluster_yaml(plan.winner, model, options.goal.slos, plan.headline(), device=profile.device)
        write_file(Path(args.output), text, "output")
    if args.plot:
        draw(plan, Path(args.plot))
    show_document(plan.document(), print_plan, width=150, as_json=args.json)
    return 0 if plan.succeeded else 3


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    """Check the flags.

    Raises:
        ConfigError: Names the flag.
    """
    from baton_bench.geometries import GEOMETRIES
    from baton_bench.planner.plan import PlanOptions
    from baton_bench.planner.search import Goal
    from baton_bench.planner.workload import from_lengths, from_trace
    from baton_bench.simulator.engine import Speculation
    from baton_bench.simulator.profile import Profile

    most = 10**7
    check_ranges(args, {"isl": (1, most), "osl": (1, most), "requests": (50, most), "gpus": (1, 4096),
                        "draft_tokens": (0, 64), "seed": (0, 2**32), "attainment": (0.01, 1.0),
                        "acceptance": (0.0, 1.0), "spread": (0.0, 0.99)})  # fmt: skip
    check_positive(args, "rate", "gb_per_s", "cores", "threads", "precision")
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
    if args.output and not args.model and profile.model in GEOMETRIES and not Path(profile.model).is_dir():
        text = f"the profile's {profile.model} is a shape, no checkpoint: --output needs --model"
        raise ConfigError(text, field="model")
    tps = numbers(args.tp_sizes, "tp-sizes") or tuple(sorted({engine.tp for engine in profile.engines}))
    pps = numbers(args.pp_sizes, "pp-sizes")
    if not pps or min(*tps, *pps) < 1:
        raise ConfigError("--tp-sizes and --pp-sizes take numbers from 1 on", field="tp_sizes")
    speculation = Speculation(args.draft_tokens, args.acceptance)
    goal = build_from(Goal, args, slos=slos, tps=tps, pps=pps, speculation=speculation)
    return PlanOptions(profile, workload, goal, args.rate, args.ratio, args.sensitivity, bool(args.plot))


# --- tune ---

_TUNE_EPILOG = """examples:
  baton tune -f cluster.yaml --request-rate 8 --slo ttft:500ms --slo itl:50ms --output tuned.yaml
  baton tune -f cluster.yaml --find-knee --tune ratio,max-num-seqs --slo ttft:500ms --trials 12

Trials are noted in --notes: what was interrupted goes on there.

exit status:
  0  measured
  1  the deployment cannot be measured
  2  it cannot run as asked: a flag, a file
  130  interrupted
"""
_FLAGS_WITHOUT_USE = frozenset({"url", "endpoint", "details"})
"""Of ``baton bench serve``: set here, or of no use here."""


def add_tune_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_parser(
        commands,
        "tune",
        run_tune,
        "find the best settings of a deployment under latency targets, by measuring it",
        _TUNE_EPILOG,
    )
    parser.add_argument("--config", "-f", required=True, metavar="FILE", help="the deployment's file")
    text = "settings to tune, in this order (default: ratio,max-num-seqs,max-num-batched-tokens,prefill-chunk)"
    parser.add_argument("--tune", default="ratio,max-num-seqs,max-num-batched-tokens,prefill-chunk", help=text)
    parser.add_argument("--trials", type=int, default=30, help="deployments to measure at most (default: 30)")
    parser.add_argument("--notes", default="tune.jsonl", metavar="FILE", help="trials (default: tune.jsonl)")
    parser.add_argument("--output", "-o", default="", metavar="FILE", help="write the best deployment's file")
    slo = "target, e.g. ttft:500ms (default: the file's slo section); metrics ttft, tpot, itl, e2e; may be repeated"
    parser.add_argument("--slo", action="append", default=[], metavar="METRIC:TIME", help=slo)
    add_flags(parser, ServeOptions, skip=_FLAGS_WITHOUT_USE)
    add_flags(parser, AccessConfig)


def run_tune(args: argparse.Namespace) -> int:
    """Tune; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file cannot work.
        BatonError: The deployment cannot be measured.
    """
    from baton.config.cluster_file import ClusterFile
    from baton.config.document import read_document
    from baton_bench.tuning import Notes, Trial, measure_with, read_settings, tune, with_settings

    check_ranges(args, {"trials": (1, 10_000)})
    file = ClusterFile(args.config, {})
    document: dict[str, Any] = read_document(Path(args.config)).plain()
    options = from_flags(ServeOptions, args, env={})
    access = from_flags(AccessConfig, args)
    slos = parse_slos(args.slo) or file.slos()
    if not slos:
        raise ConfigError("--slo is needed, or slo in the file", field="slo")
    if options.request_rate is None and not options.find_knee and options.arrival_kind != "trace":
        raise ConfigError("give --request-rate, or --find-knee to tune for the highest rate", field="request_rate")
    start = read_settings(document, words(args.tune))
    check_folder(args.output, "output")
    load = {name: value for name, value in dataclasses.asdict(options).items() if name != "api_key"}
    purpose = {"file": document, "load": load, "slo_ms": slos, "tune": list(start)}
    notes = Notes(Path(args.notes), purpose)
    if notes.trials:
        sys.stderr.write(f"going on after {len(notes.trials)} trials in {args.notes}\n")

    def print_trial(trial: Trial) -> None:
        values = ", ".join(f"{name} {value}" for name, value in trial.settings.items())
        sys.stderr.write(f"{trial.goodput:.3f} requests/s  {values}  {trial.error}\n")

    measure = measure_with(document, options, access, slos)
    best = tune(start, measure, notes, most_trials=args.trials, on_trial=print_trial)
    first = notes.find(start)
    gain = best.goodput / first.goodput - 1 if first is not None and first.goodput else 0.0
    for name, value in best.settings.items():
        sys.stdout.write(f"{name}: {value}" + (f" (was {start[name]})" if value != start[name] else "") + "\n")
    sys.stdout.write(f"goodput: {best.goodput:.3f} requests/s ({gain:+.0%}), {len(notes.trials)} trials\n")
    if args.output:
        write_file(Path(args.output), with_settings(document, best.settings), "output")
    return 0
