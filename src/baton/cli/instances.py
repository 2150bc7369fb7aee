"""``baton drain``, ``baton scale`` and ``baton health``: operations on running instances.

``scale`` changes the roles of instances: a drained instance gets no new requests, its running ones finish or migrate,
and its caches are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from baton.cli.printable import plain
from baton.cli.router import add_grpc_flags, open_async_client
from baton.client.scaling import Switch, plan_switches, switch_role
from baton.config import add_flags, from_flags
from baton.config.flags import AccessConfig
from baton.errors import ConfigError
from baton.rpc.channel import why_unhealthy
from baton.rpc.tls import read_tls
from baton.types import Role


def add_drain_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain", help="have instances take no new requests; returns when those that run have ended"
    )
    parser.add_argument("instances", nargs="+", metavar="INSTANCE", help="their ids, as baton status shows them")
    parser.add_argument(
        "--wait-s", type=float, default=60.0, help="seconds to wait for requests that run (default: 60)"
    )
    text = "then have routers go on elsewhere with what still runs"
    parser.add_argument("--migrate", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    add_grpc_flags(parser)
    parser.set_defaults(run=run_drain)


def run_drain(args: argparse.Namespace) -> int:
    """Drain instances; returns the exit status: 1 if requests still run."""
    if not 0 <= args.wait_s <= 86400:
        raise ConfigError("--wait-s must be between 0 and 86400", field="wait_s")
    with Console(stderr=True).status("waiting for requests that run"):
        num_running = asyncio.run(_drain(args))
    if args.json:
        print(json.dumps(num_running, indent=2))
    for name, count in () if args.json else num_running.items():
        print(f"{name}: " + ("drained" if not count else f"draining, {count} requests still run"))
    return int(any(num_running.values()))


async def _drain(args: argparse.Namespace) -> dict[str, int]:
    async with open_async_client(args) as client:
        names: Sequence[str] = list(dict.fromkeys(args.instances))
        counts: list[Any] = await asyncio.gather(
            *(client.drain(name, wait=args.wait_s, migrate=args.migrate) for name in names)
        )
        return dict(zip(names, counts, strict=True))


_TARGET = re.compile(r"(prefill|decode)=(\d{1,3})")


def add_scale_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "scale",
        help="change the ratio of prefill and decode instances while requests run",
        epilog="Instances change their role and keep their caches; their number stays: the targets must add up to it.",
    )
    text = "prefill=X, decode=Y or both; one alone leaves the rest to the other"
    parser.add_argument("targets", nargs="+", metavar="ROLE=N", help=text)
    text = "seconds in which requests may end on an instance, before they go on elsewhere (default: 30)"
    parser.add_argument("--wait-s", type=float, default=30.0, help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and why")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    add_grpc_flags(parser)
    parser.set_defaults(run=run_scale)


def run_scale(args: argparse.Namespace) -> int:
    """Change the ratio of instances; returns the exit status."""
    if not 0 <= args.wait_s <= 86400:
        raise ConfigError("--wait-s must be between 0 and 86400", field="wait_s")
    targets = parse_targets(args.targets)
    with Console(stderr=True).status("waiting for requests that run"):
        switches = asyncio.run(_scale(args, targets))
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in switches], indent=2))
    elif not switches:
        print("nothing to do: the ratio is this already")
    return 0


def parse_targets(words: Sequence[str]) -> dict[Role, int]:
    """Parse targets such as ``prefill=3 decode=1``.

    Raises:
        ConfigError: A target is malformed, or a role is given twice.
    """
    targets: dict[Role, int] = {}
    for word in words:
        match = _TARGET.fullmatch(word)
        if match is None:
            raise ConfigError(f"targets look like prefill=3 decode=1, got {word!r}", field="targets")
        role = Role(match[1])
        if role in targets:
            raise ConfigError(f"{role} is given twice", field="targets")
        targets[role] = int(match[2])
    return targets


async def _scale(args: argparse.Namespace, targets: dict[Role, int]) -> list[Switch]:
    async with open_async_client(args) as client:
        switches = plan_switches(await client.list_instances(), targets)
        for each in switches:
            change = f"{plain(each.instance)}: {each.before} -> {each.after}"
            if args.dry_run:
                _print_line(args, f"{change} (the least busy of the {each.before} instances)")
                continue
            started = time.monotonic()
            await switch_role(client, each, args.wait_s)
            _print_line(args, f"{change} after {time.monotonic() - started:.1f} s")
        return switches


def _print_line(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, flush=True)


def add_health_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("health", help="ask a service whether it serves; exit status 0 if it does")
    parser.add_argument("address", metavar="HOST:PORT", help="its gRPC address")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="seconds to wait for an answer (default: 2)")
    parser.add_argument(
        "--service", default="", help="one of its services; liveness: the process, draining or not (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a line")
    add_flags(parser, AccessConfig, skip=frozenset({"token_file"}))
    parser.set_defaults(run=run_health)


def run_health(args: argparse.Namespace) -> int:
    """Check a service's health; returns the exit status: 0 serving, 1 not serving or no answer."""
    host, _, port = args.address.rpartition(":")
    if not host or not port.isdigit() or not args.timeout_s > 0:
        raise ConfigError("give HOST:PORT and a --timeout-s above 0", field="address")
    tls = read_tls(from_flags(AccessConfig, args))
    reason = asyncio.run(why_unhealthy(args.address, service=args.service, timeout_s=args.timeout_s, tls=tls))
    shown = {"address": args.address, "service": args.service, "serving": not reason, "reason": reason}
    print(json.dumps(shown) if args.json else f"{args.address} {plain(reason or 'is serving')}")
    return 1 if reason else 0
