"""Instances change their role; their number stays. Works wherever instances run."""

from __future__ import annotations

from baton.client import AsyncClient
from baton.client.scaling import Switch, plan_switches, switch_role
from baton.errors import ConfigError
from baton.types import Role


class RoleFleet:
    """Changes roles through a router and the instances themselves.

    Args:
        client: Of the router; with the services' token where there is one.
        drain_s: Seconds in which requests may end on an instance, before they go on elsewhere.
    """

    def __init__(self, client: AsyncClient, drain_s: float) -> None:
        self._client, self._drain_s = client, drain_s

    async def switch(self, role: Role) -> str:
        """Make the least busy instance of the other role one of ``role``."""
        return f"{(await self._switch(role)).instance} is a {role} instance now"

    async def _switch(self, role: Role) -> Switch:
        instances = await self._client.list_instances()
        count = sum(each.role is role and each.healthy and not each.refused for each in instances)
        (change,) = plan_switches(instances, {role: count + 1})
        await switch_role(self._client, change, self._drain_s)
        return change

    async def add(self, role: Role) -> str:
        """Refuse: nobody here can start one."""
        raise ConfigError("instances can be started by baton up and on Kubernetes alone", field="scale_max_instances")

    async def remove(self, role: Role) -> str:
        """Refuse, likewise."""
        raise ConfigError("instances can be ended by baton up and on Kubernetes alone", field="scale_max_instances")

    async def pending(self) -> str:
        """Nothing is under way when a change has returned."""
        return ""
