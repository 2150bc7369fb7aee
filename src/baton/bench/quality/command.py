"""``baton bench quality``: its flags, and what it does with them."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.demo_model import default_model
from baton.config.flags import ENV_PREFIX
from baton.errors import ConfigError

_EPILOG = """what is measured:
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
FILE_WIDTH = 150
"""Columns of tables that go to a file or a pipe."""


def add_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``quality``."""
    parser = benches.add_parser(
        "quality",
        help="perplexity, KL, speed and memory of quantized configurations beside a plain one",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag, the model or the text cannot work.
        InternalError: The engine failed.
    """
    from baton.bench.core.progress import progress
    from baton.bench.core.report import Report, run_and_show

    if find_spec("torch") is None:
        raise ConfigError("the engine needs torch: pip install 'baton-serve[engine]'", field="model")
    from baton.bench.quality.run import Options, draw, measure, print_tables

    configs = {"reference": changed(args, "")} | {text: changed(args, text) for text in args.config or ()}
    options = Options(args.text, args.tokens, args.window, args.isl, args.batch_size, args.steps, args.clock)

    def measured(report: Report) -> int:
        with progress() as step:
            return measure(configs, options, report, step)

    return run_and_show(args, measured, print_tables, draw, FILE_WIDTH)


def changed(args: argparse.Namespace, text: str) -> EngineConfig:
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
    config = from_flags(EngineConfig, given, env=env)
    if config.model == EngineConfig.model:
        given.model = default_model()
        config = from_flags(EngineConfig, given, env=env)
    return config
