"""``baton drain``: instances take no new requests, and end those that run."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from baton.cli.router_grpc import add_grpc_flags, open_async_client
from baton.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drain; returns the exit status: 1 if requests still run.

    Raises:
        ConfigError: The arguments cannot work.
        NotFoundError: The router knows no such instance.
        BatonError: It, or an instance, does not answer.
    """
    if not 0 <= args.wait_s <= 86400:
        raise ConfigError("--wait-s must be between 0 and 86400", field="wait_s")
    with Console(stderr=True).status("waiting for requests that run"):
        left = asyncio.run(_drain(args))
    if args.json:
        print(json.dumps(left, indent=2))
    for name, count in () if args.json else left.items():
        print(f"{name}: " + ("drained" if not count else f"draining, {count} requests still run"))
    return int(any(left.values()))


async def _drain(args: argparse.Namespace) -> dict[str, int]:
    async with open_async_client(args) as client:
        names: Sequence[str] = list(dict.fromkeys(args.instances))
        found: list[Any] = await asyncio.gather(
            *(client.drain(name, wait=args.wait_s, migrate=args.migrate) for name in names)
        )
        return dict(zip(names, found, strict=True))
