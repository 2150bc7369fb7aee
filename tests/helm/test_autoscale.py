"""The controller of the ratio on Kubernetes: it patches two Deployments' replicas, writes Events, nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
from helm_python import HelmError
from tests.helm.test_lifecycle import Cluster
from tests.helm.test_manifests import admits, labels_of
from tests.support.chart import RELEASE, arguments, example, manifests, named, render
from tests.support.child_env import child_env
from tests.support.kube import kinds
from tests.support.kube.api import KubeApi
from tests.support.kube.controllers import Controllers, PaperNodes
from tests.unit.autoscale.test_controller import CONFIG, World, run

from baton.autoscale.controller import Controller
from baton.autoscale.fleets import KubernetesFleet
from baton.errors import ConfigError, UnavailableError
from baton.rpc.kubernetes_api import KubernetesApi
from baton.testing import FakeRouter
from baton.types import Role

NAMES = {Role.PREFILL: "baton-prefill", Role.DECODE: "baton-decode"}
INSTALL = "helm install baton helm/baton -n llm --set prefill.replicas=1 --set decode.replicas=3"


def account(folder: Path) -> str:
    (folder / "token").write_text("a-service-account")
    (folder / "namespace").write_text("llm")
    return str(folder)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with KubeApi() as api:
        nodes = PaperNodes()
        async with Controllers(api, nodes):
            api.create_namespace("llm")
            made = Cluster(api, nodes, tmp_path)
            await made.helm(f"{INSTALL} --set autoscaler.enabled=true --wait")
            yield made


@pytest.fixture
async def fleet(cluster: Cluster, tmp_path: Path) -> AsyncIterator[KubernetesFleet]:
    api = KubernetesApi(cluster.api.url, account(tmp_path), "")
    async with KubernetesFleet(api, NAMES) as made:
        yield made


def replicas(cluster: Cluster) -> tuple[int, int]:
    return tuple(cluster.deployment(name)["spec"]["replicas"] for name in ("prefill", "decode"))  # type: ignore[return-value]


class SeenByRouter(World):
    """A router that sees the pods that there are."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    async def list_instances(self) -> list:  # type: ignore[type-arg]
        nodes, pods = self._cluster.nodes, self._cluster.deployment
        self.prefill, self.decode = (len(nodes.addresses(pods(name))) for name in ("prefill", "decode"))
        return await super().list_instances()


async def test_a_pressed_pool_gets_a_pod_and_the_other_gives_one(cluster: Cluster, fleet: KubernetesFleet) -> None:
    world, lines = SeenByRouter(cluster), list[str]()
    made = Controller(CONFIG, world, fleet, lines.append, now=lambda: world.now)
    cluster.api.requests.clear()
    cluster.nodes.gate.clear()
    await run(made, world, 7)
    assert replicas(cluster) == (2, 2)
    assert "done: baton-decode: 3 -> 2 replicas, baton-prefill: 1 -> 2 replicas" in lines
    asked = {request for request in cluster.api.requests if request.startswith(("GET", "PATCH"))}
    await run(made, world, 60)
    assert replicas(cluster) == (2, 2), "a pod that is not ready yet is waited for"
    assert any("baton-prefill has 1 of 2 pods" in line for line in lines)
    cluster.nodes.gate.set()
    await cluster.replicas("prefill", 2)
    world.waiting_tokens = 0
    await run(made, world, 60)
    assert replicas(cluster) == (2, 2)
    assert asked == {
        *(f"GET /apis/apps/v1/namespaces/llm/deployments/{name}" for name in NAMES.values()),
        *(f"PATCH /apis/apps/v1/namespaces/llm/deployments/{name}/scale" for name in NAMES.values()),
    }
    upgrade = "helm upgrade baton helm/baton -n llm --reuse-values --set decode.flags.max-num-seqs=7 --wait"
    assert await cluster.helm(upgrade) == "deployed"
    assert replicas(cluster) == (2, 2), "an upgrade leaves what the controller made of it"


async def test_a_pod_that_never_gets_ready_is_taken_back_and_an_event_says_so(
    cluster: Cluster, fleet: KubernetesFleet
) -> None:
    world, lines = SeenByRouter(cluster), list[str]()
    made = Controller(replace(CONFIG, scale_start_s=60.0), world, fleet, lines.append, now=lambda: world.now)
    cluster.nodes.gate.clear()
    await run(made, world, 7)
    assert replicas(cluster) == (2, 2)
    world.waiting_tokens = 0
    await run(made, world, 62)
    assert replicas(cluster) == (1, 2)
    assert "taken back: baton-prefill: 2 -> 1 replicas" in lines
    (event,) = cluster.api.store.find(
        kinds.BY_NAME["v1", "Event"], "llm", lambda each: each["reason"] == "ReplicaGivenUp"
    )
    assert event["involvedObject"]["name"] == "baton-prefill"
    assert event["involvedObject"]["uid"] == cluster.deployment("prefill")["metadata"]["uid"]
    assert (event["type"], event["message"]) == ("Warning", "1 of 2 pods got ready in time, 1 are kept")


