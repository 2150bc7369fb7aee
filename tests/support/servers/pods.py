"""Kubernetes on one machine, as far as services can tell: pods are processes, each with a loopback address of its own.

Manifests run as they are: commands, flags, variables, files of Secrets, ports, probes, preStop, SIGTERM, grace
periods; Services become EndpointSlices, which the router lists and watches at an API server. Three things differ:
``0.0.0.0`` is the pod's address, paths of volumes are folders, and probes come more often.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import signal
import sys
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
from tests.support.chart import NAMESPACE, ROOT, Manifest, pods
from tests.support.child_env import child_env
from tests.support.kube.api import KubeApi
from tests.support.kube.kinds import BY_NAME
from tests.support.servers.warm import WarmProcess, WarmStarter

from baton.rpc.channel import check_health

_SLICE, _SERVICE = BY_NAME["discovery.k8s.io/v1", "EndpointSlice"], BY_NAME["v1", "Service"]
_DOMAIN = ".svc.cluster.local"
_PROBE_S = 0.2
_START_S = 240.0


def in_image(command: list[str]) -> list[str]:
    """Return a command as it runs here: the image's ``python`` is this environment's, whatever the path says."""
    program, *rest = command
    return [sys.executable if program in ("python", "python3") else program, *rest]


@dataclass
class LocalPod:
    """A pod that runs."""

    owner: str
    name: str
    ip: str
    manifest: Manifest
    process: WarmProcess
    ready: bool = False
    ending: bool = False
    killed: bool = False
    held: bool = False
    liveness_failures: int = 0
    kubelet: asyncio.Task[None] | None = None

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (found,) = self.manifest["spec"]["containers"]
        return dict(found)

    def port(self, port: int | str) -> int:
        """Return a port by name or number."""
        names = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        return int(names.get(port, port))

    async def probe(self, kind: str) -> bool:
        """Ask what a probe asks."""
        probe = self.container[kind]
        if "grpc" in probe:
            address = f"{self.ip}:{probe['grpc']['port']}"
            return await check_health(address, service=probe["grpc"].get("service", ""), timeout_s=60)
        get = probe["httpGet"]
        url = f"{get['scheme'].lower()}://{self.ip}:{self.port(get['port'])}{get['path']}"
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                return (await client.get(url)).status_code < 400
        except httpx.HTTPError:
            return False


@dataclass
class LocalKubernetes:
    """Runs the objects of a chart, with an API server of its own.

    Args:
        objects: Rendered manifests; none where ``Controllers`` bring what an API client asks for.
        folder: For volumes and logs.
        starter: Starts the processes.
        namespace: That all stands in.
        env: Further variables of all pods, for what a node gives them: a memory limit, its processor.
    """

    objects: list[Manifest]
    folder: Path
    starter: WarmStarter
    namespace: str = NAMESPACE
    env: dict[str, str] = field(default_factory=dict)
    pods: list[LocalPod] = field(default_factory=list)
    api: KubeApi = field(default_factory=KubeApi)
    ended: list[LocalPod] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        """Start everything and wait until it is ready."""
        self._ips, self._names, self._turns = itertools.count(2), itertools.count(), itertools.count()
        # Of this process alone: others beside it may have pods, too.
        self._net, self._part = 20 + os.getpid() % 200, os.getpid() // 200 % 60
        self._addresses: dict[str, str] = {}
        account = self.folder / "account"
        account.mkdir()
        (account / "token").write_text("token")
        (account / "namespace").write_text(self.namespace)
        await self.api.__aenter__()
        self._api_env = {"BATON_KUBERNETES_API": self.api.url, "BATON_KUBERNETES_ACCOUNT": str(account)}
        try:
            for each in self.objects:
                if each["kind"] != "Pod":  # helm test's
                    self.api.store.apply(BY_NAME[each["apiVersion"], each["kind"]], each, "helm", force=False)
            for owner, _ in pods(self.objects):
                if owner["kind"] != "Pod":
                    await self.scale(owner["metadata"]["name"], owner["spec"]["replicas"], wait=False)
            await self._all_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything at once."""
        for pod in self.pods:
            if pod.kubelet is not None:
                pod.kubelet.cancel()
            if pod.process.poll() is None:
                os.kill(pod.process.pid, signal.SIGKILL)
        while any(pod.process.poll() is None for pod in self.pods):
            await asyncio.sleep(0.02)
        await self.api.__aexit__()

    def of(self, owner: str) -> list[LocalPod]:
        """Return the pods of an object that are not ending."""
        return [pod for pod in self.pods if pod.owner == owner and not pod.ending]

    def endpoint(self, service: str, port: str) -> str:
        """Return the address of one ready pod behind a Service, the next one each time, as connections find them."""
        item = self.api.store.get(_SLICE, self.namespace, f"{service}-slice")
        (number,) = [each["port"] for each in item["ports"] if each["name"] == port]
        ready = [each["addresses"][0] for each in item["endpoints"] if each["conditions"]["ready"]]
        assert ready, f"nothing is ready behind {service}"
        return f"{ready[next(self._turns) % len(ready)]}:{number}"

    def secret(self, name: str, key: str) -> str:
        """Return what a Secret has."""
        found = self.api.store.get(BY_NAME["v1", "Secret"], self.namespace, name)
        return base64.b64decode(found["data"][key]).decode()

    async def scale(self, owner: str, replicas: int, *, wait: bool = True, held: bool = False) -> list[LocalPod]:
        """Have as many pods of an object; returns those that came, which, if ``held``, are never told to be ready."""
        came = []
        while len(self.of(owner)) < replicas:
            came.append(self._start(owner, len(self.of(owner))))
            came[-1].held = held
        if wait and came:
            await self._all_ready()
        extra = self.of(owner)[replicas:]
        await asyncio.gather(*map(self.end, extra))
        return came

    async def roll(self, name: str) -> None:
        """Replace all pods of an object as its strategy says."""
        owner = self._owner(name)
        endings = []
        for index, old in enumerate(self.of(name)):
            if owner["kind"] == "StatefulSet":
                await self.end(old)
                self._start(name, index)
                await self._all_ready()
                continue
            assert owner["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
            self._start(name, 0)
            await self._all_ready()
            await asyncio.sleep(owner["spec"].get("minReadySeconds", 0))
            endings.append(asyncio.create_task(self.end(old)))
        await asyncio.gather(*endings)

    async def resize(self, owner: Manifest, replicas: int) -> None:
        """Have as many pods, for controllers."""
        await self.scale(owner["metadata"]["name"], replicas)

    async def renew(self, owner: Manifest) -> None:
        """Replace all pods, for controllers."""
        await self.roll(owner["metadata"]["name"])

    def addresses(self, owner: Manifest) -> dict[str, str]:
        """Return the ready pods of an object, for controllers."""
        return {pod.name: pod.ip for pod in self.of(owner["metadata"]["name"]) if pod.ready}

    async def end(self, pod: LocalPod) -> None:
        """Delete a pod: not ready at once, then preStop, SIGTERM, and SIGKILL when the grace period is over."""
        pod.ending, pod.ready = True, False
        self._publish()
        if pod.kubelet is not None:
            pod.kubelet.cancel()
        async with asyncio.timeout(None) as grace:
            grace.reschedule(asyncio.get_running_loop().time() + pod.manifest["spec"]["terminationGracePeriodSeconds"])
            with contextlib.suppress(TimeoutError):
                stop = await asyncio.create_subprocess_exec(
                    *in_image(pod.container["lifecycle"]["preStop"]["exec"]["command"])
                )
                await stop.wait()
                os.kill(pod.process.pid, signal.SIGTERM)
                while pod.process.poll() is None:
                    await asyncio.sleep(0.02)
        if pod.process.poll() is None:
            pod.killed = True
            os.kill(pod.process.pid, signal.SIGKILL)
        self.pods.remove(pod)
        self.ended.append(pod)

    async def helm_test(self) -> str:
        """Run the pod of ``helm test``; returns what it printed."""
        (pod,) = [each for each in self.objects if each["kind"] == "Pod"]
        code, output = await self.run(pod)
        assert code == 0, output
        return output

    async def run(self, pod: Manifest) -> tuple[int, str]:
        """Run a pod that asks a Service and ends; returns exit status and output."""
        (container,) = pod["spec"]["containers"]
        folder = self._volumes(pod["metadata"]["name"], pod)
        code, url, seconds = container["args"]
        host, port = urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port
        service = self.api.store.get(_SERVICE, self.namespace, str(host))
        (name,) = [each["name"] for each in service["spec"]["ports"] if each["port"] == port]
        url = url.replace(f"{host}:{port}", self.endpoint(str(host), name))
        env = child_env(BATON_TEST_FILES=str(folder))
        command = [*in_image(container["command"]), code, url, seconds]
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=-1, stderr=-2)
        output, _ = await process.communicate()
        return int(process.returncode or 0), output.decode()

    def _owner(self, name: str) -> Manifest:
        kinds = (BY_NAME["apps/v1", "Deployment"], BY_NAME["apps/v1", "StatefulSet"])
        found = [each for kind in kinds for each in self.api.store.find(kind, self.namespace)]
        return next(each for each in found if each["metadata"]["name"] == name)

    def _address(self, name: str) -> str:
        """Return what a pod's name in the DNS leads to."""
        if name not in self._addresses:
            self._addresses[name] = self._new_ip()
        return self._addresses[name]

    def _new_ip(self) -> str:
        number = next(self._ips)
        return f"127.{self._net}.{4 * self._part + number // 250}.{number % 250 + 1}"

    def _start(self, owner: str, index: int) -> LocalPod:
        parent = self._owner(owner)
        template = parent["spec"]["template"]
        if parent["kind"] == "StatefulSet":
            name = f"{owner}-{index}"
            ip = self._address(f"{name}.{parent['spec']['serviceName']}.{self.namespace}{_DOMAIN}")
        else:
            name, ip = f"{owner}-{next(self._names)}", self._new_ip()
        (container,) = template["spec"]["containers"]
        folder = self._volumes(name, template)
        for claim in parent["spec"].get("volumeClaimTemplates", ()):
            (folder / claim["metadata"]["name"]).mkdir(exist_ok=True)
        env = child_env(
            **(self._api_env if template["spec"]["automountServiceAccountToken"] else {}), TMPDIR=str(folder / "tmp")
        )
        own = {"POD_NAME": name, "POD_IP": ip}
        env |= self.env | own | {each["name"]: each["value"] for each in container["env"] if "value" in each}
        mounts = {each["mountPath"]: folder / each["name"] for each in container["volumeMounts"]}
        args = [self._here(word, own, mounts) for word in container["args"]]
        module = f"{container['command'][0].replace('-', '_')}.main"
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self.starter.start(module, args, env=env, output=log.fileno(), errors=log.fileno())
        pod = LocalPod(owner, name, ip, template, process)
        self.pods.append(pod)
        pod.kubelet = asyncio.create_task(self._watch(pod), name=f"kubelet of {name}")
        return pod

    def _here(self, word: str, own: dict[str, str], mounts: dict[str, Path]) -> str:
        word = re.sub(r"\$\((\w+)\)", lambda match: own[match[1]], word)
        word = word.replace("0.0.0.0", own["POD_IP"])
        word = re.sub(r"[\w-]+\.[\w-]+\.[\w-]+" + re.escape(_DOMAIN), lambda match: self._address(match[0]), word)
        flag, equals, value = word.partition("=")
        # All paths at once: what one is replaced by may itself begin with another, as a checkout in /tmp does.
        folders = {"/opt/baton/models": ROOT / "models", **mounts}
        paths = "|".join(re.escape(path) for path in sorted(folders, key=len, reverse=True))
        value = re.sub(rf"^(@?)({paths})(?=/|$)", lambda match: f"{match[1]}{folders[match[2]]}", value)
        return f"{flag}{equals}{value}"

    def _volumes(self, name: str, template: Manifest) -> Path:
        folder = self.folder / name
        for volume in template["spec"]["volumes"]:
            at = folder / volume["name"]
            at.mkdir(parents=True, exist_ok=True)
            for item in volume.get("secret", {}).get("items", ()):
                path = at / item["path"]
                path.touch(mode=0o600)
                path.write_text(self.secret(volume["secret"]["secretName"], item["key"]))
        return folder

    async def _watch(self, pod: LocalPod) -> None:
        """Do what the kubelet does for a pod."""
        while not await pod.probe("startupProbe"):
            if pod.process.poll() is not None:
                return
            await asyncio.sleep(_PROBE_S)
        while pod.process.poll() is None:
            ready = await pod.probe("readinessProbe") and not pod.held
            if ready != pod.ready:
                pod.ready = ready
                self._publish()
            pod.liveness_failures += not await pod.probe("livenessProbe")
            await asyncio.sleep(_PROBE_S)
        pod.ready = False
        self._publish()

    def _publish(self) -> None:
        """Tell the API server what is behind each Service."""
        store = self.api.store
        services = {each["metadata"]["name"]: each for each in store.find(_SERVICE, self.namespace)}
        for each in store.find(_SLICE, self.namespace):
            if each["metadata"]["labels"]["kubernetes.io/service-name"] not in services:
                store.delete(_SLICE, self.namespace, each["metadata"]["name"])
        for name, service in services.items():
            selector = service["spec"]["selector"].items()
            behind = [pod for pod in self.pods if selector <= pod.manifest["metadata"]["labels"].items()]
            if not behind:
                continue
            metadata = {"name": f"{name}-slice", "namespace": self.namespace}
            metadata["labels"] = {"kubernetes.io/service-name": name}
            ports = [
                {"name": each["name"], "port": behind[0].port(each["targetPort"])} for each in service["spec"]["ports"]
            ]
            endpoints = [{"addresses": [pod.ip], "conditions": {"ready": pod.ready}} for pod in behind]
            body = {"apiVersion": _SLICE.api, "kind": _SLICE.name, "metadata": metadata, "addressType": "IPv4"}
            body |= {"ports": ports, "endpoints": endpoints}
            store.apply(_SLICE, body, "endpoint-slices", force=False)

    async def _all_ready(self) -> None:
        """Wait until every pod that is not ending is ready.

        Raises:
            RuntimeError: One ended.
            TimeoutError: It takes too long.
        """
        async with asyncio.timeout(_START_S):
            while waiting := [pod for pod in self.pods if not (pod.ready or pod.ending or pod.held)]:
                for pod in waiting:
                    if (code := pod.process.poll()) is not None:
                        log = (self.folder / f"{pod.name}.log").read_text(errors="replace")
                        raise RuntimeError(f"{pod.name} ended with {code}: {log[-3000:]}")
                await asyncio.sleep(0.05)
