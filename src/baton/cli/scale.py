"""``baton scale``: another ratio of prefill and decode instances, while requests run.

Instances change their role: the router sends a drained instance nothing new, what runs on it ends or goes on elsewhere,
and its caches stay.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence

from rich.console import Console

from baton.cli.router_grpc import add_grpc_flags, open_async_client
from baton.client.scaling import Switch, plan_switches, switch_role
from baton.errors import ConfigError
from baton.types import Role

_TARGET = re.compile(r"(prefill|decode)=(\d{1,3})")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Switch; returns the exit status.

    Raises:
        ConfigError: The targets cannot be.
        BatonError: The router or an instance does not answer, or an instance stayed busy.
    """
    if not 0 <= args.wait_s <= 86400:
        raise ConfigError("--wait-s must be between 0 and 86400", field="wait_s")
    targets = parse_targets(args.targets)
    with Console(stderr=True).status("waiting for requests that run"):
        done = asyncio.run(_scale(args, targets))
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in done], indent=2))
    elif not done:
        print("nothing to do: the ratio is this already")
    return 0


def parse_targets(words: Sequence[str]) -> dict[Role, int]:
    """Read ``prefill=3 decode=1``.

    Raises:
        ConfigError: One is of another form, or a role is named twice.
    """
    found: dict[Role, int] = {}
    for word in words:
        match = _TARGET.fullmatch(word)
        if match is None:
            raise ConfigError(f"targets look like prefill=3 decode=1, got {word!r}", field="targets")
        role = Role(match[1])
        if role in found:
            raise ConfigError(f"{role} is given twice", field="targets")
        found[role] = int(match[2])
    return found


async def _scale(args: argparse.Namespace, targets: dict[Role, int]) -> list[Switch]:
    async with open_async_client(args) as client:
        switches = plan_switches(await client.list_instances(), targets)
        for each in switches:
            said = f"{each.instance}: {each.before} -> {each.after}"
            if args.dry_run:
                _say(args, f"{said} (the least busy of the {each.before} instances)")
                continue
            started = time.monotonic()
            await switch_role(client, each, args.wait_s)
            _say(args, f"{said} after {time.monotonic() - started:.1f} s")
        return switches


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, flush=True)
