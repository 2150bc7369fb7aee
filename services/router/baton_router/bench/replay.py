"""The inside of ``baton bench router``: from flags to a workload, a run per policy, and what is shown."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from baton.bench.core.report import check_plot, result_console
from baton.errors import ConfigError, shown
from baton_router.bench.report import PolicyRecord, document, draw, print_table, record
from baton_router.bench.simulation import Hardware, Replay, Setup
from baton_router.bench.workload import TraceRequest, Workload, generate, read_trace, with_sessions, write_trace
from baton_router.scheduler.policies import POLICIES, PolicyContext, make_policy

FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""
_BETA_POLICIES = ("match_minus_load",)


def replay_all(args: argparse.Namespace, command: str) -> int:
    """Replay every policy and show what came out; returns the exit status.

    Raises:
        ConfigError: A flag or a file that cannot work.
    """
    setups = _setups(args)
    if args.plot:
        check_plot(Path(args.plot))
    source, requests = _workload(args)
    records = []
    for setup in setups:
        if sys.stderr.isatty():
            sys.stderr.write(f"{setup.policy} ...\n")
        records.append(record(setup, Replay(setup).run(requests), requests))
    found = document(command, source, requests, setups[0], records)
    if args.plot:
        draw(found, Path(args.plot))
    if args.json:
        sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    else:
        print_table(found, result_console(FILE_WIDTH))
    return _verdict(args, records)


def _workload(args: argparse.Namespace) -> tuple[str, list[TraceRequest]]:
    if bool(args.trace) == (args.generate is not None):
        raise ConfigError("give --trace FILE or --generate N", field="trace")
    if not args.speedup > 0:
        raise ConfigError(f"--speedup must be above 0, got {args.speedup}", field="speedup")
    if args.trace:
        if args.save:
            raise ConfigError("--save is for what --generate made", field="save")
        requests = with_sessions(read_trace(Path(args.trace), args.limit))
        source = Path(args.trace).name
    else:
        names = {item.name for item in dataclasses.fields(Workload)} - {"requests"}
        requests = generate(Workload(requests=args.generate, **{name: getattr(args, name) for name in names}))
        source = "generated"
        if args.save:
            write_trace(Path(args.save), requests)
    if args.speedup != 1.0:
        requests = [dataclasses.replace(item, at_ms=item.at_ms / args.speedup) for item in requests]
    return source, requests


def _setups(args: argparse.Namespace) -> list[Setup]:
    names = list(POLICIES) if args.policy == "all" else [name.strip() for name in args.policy.split(",")]
    try:
        betas = [float(part) for part in args.beta.split(",")]
    except ValueError:
        raise ConfigError(f"--beta takes numbers, got {shown(args.beta)}", field="beta") from None
    hardware = Hardware(**{item.name: getattr(args, item.name) for item in dataclasses.fields(Hardware)})
    setups = []
    for name in names:
        for beta in betas if name in _BETA_POLICIES else betas[-1:]:
            make_policy(name, PolicyContext(beta=beta, temperature=args.temperature))  # wrong ones are told at once
            setups.append(_setup(args, name, beta, hardware))
    return setups


def _setup(args: argparse.Namespace, policy: str, beta: float, hardware: Hardware) -> Setup:
    values: dict[str, Any] = {name: getattr(args, name) for name in ("temperature", "threshold", "seed")}
    decodes = args.instances if args.decode_instances is None else args.decode_instances
    return Setup(prefills=args.instances, decodes=decodes, policy=policy, beta=beta, hardware=hardware, **values)


def _verdict(args: argparse.Namespace, records: Sequence[PolicyRecord]) -> int:
    failed = []
    for item in records:
        if args.require_hit_rate is not None and 100 * item.hit_rate < args.require_hit_rate:
            failed.append(f"{item.policy}: {item.hit_rate:.2%} block hits, {args.require_hit_rate:g}% were required")
        if args.require_balance is not None and item.load_max_over_mean > args.require_balance:
            failed.append(
                f"{item.policy}: load max/mean {item.load_max_over_mean:.3f}, {args.require_balance:g} was required"
            )
    for text in failed:
        sys.stderr.write(f"baton bench router: {text}\n")
    return 3 if failed else 0
