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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.cli.router_grpc import add_grpc_flags, open_async_client
from baton.client import AsyncClient, Instance
from baton.errors import BatonError, BusyError, ConfigError, UnavailableError
from baton.types import Role

_POLL_S = 0.1
_TARGET = re.compile(r"(prefill|decode)=(\d{1,3})")
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Switch:
    """An instance that changes its role."""

    instance: str
    before: Role
    after: Role


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


def plan_switches(instances: Sequence[Instance], targets: dict[Role, int]) -> list[Switch]:
    """Choose the instances that change their role: of those that are too many, the least busy.

    Args:
        instances: All that the router knows.
        targets: How many are wanted of each role; a role that is not named gets what is left.

    Raises:
        ConfigError: They do not add up to what there is, or no decode instance would be left.
    """
    usable = [each for each in instances if each.role in _OTHER and each.healthy and not each.refused]
    counts = {role: sum(each.role is role for each in usable) for role in _OTHER}
    wanted = {role: targets.get(role, len(usable) - targets.get(_OTHER[role], 0)) for role in _OTHER}
    if sum(wanted.values()) != len(usable) or min(wanted.values()) < 0:
        there = f"{counts[Role.PREFILL]} prefill and {counts[Role.DECODE]} decode instances"
        asked = " and ".join(f"{role}={number}" for role, number in targets.items())
        raise ConfigError(f"there are {there}, {len(usable)} in all, which {asked} is not", field="targets")
    if wanted[Role.DECODE] < 1:
        raise ConfigError("at least one decode instance must stay", field="targets")
    surplus = next((role for role in _OTHER if counts[role] > wanted[role]), None)
    if surplus is None:
        return []
    candidates = sorted((each for each in usable if each.role is surplus), key=_busy)
    chosen = candidates[: counts[surplus] - wanted[surplus]]
    return [Switch(each.instance_id, surplus, _OTHER[surplus]) for each in chosen]


def _busy(instance: Instance) -> tuple[int, int, str]:
    load = instance.load
    return (instance.in_flight + load.num_running + load.num_waiting, load.blocks_active, instance.instance_id)


async def _scale(args: argparse.Namespace, targets: dict[Role, int]) -> list[Switch]:
    async with open_async_client(args) as client:
        switches = plan_switches(await client.list_instances(), targets)
        for each in switches:
            said = f"{each.instance}: {each.before} -> {each.after}"
            if args.dry_run:
                _say(args, f"{said} (the least busy of the {each.before} instances)")
                continue
            started = time.monotonic()
            await switch(client, each, args.wait_s)
            _say(args, f"{said} after {time.monotonic() - started:.1f} s")
        return switches


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, flush=True)


async def switch(client: AsyncClient, each: Switch, wait_s: float) -> None:
    """Change the role of an instance, and wait until the router sends it requests again.

    Args:
        client: Of the router.
        each: What to change.
        wait_s: Seconds in which its requests may end, before they go on elsewhere; then as many again for blocks that
            others still read.

    Raises:
        BusyError: It did not become idle; it takes requests in its old role again.
        BatonError: Somebody does not answer.
    """
    await client.drain(each.instance, wait=wait_s, migrate=True)
    deadline = time.monotonic() + max(wait_s, 1.0)
    try:
        while True:
            try:
                await client.set_role(each.instance, each.after)
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)
    except BatonError:
        await client.set_role(each.instance, each.before)
        raise
    await _until(client, each, lambda x: x.role is each.after and x.healthy and not x.load.draining)


async def _until(client: AsyncClient, each: Switch, condition: Callable[[Instance], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        if any(x.instance_id == each.instance and condition(x) for x in await client.list_instances()):
            return
        await asyncio.sleep(_POLL_S)
    raise UnavailableError(f"the router does not see {each.instance} as a {each.after} instance")
