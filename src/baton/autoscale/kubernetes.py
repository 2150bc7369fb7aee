"""Deployments of a cluster: the numbers of their pods are patched, through the ``scale`` subresource alone.

What Kubernetes does with them is its own: a pod that goes is drained by its preStop hook, as in any rolling upgrade.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from baton.errors import BatonError, ConfigError, UnavailableError, shown
from baton.rpc.kubernetes_api import KubernetesApi
from baton.types import Role

_MERGE = {"content-type": "application/merge-patch+json"}
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class KubernetesFleet:
    """Two Deployments, one of each role.

    Args:
        api: The API server.
        names: Of the Deployments, by role.
    """

    def __init__(self, api: KubernetesApi, names: Mapping[Role, str]) -> None:
        self._api, self._names = api, names

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._api.close()

    async def switch(self, role: Role) -> str:
        """Have one pod fewer of the other role, whose device is free then, and one more of ``role``."""
        other = _OTHER[role]
        gone = await self._change(other, -1)
        try:
            return f"{gone}, {await self._change(role, 1)}"
        except BatonError:
            await self._change(other, 1)
            raise

    async def add(self, role: Role) -> str:
        """Have one pod more."""
        return await self._change(role, 1)

    async def remove(self, role: Role) -> str:
        """Have one pod fewer."""
        return await self._change(role, -1)

    async def pending(self) -> str:
        """Name the Deployments whose pods are not all ready yet, or not all gone."""
        waits = []
        for role, name in self._names.items():
            found = await self._deployment(role)
            wanted, status = _replicas(found), found.get("status", {})
            if {int(status.get(field, 0)) for field in ("replicas", "readyReplicas")} != {wanted}:
                waits.append(f"{name} has {status.get('readyReplicas', 0)} of {wanted} pods")
        return ", ".join(waits)

    async def _change(self, role: Role, by: int) -> str:
        before = _replicas(await self._deployment(role))
        after = before + by
        await self._ask("PATCH", role, "/scale", {"spec": {"replicas": after}})
        return f"{self._names[role]}: {before} -> {after} replicas"

    async def _deployment(self, role: Role) -> dict[str, Any]:
        return await self._ask("GET", role)

    async def _ask(self, method: str, role: Role, part: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raise ``ConfigError`` where the API server refuses, ``UnavailableError`` where it does not answer."""
        name = self._names[role]
        path = f"/apis/apps/v1/namespaces/{self._api.namespace}/deployments/{name}{part}"
        try:
            answer = await self._api.request(method, path, body, _MERGE if body is not None else {})
            if answer.status_code in (401, 403, 404):
                reason = "there is no such Deployment" if answer.status_code == 404 else "the service account may not"
                raise ConfigError(f"{method} Deployment {name}{part}: {reason} ({answer.status_code})")
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            if not isinstance(found.get("spec"), dict):
                raise ValueError(f"unexpected answer {shown(found)}")
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            raise UnavailableError(f"Kubernetes: {method} Deployment {name}{part}: {error}") from error
        return found


def _replicas(found: dict[str, Any]) -> int:
    return int(found["spec"].get("replicas", 1))
