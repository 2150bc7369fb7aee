"""Asking a router over gRPC through the SDK: its address, key and certificates, as flags."""

from __future__ import annotations

import argparse
from typing import Any

from baton.cli.router_http import read_api_key
from baton.client import AsyncClient, Client
from baton.config import add_flags, from_flags
from baton.config.flags import AccessConfig
from baton.errors import ConfigError
from baton.rpc.service_token import Token, read_token
from baton.rpc.tls import Tls, read_tls

HINT = "is one running there? start one with baton up, or name another with --address"


def add_grpc_flags(parser: argparse.ArgumentParser, *, timeout_s: float = 600.0) -> None:
    """Add the flags that say where a router is."""
    parser.add_argument(
        "--address", default="127.0.0.1:8001", metavar="HOST:PORT", help="the router (default: 127.0.0.1:8001)"
    )
    parser.add_argument("--api-key-file", default="", help="file whose first line is an API key of the router")
    text = f"seconds that a call may take (default: {timeout_s:g})"
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help=text)
    add_flags(parser, AccessConfig)
    parser.set_defaults(hint=HINT)


def access(args: argparse.Namespace) -> tuple[Token | None, Tls | None]:
    """Return the services' token and certificates.

    Raises:
        ConfigError: They cannot be read.
    """
    config = from_flags(AccessConfig, args)
    return read_token(config.token_file), read_tls(config)


def open_client(args: argparse.Namespace) -> Client:
    """Return a client of the router.

    Raises:
        ConfigError: A file cannot be read.
        InvalidRequestError: The address or the time-out cannot be.
    """
    return Client(args.address, **_options(args))


def open_async_client(args: argparse.Namespace) -> AsyncClient:
    """Return a client of the router, for an event loop; raises as :func:`open_client` does."""
    return AsyncClient(args.address, **_options(args))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    config = from_flags(AccessConfig, args)
    key = read_api_key(args.api_key_file) if args.api_key_file else None
    if key is not None and "token_file" in args:
        raise ConfigError("give --api-key-file or --token-file", field="api_key_file")
    token_file = "" if key is not None else config.token_file
    return {"token": key, "token_file": token_file, "timeout": args.timeout_s, "tls": read_tls(config)}
