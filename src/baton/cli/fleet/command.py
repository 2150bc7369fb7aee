"""``baton autoscale``: keeps the ratio of prefill and decode instances as the load wants it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from baton.autoscale.controller import Controller, Fleet
from baton.autoscale.kubernetes import KubernetesFleet
from baton.autoscale.metrics import AutoscaleMetrics
from baton.autoscale.policy import Decision
from baton.autoscale.roles import RoleFleet
from baton.autoscale.signals import ROLES, Observation
from baton.cli.router_grpc import add_grpc_flags, open_async_client
from baton.client import AsyncClient
from baton.config import add_flags, from_flags
from baton.config.autoscale import AutoscaleConfig, KubernetesConfig
from baton.config.cluster_file import ClusterFile
from baton.errors import ConfigError
from baton.rpc.kubernetes_api import KubernetesApi
from baton.types import Role
from baton.worker.process import StopRequest, serve_metrics

_LOOK_TIMEOUT_S = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "autoscale",
        help="change the ratio of prefill and decode instances as the load wants it",
        epilog="Instances change their role. With --kubernetes-prefill and --kubernetes-decode replicas are patched.",
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of --metrics-port (default: 127.0.0.1)")
    parser.add_argument("--metrics-port", type=int, default=0, help="port for /metrics; 0: none")
    parser.add_argument("--json", action="store_true", help="a JSON object per look instead of lines")
    text = "file of a deployment (YAML), as baton up -f reads it; the environment and flags go before it"
    parser.add_argument("--config", "-f", default="", metavar="FILE", help=text)
    add_flags(parser, AutoscaleConfig)
    add_flags(parser, KubernetesConfig)
    add_grpc_flags(parser, timeout_s=_LOOK_TIMEOUT_S)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run until interrupted; returns the exit status.

    Raises:
        ConfigError: The arguments cannot work.
        BatonError: At the first look the router or the API server does not answer.
    """
    file = ClusterFile(args.config, {"autoscale": (AutoscaleConfig,)}).values("autoscale") if args.config else None
    config, kubernetes = from_flags(AutoscaleConfig, args, file=file), from_flags(KubernetesConfig, args)
    names = {Role.PREFILL: kubernetes.kubernetes_prefill, Role.DECODE: kubernetes.kubernetes_decode}
    if any(names.values()) and not all(names.values()):
        missing = next(role for role, name in names.items() if not name)
        raise ConfigError(f"give --kubernetes-{missing}, too", field=f"kubernetes_{missing}")
    if config.scale_max_instances and not all(names.values()):
        raise ConfigError(
            "--scale-max-instances is for baton up --autoscale and for Kubernetes (--kubernetes-prefill, "
            "--kubernetes-decode): nobody here can start instances",
            field="scale_max_instances",
        )
    return asyncio.run(_run(args, config, kubernetes, names))


async def _run(
    args: argparse.Namespace, config: AutoscaleConfig, kubernetes: KubernetesConfig, names: dict[Role, str]
) -> int:
    metrics = AutoscaleMetrics()
    async with open_async_client(args) as client, _fleet(client, config, kubernetes, names) as fleet:
        await client.stats(window=config.scale_window_s)  # what is wrong with the address or the key is told at once
        await fleet.pending()
        controller = Controller(
            config,
            client,
            fleet,
            (lambda line: None) if args.json else _say,
            metrics=metrics,
            on_look=(lambda seen, decision: print(json.dumps(as_json(seen, decision)), flush=True))
            if args.json
            else None,
        )
        with _served(args, metrics):
            stop = StopRequest()
            running = asyncio.create_task(controller.run())
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
            finally:
                for task in (running, stopping):
                    task.cancel()
                await asyncio.gather(running, stopping, return_exceptions=True)
    return 0


@contextlib.asynccontextmanager
async def _fleet(
    client: AsyncClient, config: AutoscaleConfig, kubernetes: KubernetesConfig, names: dict[Role, str]
) -> AsyncIterator[Fleet]:
    if not any(names.values()):
        yield RoleFleet(client, config.scale_drain_s)
        return
    api = KubernetesApi(kubernetes.kubernetes_api, kubernetes.kubernetes_account, kubernetes.kubernetes_namespace)
    async with KubernetesFleet(api, names) as fleet:
        yield fleet


@contextlib.contextmanager
def _served(args: argparse.Namespace, metrics: AutoscaleMetrics) -> Any:
    if not args.metrics_port:
        yield
        return
    end: Callable[[], None] = serve_metrics(args.metrics_host, args.metrics_port, metrics.registry)
    try:
        yield
    finally:
        end()


def as_json(seen: Observation, decision: Decision) -> dict[str, Any]:
    """Return a look, and what followed from it, as JSON has it."""
    return {
        "time": time.time(),
        "instances": {role.value: seen.count(role) for role in ROLES},
        "loads": {role.value: dataclasses.asdict(seen.loads[role]) for role in ROLES},
        "stats": dataclasses.asdict(seen.stats),
        "unsettled": list(seen.unsettled),
        "pressures": {role.value: dict(each.signals) for role, each in decision.pressures.items()},
        "action": decision.action.value,
        "role": None if decision.role is None else decision.role.value,
        "why": decision.why,
    }


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
