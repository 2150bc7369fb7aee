"""``baton health``: asks a service's gRPC health check, for container probes and scripts."""

from __future__ import annotations

import argparse
import asyncio
import json

from baton.config import add_flags, from_flags
from baton.config.flags import AccessConfig
from baton.errors import ConfigError
from baton.rpc.channel import check_health
from baton.rpc.tls import read_tls


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("health", help="ask a service whether it serves; exit status 0 if it does")
    parser.add_argument("address", metavar="HOST:PORT", help="its gRPC address")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="seconds to wait for an answer (default: 2)")
    parser.add_argument(
        "--service", default="", help="one of its services; liveness: the process, draining or not (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a line")
    add_flags(parser, AccessConfig, skip=frozenset({"token_file"}))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask; returns the exit status: 0 serving, 1 not serving or no answer.

    Raises:
        ConfigError: The arguments cannot work.
    """
    host, _, port = args.address.rpartition(":")
    if not host or not port.isdigit() or not args.timeout_s > 0:
        raise ConfigError("give HOST:PORT and a --timeout-s above 0", field="address")
    tls = read_tls(from_flags(AccessConfig, args))
    serving = asyncio.run(check_health(args.address, service=args.service, timeout_s=args.timeout_s, tls=tls))
    line = f"{args.address} {'is serving' if serving else 'is not serving or does not answer'}"
    print(json.dumps({"address": args.address, "service": args.service, "serving": serving}) if args.json else line)
    return 0 if serving else 1
