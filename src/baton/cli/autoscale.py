"""``baton autoscale``, which controls the ratio of prefill to decode instances, and the fleet of ``baton up``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from baton.autoscale.controller import AutoscaleMetrics, Controller, Fleet
from baton.autoscale.fleets import KubernetesFleet, RoleFleet
from baton.autoscale.policy import Decision
from baton.autoscale.signals import ROLES, Observation
from baton.cli.printable import plain
from baton.cli.router import add_grpc_flags, open_async_client
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient, Instance
from baton.client.scaling import least_busy
from baton.config import add_flags, from_flags
from baton.config.autoscale import AutoscaleConfig, KubernetesConfig
from baton.config.cluster_file import ClusterFile
from baton.errors import ConfigError, UnavailableError
from baton.rpc.kubernetes_api import KubernetesApi
from baton.types import Role
from baton.worker.process import StopRequest, serve_metrics

_CALL_TIMEOUT_S = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_grpc_flags(parser, timeout_s=_CALL_TIMEOUT_S)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the controller until interrupted; returns the exit status."""
    file = ClusterFile(args.config, {"autoscale": (AutoscaleConfig,)})
    config = from_flags(AutoscaleConfig, args, file=file.values("autoscale"))
    kubernetes = from_flags(KubernetesConfig, args)
    names = {Role.PREFILL: kubernetes.kubernetes_prefill, Role.DECODE: kubernetes.kubernetes_decode}
    if any(names.values()) and not all(names.values()):
        missing = next(role for role, name in names.items() if not name)
        raise ConfigError(f"give --kubernetes-{missing}, too", field=f"kubernetes_{missing}")
    if config.scale_max_instances and not all(names.values()):
        raise ConfigError(
            "--scale-max-instances is for baton up --autoscale and for Kubernetes (--kubernetes-prefill, "
            "--kubernetes-decode): elsewhere instances cannot be started",
            field="scale_max_instances",
        )
    return asyncio.run(_run(args, config, kubernetes, names))


async def _run(
    args: argparse.Namespace, config: AutoscaleConfig, kubernetes: KubernetesConfig, names: dict[Role, str]
) -> int:
    metrics = AutoscaleMetrics()
    async with open_async_client(args) as client, _fleet(client, config, kubernetes, names) as fleet:
        await client.stats(window=config.scale_window_s)  # a wrong address or key fails at once
        await fleet.pending()
        controller = Controller(
            config,
            client,
            fleet,
            (lambda line: None) if args.json else _print_line,
            metrics=metrics,
            on_observation=(lambda observation, decision: print(json.dumps(as_json(observation, decision)), flush=True))
            if args.json
            else None,
        )
        async with serving_metrics(args.metrics_host, args.metrics_port, metrics):
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


@contextlib.asynccontextmanager
async def serving_metrics(host: str, port: int, metrics: AutoscaleMetrics) -> AsyncIterator[None]:
    """Serve metrics while the context is open, unless the port is 0."""
    if not port:
        yield
        return
    end = serve_metrics(host, port, metrics.registry)
    try:
        yield
    finally:
        await asyncio.to_thread(end)


def as_json(observation: Observation, decision: Decision) -> dict[str, Any]:
    """Return an observation and the decision that followed from it as JSON fields."""
    return {
        "time": time.time(),
        "instances": {role.value: observation.count(role) for role in ROLES},
        "loads": {role.value: dataclasses.asdict(observation.loads[role]) for role in ROLES},
        "stats": dataclasses.asdict(observation.stats),
        "unsettled": list(observation.unsettled),
        "pressures": {role.value: dict(each.signals) for role, each in decision.pressures.items()},
        "action": decision.action.value,
        "role": None if decision.role is None else decision.role.value,
        "why": decision.why,
    }


def _print_line(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {plain(line)}", flush=True)


_POLL_INTERVAL_S = 0.1
_REGISTRATION_TIMEOUT_S = 30.0


class ProcessFleet(RoleFleet):
    """Instances of ``baton up``: processes of its supervisor.

    Args:
        client: Client of the router, with the services' token if there is one.
        supervisor: Supervisor of the processes.
        drain_s: Seconds that requests have to finish on an instance, before they migrate to others.
    """

    def __init__(self, client: AsyncClient, supervisor: Supervisor, drain_s: float) -> None:
        super().__init__(client, drain_s)
        self._supervisor = supervisor

    async def switch(self, role: Role) -> str:
        """Change an instance's role; if its process dies, it is restarted in the new role."""
        change = await self._switch(role)
        process = self._supervisor.processes.get(change.instance)
        layout = self._supervisor.plan.worker
        # Instances of further pools have flags of their own, which do not fit the other role.
        if process is not None and layout is not None and change.instance.rpartition("-")[0] in ROLES:
            self._supervisor.redefine(layout(role.value, change.instance, process.spec))
        return f"{change.instance} is a {role} instance now"

    async def add(self, role: Role) -> str:
        """Start an instance and wait until the router sees it.

        Raises:
            UnavailableError: The instance does not start, or the router does not see it.
        """
        plan = self._supervisor.plan
        if plan.worker is None:
            raise ConfigError("this deployment's plan has no further instances", field="scale_max_instances")
        names = self._supervisor.processes
        name = next(name for at in range(len(names) + 1) if (name := f"{role}-{at}") not in names)
        await self._supervisor.add(plan.worker(role.value, name, None))
        try:
            await self._wait_registered(name)
        except BaseException:
            await self._supervisor.remove(name)
            raise
        return f"{name} is up"

    async def remove(self, role: Role) -> str:
        """Drain the least busy instance of a role and end it; its requests finish or migrate."""
        candidates = [
            each
            for each in await self._client.list_instances()
            if each.role is role and each.healthy and each.instance_id in self._supervisor.processes
        ]
        if not candidates:
            raise ConfigError(f"no {role} instance was started here", field="scale_max_instances")
        name = least_busy(candidates)[0].instance_id
        await self._client.drain(name, wait=self._drain_s, migrate=True)
        await self._supervisor.remove(name)
        return f"{name} has ended"

    async def _wait_registered(self, name: str) -> None:
        instance: Instance | None = None
        try:
            async with asyncio.timeout(_REGISTRATION_TIMEOUT_S):
                while instance is None or not instance.healthy:
                    await asyncio.sleep(_POLL_INTERVAL_S)
                    instances = await self._client.list_instances()
                    instance = next((each for each in instances if each.instance_id == name), None)
                    if instance is not None and instance.refused:
                        raise UnavailableError(f"the router refuses {name}: {instance.refused}")
        except TimeoutError:
            raise UnavailableError(f"the router does not see {name}") from None
