"""Install, upgrade, scale, rollback, test, uninstall: Helm's engine and kubectl, unmodified, against an API server.

The server speaks Kubernetes' protocol and holds objects to its schemas (``tests/support/kube``); pods are records
here, and processes in ``test_document.py``.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
from helm_python import HelmError
from tests.support.chart import ROOT
from tests.support.kube.api import KubeApi
from tests.support.kube.controllers import Controllers, PaperNodes
from tests.support.kube.helm_command import helm
from tests.support.kube.kinds import BY_NAME, KINDS, Json
from tests.support.kube.store import ApiError

DEPLOYMENT, SECRET, POD = BY_NAME["apps/v1", "Deployment"], BY_NAME["v1", "Secret"], BY_NAME["v1", "Pod"]
INSTALL = "helm install baton helm/baton -n llm --set prefill.replicas=2 --set decode.replicas=3"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the path")


@dataclass
class Cluster:
    """An API server, controllers, and the commands that people type."""

    api: KubeApi
    nodes: PaperNodes
    folder: Path

    async def helm(self, command: str) -> str:
        return await asyncio.to_thread(helm, self.api.kubeconfig, ROOT, command)

    async def start_kubectl(self, *words: str) -> asyncio.subprocess.Process:
        config = self.folder / "kubeconfig"
        config.write_text(self.api.kubeconfig)
        env = os.environ | {"KUBECONFIG": str(config), "HOME": str(self.folder)}
        return await asyncio.create_subprocess_exec("kubectl", "-n", "llm", *words, env=env, stdout=-1, stderr=-1)

    async def kubectl(self, *words: str) -> str:
        process = await self.start_kubectl(*words)
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    def deployment(self, name: str) -> Json:
        return self.api.store.get(DEPLOYMENT, "llm", f"baton-{name}")

    async def replicas(self, name: str, wanted: int) -> None:
        async with asyncio.timeout(240):
            while self.deployment(name).get("status", {}).get("availableReplicas") != wanted:
                await asyncio.sleep(0.02)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with KubeApi() as api:
        nodes = PaperNodes()
        async with Controllers(api, nodes):
            api.create_namespace("llm")
            yield Cluster(api, nodes, tmp_path)


async def test_a_release_lives_and_leaves_nothing(cluster: Cluster) -> None:
    assert await cluster.helm(f"{INSTALL} --wait") == "deployed"
    assert [len(cluster.nodes.addresses(cluster.deployment(name))) for name in ("prefill", "decode")] == [2, 3]
    secret = cluster.api.store.get(SECRET, "llm", "baton-auth")["data"]
    assert len(base64.b64decode(secret["token"])) == 43

    cluster.nodes.exits["test"] = (1, "no answer\n")
    with pytest.raises(HelmError, match="baton-test"):
        await cluster.helm("helm test baton -n llm")
    cluster.nodes.exits["test"] = (0, "baton-tiny: ok\n")
    assert "baton-tiny: ok" in await cluster.helm("helm test baton -n llm --logs")

    upgrade = "helm upgrade baton helm/baton -n llm --reuse-values --set decode.flags.max-num-seqs=7 --wait"
    assert await cluster.helm(upgrade) == "deployed"
    assert cluster.nodes.renewed == ["baton-decode"], "pods whose template is as before stay"
    assert cluster.api.store.get(SECRET, "llm", "baton-auth")["data"] == secret
    arguments = cluster.deployment("decode")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--max-num-seqs=7" in arguments

    await cluster.helm("helm upgrade baton helm/baton -n llm --reuse-values --set decode.replicas=5 --wait")
    assert len(cluster.nodes.addresses(cluster.deployment("decode"))) == 5
    await cluster.helm("helm rollback baton 1 -n llm --wait")
    assert len(cluster.nodes.addresses(cluster.deployment("decode"))) == 3
    arguments = cluster.deployment("decode")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [each for each in arguments if "max-num-seqs" in each]
    assert cluster.api.store.get(SECRET, "llm", "baton-auth")["data"] == secret

    await cluster.helm("helm uninstall baton -n llm --wait")
    left = [(kind.name, each["metadata"]["name"]) for kind in KINDS for each in cluster.api.store.find(kind, "llm")]
    async with asyncio.timeout(240):
        while cluster.api.store.find(POD, "llm"):
            await asyncio.sleep(0.02)
    assert [each for each in left if each[0] != "Pod"] == []


async def test_an_upgrade_leaves_an_autoscaled_pool_as_its_autoscaler_has_it(cluster: Cluster) -> None:
    await cluster.helm(f"{INSTALL} --set decode.autoscaling.enabled=true")
    assert "replicas" not in cluster.deployment("decode")["spec"]
    body = cluster.deployment("decode")
    body["spec"]["replicas"] = 4
    cluster.api.store.replace(DEPLOYMENT, body, "horizontal-pod-autoscaler")
    await cluster.replicas("decode", 4)
    await cluster.helm("helm upgrade baton helm/baton -n llm --reuse-values --set decode.flags.max-num-seqs=7 --wait")
    assert cluster.deployment("decode")["spec"]["replicas"] == 4
    assert len(cluster.nodes.addresses(cluster.deployment("decode"))) == 4


async def test_what_kubernetes_would_refuse_fails_the_install_by_name(cluster: Cluster) -> None:
    with pytest.raises(HelmError, match=r"(?s)baton-decode.*resources"):
        await cluster.helm(f"{INSTALL} --set decode.resources.limit.memory=4Gi")  # limits, it should be
    with pytest.raises(HelmError, match="namespaces"):
        await cluster.helm("helm install baton helm/baton -n elsewhere")


async def test_waiting_outlives_a_server_that_drops_watches_and_forgets(cluster: Cluster) -> None:
    """An upgrade waits for its pods while streams end and the history is gone: 410, listed anew."""
    await cluster.helm(f"{INSTALL} --wait")
    cluster.nodes.gate.clear()
    upgrade = "helm upgrade baton helm/baton -n llm --reuse-values --set decode.replicas=4 --wait"
    running = asyncio.create_task(cluster.helm(upgrade))
    await again(cluster, running)
    cluster.nodes.gate.set()
    assert await running == "deployed"
    await cluster.replicas("decode", 4)


async def again(cluster: Cluster, running: asyncio.Task[str]) -> None:
    """Wait until a client follows Deployments, break that, and wait until it follows them again after a 410."""
    api, path = cluster.api, "/apis/apps/v1/namespaces/llm/deployments"
    gone = api.gone[path]

    async def bookmark() -> None:
        seen = api.bookmarks[path]
        while api.bookmarks[path] == seen:
            assert not running.done()
            await asyncio.sleep(0.02)

    async with asyncio.timeout(240):
        await bookmark()
        await bookmark()  # a stream that ends at once is taken for a mistake, not for one to continue
        api.store.forget()
        api.store.drop_watches()
        await bookmark()
    assert api.gone[path] > gone


@needs_kubectl
async def test_kubectl_scales_waits_and_restarts(cluster: Cluster) -> None:
    await cluster.helm(f"{INSTALL} --wait")
    await cluster.kubectl("scale", "deployment/baton-decode", "--replicas=5")
    assert "successfully rolled out" in await cluster.kubectl("rollout", "status", "deployment/baton-decode")
    listed = await cluster.kubectl("get", "pods", "-l", "baton/pool=decode", "-o", "name")
    assert len(listed.split()) == 5
    cluster.nodes.gate.clear()
    await cluster.kubectl("rollout", "restart", "deployment/baton-decode")
    running = asyncio.create_task(cluster.kubectl("rollout", "status", "deployment/baton-decode"))
    await again(cluster, running)
    cluster.nodes.gate.set()
    assert "successfully rolled out" in await running
    assert cluster.nodes.renewed == ["baton-decode"]
    # kubectl owns the number now: an upgrade that says another one does not take it back in silence.
    with pytest.raises(HelmError, match=r"replicas"):
        await cluster.helm("helm upgrade baton helm/baton -n llm --reuse-values --set decode.replicas=2")
    await cluster.kubectl("delete", "deployment", "baton-decode")
    with pytest.raises(ApiError):
        cluster.deployment("decode")


async def test_server_side_apply_keeps_the_fields_of_others(cluster: Cluster) -> None:
    store = cluster.api.store
    kind = BY_NAME["v1", "ConfigMap"]

    def config(**data: str) -> Json:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "llm"}, "data": data}

    store.apply(kind, config(a="1", b="1"), "one", force=False)
    store.apply(kind, config(b="1", c="1"), "two", force=False)
    version = store.get(kind, "llm", "c")["metadata"]["resourceVersion"]
    store.apply(kind, config(b="1", c="1"), "two", force=False)
    assert store.get(kind, "llm", "c")["metadata"]["resourceVersion"] == version, "nothing changed"
    with pytest.raises(ApiError, match=r'conflict with "one": \.data\.a'):
        store.apply(kind, config(a="2", c="1"), "two", force=False)
    body, new = store.apply(kind, config(a="2", c="1"), "two", force=True)
    assert (body["data"], new) == ({"a": "2", "b": "1", "c": "1"}, False)
    body, _ = store.apply(kind, config(b="1"), "one", force=False)
    assert body["data"] == {"a": "2", "b": "1", "c": "1"}
    body, _ = store.apply(kind, config(), "two", force=False)
    assert body["data"] == {"b": "1"}
    stale = config(b="3")
    stale["metadata"]["resourceVersion"] = version
    with pytest.raises(ApiError, match="has been modified"):
        store.replace(kind, stale, "three")


async def test_lists_come_in_pages_and_an_old_page_is_gone(cluster: Cluster) -> None:
    import httpx

    for name in ("a", "b", "c"):
        cluster.api.create_namespace(name)
    async with httpx.AsyncClient(base_url=cluster.api.url, trust_env=False, timeout=240) as client:
        first = (await client.get("/api/v1/namespaces", params={"limit": 4})).json()
        more = {"limit": 4, "continue": first["metadata"]["continue"]}
        second = (await client.get("/api/v1/namespaces", params=more)).json()
        names = [each["metadata"]["name"] for page in (first, second) for each in page["items"]]
        assert names == ["a", "b", "c", "default", "kube-system", "llm"]
        cluster.api.store.forget()
        assert (await client.get("/api/v1/namespaces", params=more)).status_code == 410
        query = {"watch": "1", "allowWatchBookmarks": "true", "sendInitialEvents": "true", "timeoutSeconds": "1"}
        lines = (await client.get("/api/v1/namespaces", params=query)).text.splitlines()
        assert sum('"ADDED"' in line for line in lines) == 6
        assert '"k8s.io/initial-events-end": "true"' in lines[6]
