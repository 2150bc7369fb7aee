"""``baton quantize``: its flags and its output."""

from __future__ import annotations

import argparse
import resource
from importlib.util import find_spec

from baton.errors import ConfigError

_SCHEMES = ("int8", "int4", "fp8", "nf4")
_EPILOG = """schemes:
  int8  8 bits, a scale per row
  int4  4 bits, a scale per --group columns
  fp8   e4m3, a scale per row
  nf4   NormalFloat4, a scale per --group columns

int8, int4 and fp8 are written as compressed-tensors has them, nf4 as bitsandbytes. Embeddings, norms, the head and what
chooses experts stay as they are. In memory is one tensor at a time, with --calibration one layer.

exit status:
  0  written
  1  writing failed
  2  it cannot be done as asked: a flag, a model, a folder that exists
  130  interrupted
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``quantize`` command and its flags."""
    parser = commands.add_parser(
        "quantize",
        help="write a quantized copy of a checkpoint",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a plain checkpoint: a directory, or a hub name")
    parser.add_argument("out", metavar="OUT", help="folder to write, which must not exist")
    parser.add_argument("--scheme", choices=_SCHEMES, required=True, help="what weights of linear layers become")
    parser.add_argument("--group", type=int, help="int4, nf4: columns that share a scale (default: 64)")
    parser.add_argument(
        "--ignore", action="append", default=None, metavar="REGEX", help="modules that stay plain, too; may be repeated"
    )
    parser.add_argument(
        "--calibration",
        default="",
        metavar="FILE",
        help="a text as the model will read: scales lose least where its activations are large",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=8192, help="of that text, from its beginning (default: 8192)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantize; return the exit status, see ``--help``.

    Raises:
        ConfigError: A flag, the model or the folder cannot be used.
    """
    if find_spec("torch") is None:
        raise ConfigError("this needs torch: pip install 'baton-serve[engine]'", field="model")
    from baton.engine.models.loader import quiet_transformers
    from baton.quantize.run import QuantizeOptions, quantize_checkpoint
    from baton.terminal import format_bytes, progress

    options = QuantizeOptions(
        args.model,
        args.out,
        args.scheme,
        args.group,
        tuple(args.ignore or ()),
        args.calibration,
        args.calibration_tokens,
    )
    with progress() as step, quiet_transformers():
        written = quantize_checkpoint(options, step)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = format_bytes(written.bytes_before)
    after = format_bytes(written.bytes_after)
    print(f"{args.out}: {written.weights} weights in {args.scheme}, {before} -> {after}")
    if args.calibration:
        print(f"scales folded into {written.folded} norms and projections")
    print(f"peak memory of this process: {format_bytes(peak)}")
    return 0
