"""What makes objects happen: Deployments and StatefulSets become pods, pods that end are run, statuses are written."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from typing import Any, Protocol, Self

from tests.support.kube.api import KubeApi
from tests.support.kube.kinds import BY_NAME, Json
from tests.support.kube.store import ApiError, Event

_POD = BY_NAME["v1", "Pod"]
_OWNERS = (BY_NAME["apps/v1", "Deployment"], BY_NAME["apps/v1", "StatefulSet"])
_MANAGER = "controllers"


class Nodes(Protocol):
    """Where pods run."""

    async def resize(self, owner: Json, replicas: int) -> None:
        """Have as many pods of a Deployment or StatefulSet, and return when all are ready."""

    async def renew(self, owner: Json) -> None:
        """Replace all of them, since their template changed."""

    def addresses(self, owner: Json) -> dict[str, str]:
        """Return its ready pods: name and address."""

    async def run(self, pod: Json) -> tuple[int, str]:
        """Run a pod to its end; returns exit status and output."""


class PaperNodes:
    """Pods that are ready at once and do nothing.

    Attributes:
        gate: While it is closed, pods that should come are not there yet.
        exits: Exit status and output of pods that end, by the part of the name behind the last dash.
        renewed: Names of what was rolled, in order.
    """

    def __init__(self) -> None:
        """Run nothing yet."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.exits: dict[str, tuple[int, str]] = {}
        self.renewed: list[str] = []
        self._pods: dict[str, dict[str, str]] = {}
        self._count = 0

    async def resize(self, owner: Json, replicas: int) -> None:
        """Have as many pods."""
        pods = self._pods.setdefault(owner["metadata"]["name"], {})
        while len(pods) > replicas:
            pods.popitem()
        await self.gate.wait()
        while len(pods) < replicas:
            self._count += 1
            pods[f"{owner['metadata']['name']}-{self._count}"] = f"10.0.{self._count // 250}.{self._count % 250 + 1}"

    async def renew(self, owner: Json) -> None:
        """Replace all pods."""
        replicas = len(self.addresses(owner))
        self.renewed.append(owner["metadata"]["name"])
        await self.resize(owner, 0)
        await self.resize(owner, replicas)

    def addresses(self, owner: Json) -> dict[str, str]:
        """Return the pods."""
        return dict(self._pods.get(owner["metadata"]["name"], {}))

    async def run(self, pod: Json) -> tuple[int, str]:
        """Return what :attr:`exits` says."""
        return self.exits.get(pod["metadata"]["name"].rpartition("-")[2], (0, "done\n"))


