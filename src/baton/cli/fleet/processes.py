"""Processes of ``baton up`` as the controller's instances: they are started, change roles, and are ended."""

from __future__ import annotations

import asyncio

from baton.autoscale.roles import RoleFleet
from baton.cli.supervisor import Supervisor
from baton.client import AsyncClient, Instance
from baton.client.scaling import least_busy
from baton.config.cluster_file import ROLES
from baton.errors import ConfigError, UnavailableError
from baton.types import Role

_POLL_S = 0.1
_SEEN_S = 30.0


class ProcessFleet(RoleFleet):
    """Instances that are processes of a supervisor here.

    Args:
        client: Of the router; with the services' token where there is one.
        supervisor: Runs them.
        drain_s: Seconds in which requests may end on an instance, before they go on elsewhere.
    """

    def __init__(self, client: AsyncClient, supervisor: Supervisor, drain_s: float) -> None:
        super().__init__(client, drain_s)
        self._supervisor = supervisor

    async def switch(self, role: Role) -> str:
        """Change an instance's role; should its process die, it is started again in that one."""
        change = await self._switch(role)
        process = self._supervisor.processes.get(change.instance)
        layout = self._supervisor.plan.worker
        # Those of further pools have flags of their own, which no other role's instances have.
        if process is not None and layout is not None and change.instance.rpartition("-")[0] in ROLES:
            self._supervisor.redefine(layout(role.value, change.instance, process.spec))
        return f"{change.instance} is a {role} instance now"

    async def add(self, role: Role) -> str:
        """Start an instance and wait until the router sends it requests.

        Raises:
            UnavailableError: It does not start, or the router does not see it.
        """
        plan = self._supervisor.plan
        if plan.worker is None:
            raise ConfigError("this deployment's plan has no further instances", field="scale_max_instances")
        taken = self._supervisor.processes
        name = next(name for at in range(len(taken) + 1) if (name := f"{role}-{at}") not in taken)
        await self._supervisor.add(plan.worker(role.value, name, None))
        try:
            await self._until_seen(name)
        except BaseException:
            await self._supervisor.remove(name)
            raise
        return f"{name} is up"

    async def remove(self, role: Role) -> str:
        """End the least busy instance of a role: it takes no new requests, and what runs ends or goes on elsewhere."""
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

    async def _until_seen(self, name: str) -> None:
        found: Instance | None = None
        try:
            async with asyncio.timeout(_SEEN_S):
                while found is None or not found.healthy:
                    await asyncio.sleep(_POLL_S)
                    instances = await self._client.list_instances()
                    found = next((each for each in instances if each.instance_id == name), None)
                    if found is not None and found.refused:
                        raise UnavailableError(f"the router refuses {name}: {found.refused}")
        except TimeoutError:
            raise UnavailableError(f"the router does not see {name}") from None
