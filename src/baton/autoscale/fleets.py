"""Fleets that the controller can change: instances that change their role, and Deployments of a Kubernetes cluster."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import httpx

from baton.client import AsyncClient
from baton.client.scaling import Switch, plan_switches, switch_role
from baton.errors import BatonError, ConfigError, UnavailableError, shown
from baton.rpc.kubernetes_api import KubernetesApi
from baton.types import Role


class RoleFleet:
    """Instances that change their role; their number stays. Works wherever the instances run.

    Args:
        client: Client of the router, with the services' token if there is one.
        drain_s: Seconds that requests have to finish on an instance, before they migrate to others.
    """

    def __init__(self, client: AsyncClient, drain_s: float) -> None:
        self._client = client
        self._drain_s = drain_s

    async def switch(self, role: Role) -> str:
        """Turn the least busy instance of the other role into one of ``role``."""
        return f"{(await self._switch(role)).instance} is a {role} instance now"

    async def _switch(self, role: Role) -> Switch:
        instances = await self._client.list_instances()
        count = sum(each.role is role and each.healthy and not each.refused for each in instances)
        (change,) = plan_switches(instances, {role: count + 1})
        await switch_role(self._client, change, self._drain_s)
        return change

    async def add(self, role: Role) -> str:
        """Refuse: this fleet cannot start instances."""
        raise ConfigError("instances can be started by baton up and on Kubernetes alone", field="scale_max_instances")

    async def remove(self, role: Role) -> str:
        """Refuse: this fleet cannot end instances."""
        raise ConfigError("instances can be ended by baton up and on Kubernetes alone", field="scale_max_instances")

    async def pending(self) -> str:
        """Return an empty text: a change is complete when its call returns."""
        return ""

    async def take_back(self, least: Mapping[Role, int]) -> str:
        """Do nothing: instances that do not start are ended by the call that started them."""
        return ""


_MERGE = {"content-type": "application/merge-patch+json"}
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class KubernetesFleet:
    """Two Deployments, one of each role; their replicas are patched through the ``scale`` subresource.

    Kubernetes does the rest: a removed pod is drained by its preStop hook, as in any rolling upgrade.

    Args:
        api: Client of the API server.
        names: Names of the Deployments, by role.
    """

    def __init__(self, api: KubernetesApi, names: Mapping[Role, str]) -> None:
        self._api = api
        self._names = names

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._api.close()

    async def switch(self, role: Role) -> str:
        """Remove a pod of the other role, which frees its device, and add one of ``role``."""
        other = _OTHER[role]
        removed = await self._change(other, -1)
        try:
            return f"{removed}, {await self._change(role, 1)}"
        except BatonError:
            await self._change(other, 1)
            raise

    async def add(self, role: Role) -> str:
        """Add a pod."""
        return await self._change(role, 1)

    async def remove(self, role: Role) -> str:
        """Remove a pod."""
        return await self._change(role, -1)

    async def pending(self) -> str:
        """Return the Deployments whose pods are not all ready or not all gone yet."""
        waits = []
        for role, name in self._names.items():
            deployment = await self._deployment(role)
            wanted = _replicas(deployment)
            status = deployment.get("status", {})
            if {int(status.get(field, 0)) for field in ("replicas", "readyReplicas")} != {wanted}:
                waits.append(f"{name} has {status.get('readyReplicas', 0)} of {wanted} pods")
        return ", ".join(waits)

    async def take_back(self, least: Mapping[Role, int]) -> str:
        """Reduce each Deployment to its ready pods; Kubernetes ends those first that are not ready.

        Each Deployment with pods that did not get ready gets an Event, which ``kubectl describe`` shows.
        """
        done = []
        for role, name in self._names.items():
            deployment = await self._deployment(role)
            before, ready = _replicas(deployment), int(deployment.get("status", {}).get("readyReplicas", 0))
            if ready >= before:
                continue
            after = max(ready, least[role])
            if after < before:
                done.append(await self._set(role, before, after))
            try:
                await self._record_given_up(deployment, f"{ready} of {before} pods got ready in time, {after} are kept")
            except BatonError as error:
                done.append(f"no event of {name}: {error.message}")
        return ", ".join(done)

    async def _record_given_up(self, deployment: dict[str, Any], message: str) -> None:
        metadata = deployment["metadata"]
        name, namespace = metadata["name"], self._api.namespace
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": name,
                "namespace": namespace,
                "uid": metadata.get("uid", ""),
            },
            "type": "Warning",
            "reason": "ReplicaGivenUp",
            "message": message,
            "source": {"component": "baton-autoscale"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._call("POST", f"/api/v1/namespaces/{namespace}/events", event, f"Event of {name}")

    async def _change(self, role: Role, by: int) -> str:
        before = _replicas(await self._deployment(role))
        return await self._set(role, before, before + by)

    async def _set(self, role: Role, before: int, after: int) -> str:
        await self._request("PATCH", role, "/scale", {"spec": {"replicas": after}})
        return f"{self._names[role]}: {before} -> {after} replicas"

    async def _deployment(self, role: Role) -> dict[str, Any]:
        return await self._request("GET", role)

    async def _request(
        self, method: str, role: Role, part: str = "", body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call the API server.

        Raises:
            ConfigError: The API server refuses the request.
            UnavailableError: It does not answer, or not as expected.
        """
        name = self._names[role]
        path = f"/apis/apps/v1/namespaces/{self._api.namespace}/deployments/{name}{part}"
        fields = await self._call(method, path, body, f"Deployment {name}{part}")
        if not isinstance(fields.get("spec"), dict):
            raise UnavailableError(f"Kubernetes: {method} Deployment {name}{part}: unexpected answer {shown(fields)}")
        return fields

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> dict[str, Any]:
        try:
            answer = await self._api.request(method, path, body, _MERGE if method == "PATCH" else {})
            if answer.status_code in (401, 403, 404):
                reason = (
                    f"there is no such {what.split()[0]}"
                    if answer.status_code == 404
                    else "the service account may not"
                )
                raise ConfigError(f"{method} {what}: {reason} ({answer.status_code})")
            answer.raise_for_status()
            fields = answer.json()
            if not isinstance(fields, dict):
                raise ValueError(f"unexpected answer {shown(fields)}")
        except (httpx.HTTPError, ValueError) as error:
            raise UnavailableError(f"Kubernetes: {method} {what}: {error}") from error
        return fields


def _replicas(deployment: dict[str, Any]) -> int:
    return int(deployment["spec"].get("replicas", 1))