async def test_pods_are_added_and_taken_and_a_dry_run_touches_nothing(cluster: Cluster, fleet: KubernetesFleet) -> None:
    assert await fleet.add(Role.PREFILL) == "baton-prefill: 1 -> 2 replicas"
    assert await fleet.remove(Role.DECODE) == "baton-decode: 3 -> 2 replicas"
    await cluster.replicas("prefill", 2)
    await cluster.replicas("decode", 2)
    assert await fleet.pending() == ""
    world, lines = SeenByRouter(cluster), list[str]()
    dry = Controller(replace(CONFIG, scale_dry_run=True), world, fleet, lines.append, now=lambda: world.now)
    await run(dry, world, 20)
    assert any(line.startswith("would be done: one decode instance becomes prefill") for line in lines)
    assert replicas(cluster) == (2, 2)


async def test_what_kubernetes_refuses_is_said(cluster: Cluster, tmp_path: Path) -> None:
    api = KubernetesApi(cluster.api.url, account(tmp_path), "")
    async with KubernetesFleet(api, {**NAMES, Role.PREFILL: "baton-nobody"}) as wrong:
        with pytest.raises(ConfigError, match="Deployment baton-nobody: there is no such Deployment"):
            await wrong.switch(Role.PREFILL)
        assert replicas(cluster) == (1, 3), "what was half done is undone"
    async with KubernetesFleet(KubernetesApi("http://127.0.0.1:9", account(tmp_path), ""), NAMES) as silent:
        with pytest.raises(UnavailableError, match="GET Deployment baton-prefill"):
            await silent.pending()
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere/namespace"):
        KubernetesApi(cluster.api.url, str(tmp_path / "nowhere"), "")


def test_the_chart_gives_it_what_it_asks_for_and_no_more() -> None:
    objects = manifests(example("autoscaled"))
    name = f"{RELEASE}-baton-autoscaler"
    pools = [f"{RELEASE}-baton-prefill", f"{RELEASE}-baton-decode"]
    assert named(objects, "Role", name)["rules"] == [
        {"apiGroups": ["apps"], "resources": ["deployments"], "resourceNames": pools, "verbs": ["get"]},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": pools, "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ]
    assert named(objects, "RoleBinding", name)["subjects"][0]["name"] == name
    pod = named(objects, "Deployment", name)["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (name, True)
    assert pod["containers"][0]["command"] == ["baton", "autoscale"]
    flags = arguments(objects, name)
    assert [flags["kubernetes-prefill"], flags["kubernetes-decode"]] == pools
    assert flags["scale-max-instances"] == "8"
    router = labels_of(objects, f"{RELEASE}-baton-router")
    assert admits(objects, router, 8001, labels_of(objects, name))
    assert not admits(objects, router, 8001, {"app": "other"})
    assert not [each for each in manifests() if "autoscaler" in each["metadata"]["name"]], "it is not asked for"
    clash = {"autoscaler": {"enabled": True}, "decode": {"autoscaling": {"enabled": True}}}
    with pytest.raises(HelmError, match=re.escape("decode.autoscaling.enabled")):
        render(clash)


async def test_the_pods_command_looks_and_ends_when_it_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """What the chart runs, as a process, with the addresses of this test."""
    objects = manifests(example("autoscaled"))
    (container,) = named(objects, "Deployment", f"{RELEASE}-baton-autoscaler")["spec"]["template"]["spec"]["containers"]
    with FakeRouter() as router:
        here = {
            "address": router.address, "metrics-port": "0", "token-file": "", "kubernetes-prefill": "baton-prefill",
            "kubernetes-decode": "baton-decode", "kubernetes-api": cluster.api.url,
            "kubernetes-account": account(tmp_path), "metrics-host": "127.0.0.1",
        }  # fmt: skip
        given = dict(word.removeprefix("--").split("=", 1) for word in container["args"]) | here
        words = [f"--{flag}={value}" for flag, value in given.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.cli.main", *container["command"][1:], "--json", *words,
            env=child_env(), stdout=-1, stderr=-1,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.timeout(240):
            look = json.loads(await process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert (look["action"], look["why"]) == ("hold", "watching")
    assert cluster.api.requests[-1].startswith("GET /apis/apps/v1/namespaces/llm/deployments/baton-")
