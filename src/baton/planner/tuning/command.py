"""``baton tune``: its flags, and what it does with them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from baton.bench.serve.options import ServeOptions, parse_slos
from baton.config import add_flags, from_flags
from baton.config.flags import AccessConfig
from baton.errors import ConfigError

_EPILOG = """examples:
  baton tune -f cluster.yaml --request-rate 8 --slo ttft:500ms --slo itl:50ms --output tuned.yaml
  baton tune -f cluster.yaml --find-knee --tune ratio,max-num-seqs --slo ttft:500ms --trials 12

Trials are noted in --notes: what was interrupted goes on there.

exit status:
  0  measured
  1  the deployment cannot be measured
  2  it cannot run as asked: a flag, a file
  130  interrupted
"""
_OWN = frozenset({"url", "endpoint", "details"})
"""Of ``baton bench serve``: set here, or of no use here."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``tune``."""
    parser = commands.add_parser(
        "tune",
        help="find the best settings of a deployment under latency targets, by measuring it",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", "-f", required=True, metavar="FILE", help="the deployment's file")
    text = "settings to tune, in this order (default: ratio,max-num-seqs,max-num-batched-tokens,prefill-chunk)"
    parser.add_argument("--tune", default="ratio,max-num-seqs,max-num-batched-tokens,prefill-chunk", help=text)
    parser.add_argument("--trials", type=int, default=30, help="deployments to measure at most (default: 30)")
    parser.add_argument("--notes", default="tune.jsonl", metavar="FILE", help="trials (default: tune.jsonl)")
    parser.add_argument("--output", "-o", default="", metavar="FILE", help="write the best deployment's file")
    slo = "target, e.g. ttft:500ms (default: the file's slo section); metrics ttft, tpot, itl, e2e; may be repeated"
    parser.add_argument("--slo", action="append", default=[], metavar="METRIC:TIME", help=slo)
    add_flags(parser, ServeOptions, skip=_OWN)
    add_flags(parser, AccessConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune; returns the exit status, see ``--help``.

    Raises:
        ConfigError: A flag or a file cannot work.
        BatonError: The deployment cannot be measured.
    """
    from baton.bench.core.report import check_ranges, words
    from baton.config.cluster_file import ClusterFile
    from baton.config.document import read_document
    from baton.planner.tuning.settings import read_settings, with_settings
    from baton.planner.tuning.trials import measure_with
    from baton.planner.tuning.tuner import Notes, Trial, tune

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
    if args.output and not Path(args.output).parent.is_dir():
        raise ConfigError(f"--output: there is no folder {Path(args.output).parent}", field="output")
    load = {name: value for name, value in dataclasses.asdict(options).items() if name != "api_key"}
    purpose = {"file": document, "load": load, "slo_ms": slos, "tune": list(start)}
    notes = Notes(Path(args.notes), purpose)
    if notes.trials:
        sys.stderr.write(f"going on after {len(notes.trials)} trials in {args.notes}\n")

    def told(trial: Trial) -> None:
        values = ", ".join(f"{name} {value}" for name, value in trial.settings.items())
        sys.stderr.write(f"{trial.goodput:.3f} requests/s  {values}  {trial.error}\n")

    measure = measure_with(document, options, access, slos)
    best = tune(start, measure, notes, most_trials=args.trials, told=told)
    first = notes.find(start)
    gain = best.goodput / first.goodput - 1 if first is not None and first.goodput else 0.0
    for name, value in best.settings.items():
        sys.stdout.write(f"{name}: {value}" + (f" (was {start[name]})" if value != start[name] else "") + "\n")
    sys.stdout.write(f"goodput: {best.goodput:.3f} requests/s ({gain:+.0%}), {len(notes.trials)} trials\n")
    if args.output:
        try:
            Path(args.output).write_text(with_settings(document, best.settings), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.output}: {error.strerror}", field="output") from error
    return 0
