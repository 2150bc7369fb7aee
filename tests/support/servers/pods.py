"""Kubernetes on one machine, as far as services can tell: pods are processes, each with a loopback address of its own.

Rendered manifests run as they are: commands, flags, variables, files of Secrets, ports, probes, preStop, SIGTERM, grace
periods; Services become EndpointSlices, which the router lists and watches. Three things differ: ``0.0.0.0`` is the
pod's address, paths of volumes are folders, and probes come more often.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import sys
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from tests.support.chart import NAMESPACE, ROOT, Manifest, named, pods
from tests.support.child_env import child_env
from tests.support.servers.warm import WarmProcess, WarmStarter

from baton.rpc.channel import check_health

_PROBE_S = 0.2
_START_S = 180.0


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
            return await check_health(address, service=probe["grpc"].get("service", ""), timeout_s=5)
        get = probe["httpGet"]
        url = f"{get['scheme'].lower()}://{self.ip}:{self.port(get['port'])}{get['path']}"
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
                return (await client.get(url)).status_code < 400
        except httpx.HTTPError:
            return False


class SliceServer:
    """The API server's EndpointSlices: list and watch by the name of their Service."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self._version = 1
        self._watches: set[tuple[str, asyncio.Queue[bytes | None]]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; returns the URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Stop."""
        for _, queue in self._watches:
            queue.put_nowait(None)
        if self._server is not None:
            self._server.close()

    def put(self, service: str, ports: list[dict[str, Any]], endpoints: list[dict[str, Any]]) -> None:
        """Set what is behind a Service."""
        kind = "MODIFIED" if service in self.slices else "ADDED"
        self._version += 1
        metadata = {"name": f"{service}-slice", "resourceVersion": str(self._version)}
        item = {"metadata": metadata, "addressType": "IPv4", "ports": ports, "endpoints": endpoints}
        self.slices[service] = item
        for wanted, queue in self._watches:
            if wanted == service:
                queue.put_nowait(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                target = urllib.parse.urlsplit(head.split(b" ")[1].decode())
                assert target.path == f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
                query = dict(urllib.parse.parse_qsl(target.query))
                service = query["labelSelector"].removeprefix("kubernetes.io/service-name=")
                if "watch" in query:
                    await self._watch(writer, service, int(query["resourceVersion"]))
                    return
                items = [self.slices[service]] if service in self.slices else []
                body = json.dumps({"metadata": {"resourceVersion": str(self._version)}, "items": items}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.transport.abort()

    async def _watch(self, writer: asyncio.StreamWriter, service: str, version: int) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        watch = (service, queue)
        self._watches.add(watch)
        item = self.slices.get(service)
        if item is not None and int(item["metadata"]["resourceVersion"]) > version:  # changed since the list
            queue.put_nowait(json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n")
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while (line := await queue.get()) is not None:
                writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                await writer.drain()
        finally:
            self._watches.discard(watch)


@dataclass
class LocalKubernetes:
    """Runs the objects of a chart.

    Args:
        objects: Rendered manifests.
        folder: For volumes and logs.
        starter: Starts the processes.
    """

    objects: list[Manifest]
    folder: Path
    starter: WarmStarter
    pods: list[LocalPod] = field(default_factory=list)
    api: SliceServer = field(default_factory=SliceServer)
    ended: list[LocalPod] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        """Start everything and wait until it is ready."""
        self._ips, self._names, self._turns = itertools.count(2), itertools.count(), itertools.count()
        self._net = 20 + os.getpid() % 200
        self._addresses: dict[str, str] = {}
        account = self.folder / "account"
        account.mkdir()
        (account / "token").write_text("token")
        (account / "namespace").write_text(NAMESPACE)
        url = await self.api.start()
        self._api_env = {"BATON_KUBERNETES_API": url, "BATON_KUBERNETES_ACCOUNT": str(account)}
        for owner in (each for each in self.objects if each["kind"] == "StatefulSet"):
            name = owner["metadata"]["name"]
            for i in range(owner["spec"]["replicas"]):
                address = f"{name}-{i}.{owner['spec']['serviceName']}.{NAMESPACE}.svc.cluster.local"
                self._addresses[address] = self._new_ip()
        try:
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
        self.api.close()

    def of(self, owner: str) -> list[LocalPod]:
        """Return the pods of an object that are not ending."""
        return [pod for pod in self.pods if pod.owner == owner and not pod.ending]

    def endpoint(self, service: str, port: str) -> str:
        """Return the address of one ready pod behind a Service, the next one each time, as connections find them."""
        item = self.api.slices[service]
        (number,) = [each["port"] for each in item["ports"] if each["name"] == port]
        ready = [each["addresses"][0] for each in item["endpoints"] if each["conditions"]["ready"]]
        assert ready, f"nothing is ready behind {service}"
        return f"{ready[next(self._turns) % len(ready)]}:{number}"

    def secret(self, name: str, key: str) -> str:
        """Return what a Secret has."""
        return str(named(self.objects, "Secret", name)["stringData"][key])

    async def scale(self, owner: str, replicas: int, *, wait: bool = True, held: bool = False) -> list[LocalPod]:
        """Have as many pods of an object; returns those that came, which, if ``held``, are never told to be ready."""
        came = []
        while len(self.of(owner)) < replicas:
            came.append(self._start(owner, len(self.of(owner))))
            came[-1].held = held
        if wait:
            await self._all_ready()
        extra = self.of(owner)[replicas:]
        await asyncio.gather(*map(self.end, extra))
        return came

    async def roll(self, owner: str) -> None:
        """Replace all pods of an object as its strategy says."""
        manifest = next(each for each, _ in pods(self.objects) if each["metadata"]["name"] == owner)
        endings = []
        for index, old in enumerate(self.of(owner)):
            if manifest["kind"] == "StatefulSet":
                await self.end(old)
                self._start(owner, index)
                await self._all_ready()
                continue
            assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
            self._start(owner, 0)
            await self._all_ready()
            await asyncio.sleep(manifest["spec"].get("minReadySeconds", 0))
            endings.append(asyncio.create_task(self.end(old)))
        await asyncio.gather(*endings)

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
        (container,) = pod["spec"]["containers"]
        folder = self._volumes(pod["metadata"]["name"], pod)
        code, url, seconds = container["args"]
        port = urllib.parse.urlsplit(url).port
        host = urllib.parse.urlsplit(url).hostname
        service = named(self.objects, "Service", str(host))
        (name,) = [each["name"] for each in service["spec"]["ports"] if each["port"] == port]
        url = url.replace(f"{host}:{port}", self.endpoint(str(host), name))
        env = child_env(BATON_TEST_FILES=str(folder))
        command = [*in_image(container["command"]), code, url, seconds]
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=-1, stderr=-1)
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    def _new_ip(self) -> str:
        number = next(self._ips)
        return f"127.{self._net}.{number // 250}.{number % 250 + 1}"

    def _start(self, owner: str, index: int) -> LocalPod:
        parent, template = next((x, y) for x, y in pods(self.objects) if x["metadata"]["name"] == owner)
        if parent["kind"] == "StatefulSet":
            name = f"{owner}-{index}"
            (ip,) = [ip for address, ip in self._addresses.items() if address.startswith(f"{name}.")]
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
        env |= own | {each["name"]: each["value"] for each in container["env"] if "value" in each}
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
        word = word.replace("0.0.0.0", own["POD_IP"]).replace("/opt/baton/models", str(ROOT / "models"))
        for address, ip in self._addresses.items():
            word = word.replace(address, ip)
        flag, equals, value = word.partition("=")
        for path, folder in mounts.items():
            value = re.sub(rf"^(@?){re.escape(path)}(?=/|$)", rf"\g<1>{folder}", value)
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
        for service in (each for each in self.objects if each["kind"] == "Service"):
            selector = service["spec"]["selector"].items()
            behind = [pod for pod in self.pods if selector <= pod.manifest["metadata"]["labels"].items()]
            if behind:
                ports = [
                    {"name": each["name"], "port": behind[0].port(each["targetPort"])}
                    for each in service["spec"]["ports"]
                ]
                endpoints = [{"addresses": [pod.ip], "conditions": {"ready": pod.ready}} for pod in behind]
                self.api.put(service["metadata"]["name"], ports, endpoints)

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