class Controllers:
    """The controllers of a cluster and its kubelets; an asynchronous context manager.

    Args:
        api: The API server.
        nodes: Where pods run.
    """

    def __init__(self, api: KubeApi, nodes: Nodes) -> None:
        """Change nothing yet."""
        self._api, self._nodes = api, nodes
        self._templates: dict[tuple[str, str], str] = {}
        self._dirty: asyncio.Queue[tuple[str, Json]] = asyncio.Queue()
        self._logs: dict[tuple[str, str], str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Follow the API server."""
        self._api.store.on_change.append(self._changed)
        self._api.log_of = lambda namespace, name: self._logs.get((namespace, name), "")
        self._spawn(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; raises what went wrong."""
        self._api.store.on_change.remove(self._changed)
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    def _changed(self, event: Event) -> None:
        body = event.after or event.before or {}
        if event.kind in _OWNERS:
            if event.after is None:
                self._dirty.put_nowait(("gone", body))
            elif event.before is None or event.before["spec"] != event.after["spec"]:
                self._dirty.put_nowait(("owner", body))
        elif event.kind == _POD and event.before is None and not body["metadata"].get("ownerReferences"):
            self._spawn(self._run_pod(body))

    async def _run(self) -> None:
        busy: dict[str, asyncio.Task[None]] = {}
        while True:
            what, owner = await self._dirty.get()
            name = owner["metadata"]["name"]
            busy[name] = self._spawn(self._settle(owner, what == "gone", busy.get(name)))

    async def _settle(self, owner: Json, gone: bool, before: asyncio.Task[None] | None) -> None:
        """Bring one object's pods to what it says; one change after the other."""
        if before is not None:
            await asyncio.wait([before])
        where = (owner["kind"], owner["metadata"]["name"])
        if gone:
            self._templates.pop(where, None)
            await self._nodes.resize(owner, 0)
            self._write_pods(owner, {})
            return
        template = hashlib.sha256(json.dumps(owner["spec"]["template"], sort_keys=True).encode()).hexdigest()
        renew = self._templates.get(where, template) != template
        self._write_status(owner, updated=not renew)
        if renew:
            await self._nodes.renew(owner)
        await self._nodes.resize(owner, owner["spec"].get("replicas", 1))
        self._templates[where] = template
        self._write_pods(owner, self._nodes.addresses(owner))
        self._write_status(owner, updated=True)

    def _write_status(self, owner: Json, *, updated: bool) -> None:
        count = len(self._nodes.addresses(owner))
        wanted = owner["spec"].get("replicas", 1)
        done = updated and count == wanted
        status: Json = {"observedGeneration": owner["metadata"]["generation"], "replicas": count}
        status |= {"readyReplicas": count, "availableReplicas": count, "updatedReplicas": count if updated else 0}
        if owner["kind"] == "Deployment":
            progress = "NewReplicaSetAvailable" if done else "ReplicaSetUpdated"
            status["conditions"] = [
                {"type": "Available", "status": str(count >= wanted), "reason": "MinimumReplicasAvailable"},
                {"type": "Progressing", "status": "True", "reason": progress},
            ]
        else:
            status |= {"currentReplicas": count, "currentRevision": "1", "updateRevision": "1"}
        kind = BY_NAME[owner["apiVersion"], owner["kind"]]
        metadata = {key: owner["metadata"][key] for key in ("namespace", "name")}
        try:
            self._api.store.replace(kind, {"metadata": metadata, "status": status}, _MANAGER, "status")
        except ApiError as error:
            if error.code != 404:  # it went meanwhile
                raise

    def _write_pods(self, owner: Json, addresses: dict[str, str]) -> None:
        store, namespace = self._api.store, owner["metadata"]["namespace"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
        reference["uid"] = owner["metadata"]["uid"]
        had = store.find(_POD, namespace, lambda each: each["metadata"].get("ownerReferences") == [reference])
        for pod in had:
            if pod["metadata"]["name"] not in addresses:
                store.delete(_POD, namespace, pod["metadata"]["name"])
        template = owner["spec"]["template"]
        for name in addresses.keys() - {pod["metadata"]["name"] for pod in had}:
            metadata = {"name": name, "namespace": namespace, "ownerReferences": [reference]}
            metadata["labels"] = template["metadata"]["labels"]
            status = {"phase": "Running", "podIP": addresses[name], "conditions": [{"type": "Ready", "status": "True"}]}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status}
            store.create(_POD, body, _MANAGER)

    async def _run_pod(self, pod: Json) -> None:
        """Run a pod that nothing owns to its end, as the kubelet does."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        (container,) = pod["spec"]["containers"]

        def write(phase: str, state: dict[str, Any]) -> None:
            container_status = {"name": container["name"], "image": container["image"], "imageID": "", "state": state}
            container_status |= {"ready": "running" in state, "restartCount": 0}
            status = {"phase": phase, "containerStatuses": [container_status]}
            body = {"metadata": {"namespace": namespace, "name": name}, "status": status}
            self._api.store.replace(_POD, body, _MANAGER, "status")

        write("Running", {"running": {}})
        code, self._logs[namespace, name] = await self._nodes.run(pod)
        write("Succeeded" if code == 0 else "Failed", {"terminated": {"exitCode": code}})
