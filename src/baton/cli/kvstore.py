"""``baton kvstore``: lists the blocks of tenants in a KV store, and deletes those of a tenant or a kind of KV."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.cli.printable import plain
from baton.config import add_flags, from_flags
from baton.config.flags import AccessConfig
from baton.errors import ConfigError
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.service_token import read_token
from baton.rpc.tls import read_tls

_TIMEOUT_S = 60.0
_HINT = "is a baton-kvstore running there?"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kvstore", help="what tenants have in a KV store; forget it")
    what = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_tenants_parser(what)
    add_clear_parser(what)


def add_tenants_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("tenants", help="list what each tenant has in memory")
    _add_common_flags(parser, list_tenants)


def add_clear_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    clear = commands.add_parser("clear", help="forget a tenant's blocks, or all of one kind of KV, in every tier")
    which = clear.add_mutually_exclusive_group(required=True)
    which.add_argument("--tenant", default="", metavar="ID", help="forget everything of this tenant")
    which.add_argument(
        "--like",
        default="",
        metavar="HOST:PORT",
        help="forget all KV of the kind that this instance has",
    )
    _add_common_flags(clear, clear_blocks)


def _add_common_flags(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, AccessConfig], Any]) -> None:
    parser.add_argument("stores", nargs="+", metavar="HOST:PORT", help="gRPC addresses of the store's nodes")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    add_flags(parser, AccessConfig)
    parser.set_defaults(run=lambda args: _run(args, run), hint=_HINT)


def _run(args: argparse.Namespace, run: Any) -> int:
    asyncio.run(run(args, from_flags(AccessConfig, args)))
    return 0


async def list_tenants(args: argparse.Namespace, access: AccessConfig) -> None:
    """Print the blocks of each tenant, node by node."""
    uses: list[tuple[str, kvstore_pb2.TenantUse]] = []
    for store in args.stores:
        answer = await _call_store(store, access, "ListTenants", kvstore_pb2.ListTenantsRequest())
        uses += [(store, use) for use in answer.tenants]
    if args.json:
        fields = [field.name for field in kvstore_pb2.TenantUse.DESCRIPTOR.fields]
        rows = [{"node": node} | {name: getattr(use, name) for name in fields} for node, use in uses]
        print(json.dumps(rows, indent=2))
        return
    table = Table()
    for column in ("node", "tenant", "blocks", "bytes", "quota", "pinned", "evicted"):
        table.add_column(column, justify="left" if column in ("node", "tenant") else "right")
    for node, use in uses:
        numbers = (use.num_blocks, use.used_bytes, use.quota_bytes or "-", use.pinned_bytes, use.num_evictions)
        table.add_row(Text(node), Text(plain(use.tenant or "(no tenant)")), *map(str, numbers))
    Console().print(table)


async def clear_blocks(args: argparse.Namespace, access: AccessConfig) -> None:
    """Delete blocks, node by node."""
    request = kvstore_pb2.DeleteRequest(tenant=args.tenant)
    if args.like:
        request = kvstore_pb2.DeleteRequest(fingerprint=await _fingerprint(args.like, access), all=True)
    deleted: dict[str, int] = {}
    for store in args.stores:
        deleted[store] = (await _call_store(store, access, "Delete", request)).num_deleted
        if not args.json:
            print(f"{store}: {deleted[store]} blocks forgotten")
    if args.json:
        print(json.dumps(deleted, indent=2))


async def _fingerprint(address: str, access: AccessConfig) -> common_pb2.Fingerprint:
    info = await _call(address, access, worker_pb2_grpc.WorkerServiceStub, "GetInfo", worker_pb2.GetInfoRequest())
    fingerprint: common_pb2.Fingerprint = info.fingerprint
    return fingerprint


async def _call_store(address: str, access: AccessConfig, method: str, request: Any) -> Any:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is not HOST:PORT", field="stores")
    return await _call(address, access, kvstore_pb2_grpc.KvStoreServiceStub, method, request)


async def _call(address: str, access: AccessConfig, stub: Any, method: str, request: Any) -> Any:
    async with open_channel(address, token=read_token(access.token_file), tls=read_tls(access)) as channel:
        try:
            return readable(await getattr(stub(channel), method)(request, timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
