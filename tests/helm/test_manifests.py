"""What the chart's objects say to each other: labels, ports, files, flags as services read them, metrics that exist."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
from tests.support.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    ROOT,
    Manifest,
    arguments,
    example,
    manifests,
    named,
    pods,
    render,
)

from baton.config import EngineConfig, add_flags, from_flags
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton_router.registry.discovery import Slices

SERVICES: dict[str, tuple[type, ...]] = {
    "baton-router": (RouterConfig,),
    "baton-prefill": (WorkerConfig, EngineConfig),
    "baton-decode": (WorkerConfig, EngineConfig),
    "baton-kvstore": (KVStoreConfig,),
}


@pytest.fixture(params=["", *EXAMPLES], ids=lambda name: name or "defaults")
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return manifests(example(request.param) if request.param else None)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_every_selector_finds_its_own_pods_and_no_others(objects: list[Manifest]) -> None:
    found = list(pods(objects))
    for owner, pod in found:
        if owner["kind"] == "Pod":
            continue
        selector = owner["spec"]["selector"]["matchLabels"]
        of = [each["metadata"]["name"] for each, template in found if selects(selector, template["metadata"]["labels"])]
        assert of == [owner["metadata"]["name"]]
        for spread in pod["spec"].get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"] == selector
    for each in objects:
        if each["kind"] == "PodDisruptionBudget":
            same = named(
                objects,
                "StatefulSet" if each["metadata"]["name"].endswith("kvstore") else "Deployment",
                each["metadata"]["name"],
            )
            assert each["spec"] == {"maxUnavailable": 1, "selector": same["spec"]["selector"]}


def test_services_reach_ports_that_their_pods_declare(objects: list[Manifest]) -> None:
    for service in (each for each in objects if each["kind"] == "Service"):
        reached = [pod for _, pod in pods(objects) if selects(service["spec"]["selector"], pod["metadata"]["labels"])]
        assert reached, service["metadata"]["name"]
        for pod in reached:
            names = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for each in objects:
        if each["kind"] == "Ingress":
            backend = each["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
            service = named(objects, "Service", backend["name"])
            assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
        if each["kind"] == "HTTPRoute":
            (backend,) = each["spec"]["rules"][0]["backendRefs"]
            service = named(objects, "Service", backend["name"])
            assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}


def parsed(container: Manifest, folder: Path) -> list[Any]:
    """Have the service read the flags of a container, with the files that it would find."""
    (folder / "redis").mkdir(exist_ok=True)
    (folder / "redis/url").write_text("redis://:secret@redis:6379/0")
    (folder / "redis/url").chmod(0o600)
    parser = argparse.ArgumentParser(exit_on_error=False)
    configs = SERVICES[container["command"][0]]
    for config in configs:
        add_flags(parser, config)
    words = [word.replace("$(POD_IP)", "10.0.0.7").replace("$(POD_NAME)", "pod-0") for word in container["args"]]
    assert not [word for word in words if "$(" in word]
    args = parser.parse_args([word.replace("/run/baton/redis/", f"{folder}/redis/") for word in words])
    return [from_flags(config, args, env={}) for config in configs]


def test_services_take_their_flags_and_listen_on_the_ports_declared(objects: list[Manifest], tmp_path: Path) -> None:
    seen = set()
    for owner, pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        if container["command"][0] not in SERVICES:
            continue
        seen.add(container["command"][0])
        config, *engine = parsed(container, tmp_path)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == config.metrics_port
        if isinstance(config, RouterConfig):
            assert (ports["http"], ports["grpc"]) == (config.port, config.grpc_port)
        else:
            assert (ports["grpc"], ports["kv"]) == (config.port, config.kv_port)
        drain_s = config.drain_timeout_s
        pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["spec"]["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s + 10
        if engine and owner["kind"] == "Deployment":
            assert config.advertise == "10.0.0.7:9000"
    assert {"baton-router", "baton-prefill", "baton-decode"} <= seen


@pytest.mark.parametrize("wrong", ["--colour=red", "--max-num-seqs=1e+06", "--kvstore-replication=3"])
def test_a_flag_that_is_none_would_be_seen(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = named(manifests(), "Deployment", "demo-baton-decode")["spec"]["template"]["spec"]["containers"]
    with pytest.raises((argparse.ArgumentError, ConfigError, SystemExit)) as raised:
        parsed(container | {"args": [*container["args"], wrong]}, tmp_path)
    said = f"{raised.value} {capsys.readouterr().err}".replace("_", "-")
    assert wrong.partition("=")[0].removeprefix("--") in said


def test_values_under_flags_reach_the_services_whole(tmp_path: Path) -> None:
    values = {
        "decode": {"flags": {"kv-blocks": 123456789, "kv-memory-fraction": 0.25, "prefix-caching": False}},
        "worker": {"flags": {"max-num-seqs": 7, "kv-blocks": 5}},
        "router": {"flags": {"cors-origins": ["https://a.example", "https://b.example"], "beta": 2}},
        "kvstore": {"enabled": True, "flags": {"capacity-bytes": 1 << 40}},
    }
    objects = manifests(values)

    def configs(kind: str, name: str) -> list[Any]:
        return parsed(named(objects, kind, name)["spec"]["template"]["spec"]["containers"][0], tmp_path)

    worker, engine = configs("Deployment", "demo-baton-decode")
    assert (engine.kv_blocks, engine.kv_memory_fraction, engine.prefix_caching) == (123456789, 0.25, False)
    assert engine.max_num_seqs == 7
    assert configs("Deployment", "demo-baton-prefill")[1].kv_blocks == 5
    (router,) = configs("Deployment", "demo-baton-router")
    assert router.cors_origins == ("https://a.example", "https://b.example")
    assert router.beta == 2
    (store,) = configs("StatefulSet", "demo-baton-kvstore")
    assert store.capacity_bytes == 1 << 40
    node = "demo-baton-kvstore-0.demo-baton-kvstore.prod.svc.cluster.local:8200"
    assert (worker.kvstore, router.kvstore) == (node, (node,))


def test_routers_find_the_instances_by_endpoint_slices(objects: list[Manifest], tmp_path: Path) -> None:
    (container,) = named(objects, "Deployment", "demo-baton-router")["spec"]["template"]["spec"]["containers"]
    (router,) = parsed(container, tmp_path)
    label, _, service = router.kubernetes_selector.partition("=")
    assert (label, router.discover) == ("kubernetes.io/service-name", ("kubernetes",))
    spec = named(objects, "Service", service)["spec"]
    assert spec["clusterIP"] == "None"
    found = {
        each["metadata"]["name"] for each, pod in pods(objects) if selects(spec["selector"], pod["metadata"]["labels"])
    }
    workers = {
        each["metadata"]["name"]
        for each, pod in pods(objects)
        if pod["spec"]["containers"][0]["command"][0] in ("baton-prefill", "baton-decode")
    }
    assert found == workers
    slices = Slices(router.kubernetes_port)
    made = {
        "metadata": {"name": f"{service}-x"},
        "addressType": "IPv4",
        "ports": [{"name": port["name"], "port": port["port"]} for port in spec["ports"]],
        "endpoints": [{"addresses": ["10.0.0.7"], "conditions": {"ready": True}}],
    }
    slices.replace([made])
    assert slices.addresses() == {"10.0.0.7:9000"}


def test_the_router_alone_may_ask_the_api_server_and_only_where_instances_are(objects: list[Manifest]) -> None:
    roles = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Role"}
    # What the autoscaler may, where there is one, is looked at in test_autoscale.py.
    extra = {"demo-baton-autoscaler"} if "demo-baton-autoscaler" in roles else set()
    assert set(roles) == {"demo-baton-router"} | extra
    assert roles["demo-baton-router"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert not [each for each in objects if each["kind"].startswith("Cluster")]
    bindings = {each["roleRef"]["name"]: each for each in objects if each["kind"] == "RoleBinding"}
    assert set(bindings) == set(roles)
    (subject,) = bindings["demo-baton-router"]["subjects"]
    accounts = {each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"}
    for owner, pod in pods(objects):
        assert pod["spec"]["serviceAccountName"] in accounts
        router = owner["metadata"]["name"] == "demo-baton-router"
        assert pod["spec"]["automountServiceAccountToken"] is (router or owner["metadata"]["name"] in extra)
        assert (pod["spec"]["serviceAccountName"] == subject["name"]) is router


def test_temporary_files_of_a_pod_cannot_fill_its_node(objects: list[Manifest]) -> None:
    for owner, pod in pods(objects):
        for volume in pod["spec"].get("volumes", ()):
            if volume["name"] in ("tmp", "shm"):
                assert volume["emptyDir"].get("sizeLimit"), owner["metadata"]["name"]


def test_files_that_flags_name_are_mounted_and_in_the_secrets(objects: list[Manifest]) -> None:
    made = {each["metadata"]["name"]: set(each["stringData"]) for each in objects if each["kind"] == "Secret"}
    for owner, pod in pods(objects):
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        volumes |= {each["metadata"]["name"]: each for each in owner["spec"].get("volumeClaimTemplates", ())}
        containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
        for container in containers:
            mounted = {each["mountPath"]: each for each in container["volumeMounts"]}
            assert {each["name"] for each in container["volumeMounts"]} <= set(volumes)
            for path in re.findall(r"/run/baton/[a-z-]+/[\w.-]+", " ".join(container.get("args", ()))):
                if container["name"] == "test":
                    continue
                folder, _, name = path.rpartition("/")
                assert mounted[folder]["readOnly"] is True  # else a file that others can read is refused
                secret = volumes[mounted[folder]["name"]].get("secret")
                if secret and "items" in secret:
                    keys = {each["path"]: each["key"] for each in secret["items"]}
                    assert keys[name] in made.get(secret["secretName"], {keys[name]})
            for each in container.get("env", ()):
                assert "secretKeyRef" not in each.get("valueFrom", {})


def test_pods_are_given_no_variables_of_services(objects: list[Manifest]) -> None:
    """A Service called baton would make BATON_PORT=tcp://..., which Baton reads as a flag."""
    assert all(pod["spec"]["enableServiceLinks"] is False for _, pod in pods(objects))


def test_replicas_are_left_to_the_autoscaler_where_there_is_one() -> None:
    objects = manifests(example("2p4d-tp2")) + manifests(example("several-routers"))
    scaled = {
        each["spec"]["scaleTargetRef"]["name"]
        for each in objects
        if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")
    }
    assert scaled == {"demo-baton-decode", "demo-baton-router"}
    without = [
        each["metadata"]["name"] for each in objects if each["kind"] == "Deployment" and "replicas" not in each["spec"]
    ]
    assert set(without) == scaled


def ingress(objects: list[Manifest], target: dict[str, str]) -> list[tuple[set[int], list[Manifest] | None]]:
    """Return for pods with these labels (ports, from) of each rule of the policies that hold for them."""
    rules = []
    for each in objects:
        if each["kind"] == "NetworkPolicy" and selects(each["spec"]["podSelector"]["matchLabels"], target):
            for rule in each["spec"]["ingress"]:
                ports = {n for x in rule.get("ports", ()) for n in range(x["port"], x.get("endPort", x["port"]) + 1)}
                rules.append((ports, rule.get("from")))
    return rules


def admits(objects: list[Manifest], target: dict[str, str], port: int, source: dict[str, str]) -> bool:
    return any(
        (not ports or port in ports)
        and (
            peers is None or any(selects(x["podSelector"]["matchLabels"], source) for x in peers if "podSelector" in x)
        )
        for ports, peers in ingress(objects, target)
    )


def egress(objects: list[Manifest], source: dict[str, str]) -> list[tuple[set[int], list[Manifest] | None]] | None:
    """Return for pods with these labels (ports, to) of each rule; ``None``: what goes out is not limited."""
    rules = []
    limited = False
    for each in objects:
        spec = each["spec"] if each["kind"] == "NetworkPolicy" else {"policyTypes": []}
        if "Egress" in spec["policyTypes"] and selects(spec["podSelector"]["matchLabels"], source):
            limited = True
            for rule in spec["egress"]:
                ports = {n for x in rule.get("ports", ()) for n in range(x["port"], x.get("endPort", x["port"]) + 1)}
                rules.append((ports, rule.get("to")))
    return rules if limited else None


def lets_out(objects: list[Manifest], source: dict[str, str], port: int, target: dict[str, str]) -> bool:
    """Return whether rules that name pods let a source reach a pod of the chart."""
    rules = egress(objects, source)
    assert rules is not None
    return any(
        (not ports or port in ports) and any(selects(x["podSelector"]["matchLabels"], target) for x in peers or ())
        for ports, peers in rules
    )


def beyond(objects: list[Manifest], source: dict[str, str]) -> set[int]:
    """Return the ports at which a source reaches any address."""
    rules = egress(objects, source)
    assert rules is not None
    assert all(ports for ports, peers in rules if peers is None), "every port of every address is open"
    return {port for ports, peers in rules if peers is None for port in ports}


def labels_of(objects: list[Manifest], name: str) -> dict[str, str]:
    (found,) = [pod["metadata"]["labels"] for owner, pod in pods(objects) if owner["metadata"]["name"] == name]
    return dict(found)


def test_network_policies_let_services_reach_each_other_and_nobody_else() -> None:
    objects = manifests(
        {"kvstore": {"enabled": True}, "redis": {"enabled": True}, "pools": {"more": {"role": "decode"}}}
    )
    router, prefill, decode, more, store, redis = (
        labels_of(objects, f"demo-baton-{name}") for name in ("router", "prefill", "decode", "more", "kvstore", "redis")
    )
    test, other = labels_of(objects, "demo-baton-test"), {"app": "other"}
    workers = [prefill, decode, more]
    for worker in workers:
        assert admits(objects, worker, 9000, router)
        assert admits(objects, worker, 9001, store)
        assert not admits(objects, worker, 9001, router)
        assert not any(admits(objects, worker, port, each) for port in (9000, 9001) for each in (test, other, redis))
        for source in workers:
            assert admits(objects, worker, 9000, source)
            assert admits(objects, worker, 9001, source)
        for port in (8200, 8300, 8315):
            assert admits(objects, store, port, worker)
        assert not admits(objects, redis, 6379, worker)
    assert admits(objects, store, 8200, router)
    assert not admits(objects, store, 8300, router)
    assert not admits(objects, store, 8316, prefill)
    assert not any(admits(objects, store, port, other) for port in (8200, 8300))
    assert admits(objects, redis, 6379, router)
    assert not admits(objects, redis, 6379, other)
    assert admits(objects, router, 8000, other)  # networkPolicy.clients: nobody named, so everybody
    several = manifests(example("several-routers"))
    assert not admits(several, labels_of(several, "demo-baton-router"), 8000, other)
    assert admits(several, labels_of(several, "demo-baton-router"), 8000, labels_of(several, "demo-baton-test"))


ALL = {
    "kvstore": {"enabled": True},
    "redis": {"enabled": True},
    "autoscaler": {"enabled": True},
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
}
KV_STORE = range(8300, 8316)
REACHES = {
    ("router", "prefill"): {9000},
    ("router", "decode"): {9000},
    ("router", "kvstore"): {8200},
    ("router", "redis"): {6379},
    **{(one, other): {9000, 9001} for one in ("prefill", "decode") for other in ("prefill", "decode")},
    **{(one, "kvstore"): {8200, *KV_STORE} for one in ("prefill", "decode", "kvstore")},
    **{("kvstore", one): {9001} for one in ("prefill", "decode")},
    ("autoscaler", "router"): {8001},
    ("test", "router"): {8000},
}
"""Connections that there are: who dials whom, at which ports."""
API_SERVER = {443, 6443}


@pytest.mark.parametrize("component", ["router", "prefill", "decode", "kvstore", "redis", "autoscaler", "test"])
def test_a_component_reaches_what_it_needs_and_nothing_else(component: str) -> None:
    objects = manifests(ALL)
    known = {
        owner["metadata"]["name"].removeprefix("demo-baton-"): pod["metadata"]["labels"] for owner, pod in pods(objects)
    }
    ports = {8000, 8001, 9000, 9001, 9090, 8200, 8299, *KV_STORE, 8316, 6379, 22, 40000}
    for name, labels in known.items():
        let_out = {port for port in ports if lets_out(objects, known[component], port, labels)}
        let_in = {port for port in ports if admits(objects, labels, port, known[component])}
        assert let_out == REACHES.get((component, name), set()), name
        assert let_out <= let_in, name
    dns = set() if component == "redis" else {53}
    assert beyond(objects, known[component]) == dns | (API_SERVER if component in ("router", "autoscaler") else set())


@pytest.mark.parametrize("pipe", ["nixl", "gloo"])
def test_pipes_that_choose_their_ports_reach_instances_alone_at_any(pipe: str) -> None:
    objects = manifests({"worker": {"pipes": [pipe, "tcp"]}})
    router, prefill, decode = (labels_of(objects, f"demo-baton-{name}") for name in ("router", "prefill", "decode"))
    assert lets_out(objects, prefill, 40000, decode)
    assert lets_out(objects, decode, 40000, prefill)
    assert not lets_out(objects, prefill, 40000, router)
    assert beyond(objects, decode) == {53}


@pytest.mark.parametrize(
    ("values", "opened"),
    [
        ({"redis": {"existingSecret": "elsewhere"}}, {"router": {6379}}),
        ({"router": {"flags": {"otlp-traces-endpoint": "http://collector:4317"}}}, {"router": {4317}}),
        (
            {"worker": {"flags": {"otlp-traces-endpoint": "https://collector:444/v1"}}},
            {"prefill": {444}, "decode": {444}},
        ),
        (
            {"worker": {"env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://c"}]}},
            {"prefill": {4317}, "decode": {4317}},
        ),
        ({"kvstore": {"flags": {"otlp-traces-endpoint": "http://[fd00::7]:4320"}}}, {"kvstore": {4320}}),
        ({"kvstore": {"flags": {"redis-url": "redis://:12345@cache:6380/0"}}}, {"kvstore": {6380}}),
        ({"kvstore": {"flags": {"redis-url": "@/run/secret/url"}}}, {"kvstore": {6379}}),
        ({"kvstore": {"flags": {"object-url": "s3://bucket/blocks"}}}, {"kvstore": {443}}),
        ({"model": {"source": "Qwen/Qwen3-8B"}}, {"router": {443}, "prefill": {443}, "decode": {443}}),
        ({"model": {"source": "pvc://models/llama"}}, {}),
        (
            {"decode": {"flags": {"speculative": "draft", "speculative-model": "Qwen/Qwen3-0.6B"}}},
            {"prefill": {443}, "decode": {443}},  # one policy holds for all instances
        ),
        ({"decode": {"flags": {"speculative": "draft", "speculative-model": "/srv/draft"}}}, {}),
        ({"model": {"source": "/srv/model"}}, {}),
        ({"model": {"source": "http://here:8088/m.tar"}}, {"router": {8088}, "prefill": {8088}, "decode": {8088}}),
        ({"model": {"source": "https://here/m.tar"}}, {"router": {443}, "prefill": {443}, "decode": {443}}),
        (
            {"model": {"source": "Qwen/Qwen3-8B"}, "worker": {"env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]}},
            {"router": {443}},
        ),
    ],
)
def test_addresses_that_values_name_open_their_ports_for_those_that_use_them(
    values: dict[str, Any], opened: dict[str, set[int]]
) -> None:
    objects = manifests({**values, "kvstore": {"enabled": True, **values.get("kvstore", {})}})
    for name in ("router", "prefill", "decode", "kvstore"):
        always = {53} | (API_SERVER if name == "router" else set())
        assert beyond(objects, labels_of(objects, f"demo-baton-{name}")) == always | opened.get(name, set()), name


def test_egress_can_be_widened_narrowed_and_left_open() -> None:
    proxy = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}
    dns: list[Manifest] = [{"namespaceSelector": {}}]
    server = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    narrow = manifests({**ALL, "networkPolicy": {"egress": {"extra": [proxy], "dns": dns, "apiServer": server}}})
    for name in ("router", "prefill", "decode", "kvstore", "autoscaler", "test", "redis"):
        rules = egress(narrow, labels_of(narrow, f"demo-baton-{name}")) or []
        assert (({3128}, proxy["to"]) in rules) is (name != "redis")
        assert (({53}, dns) in rules) is (name != "redis")
        assert ((API_SERVER, server) in rules) is (name in ("router", "autoscaler"))
        assert beyond(narrow, labels_of(narrow, f"demo-baton-{name}")) == set()
    free = manifests({**ALL, "networkPolicy": {"egress": {"open": True}}})
    policies = [each["spec"] for each in free if each["kind"] == "NetworkPolicy"]
    assert len(policies) == 6
    assert all(each["policyTypes"] == ["Ingress"] and "egress" not in each for each in policies)


def test_metrics_can_be_read_by_those_alone_who_are_named() -> None:
    kvstore = {"enabled": True}
    prometheus = {"app": "prometheus"}
    names = ("router", "prefill", "decode", "kvstore")
    closed = manifests({"kvstore": kvstore})
    named = manifests(
        {"kvstore": kvstore, "networkPolicy": {"monitoring": [{"podSelector": {"matchLabels": prometheus}}]}}
    )
    for name in (f"demo-baton-{each}" for each in names):
        target = labels_of(closed, name)
        sources = [{"app": "other"}, prometheus, *(labels_of(closed, f"demo-baton-{each}") for each in names)]
        assert not any(admits(closed, target, 9090, source) for source in sources)
        assert admits(named, target, 9090, prometheus)
        assert not admits(named, target, 9090, {"app": "other"})


def test_with_tls_probes_calls_and_kv_go_by_it() -> None:
    values = {"tls": {"enabled": True, "existingSecret": "certs"}, "kvstore": {"enabled": True}}
    objects = manifests(values)
    for name in ("prefill", "decode", "kvstore"):
        flags = arguments(objects, f"demo-baton-{name}")
        assert flags["pipes"] == "tls"
        assert flags["tls-name"] == f"demo-baton.{NAMESPACE}.svc"
    for owner, pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if owner["metadata"]["name"] == "demo-baton-router":
                assert container[probe]["httpGet"]["scheme"] == "HTTPS"
            elif container["name"] != "test":
                command = container[probe]["exec"]["command"]
                assert command[:2] == ["baton", "health"]
                assert ("--service=liveness" in command) is (probe != "readinessProbe")
    clear = manifests({"tls": {**values["tls"], "clearKv": True}, "router": {"httpTls": False}})
    assert arguments(clear, "demo-baton-decode")["pipes"] == "tcp"
    assert "clear-kv" in arguments(clear, "demo-baton-decode")
    assert "no-http-tls" in arguments(clear, "demo-baton-router")


@pytest.mark.parametrize(
    ("source", "worker", "router"),
    [
        ("", "/opt/baton/models/baton-tiny", "/opt/baton/models/baton-tiny"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("pvc://models/llama/8b", "/models/llama/8b", "/models/llama/8b"),
        ("/srv/model", "/srv/model", "/srv/model"),
    ],
)
def test_instances_and_router_look_for_the_model_where_it_is(source: str, worker: str, router: str) -> None:
    objects = manifests({"model": {"source": source}})
    assert arguments(objects, "demo-baton-decode")["model"] == worker
    assert arguments(objects, "demo-baton-router")["model"] == router


def test_a_model_from_an_archive_is_fetched_for_the_router_without_weights() -> None:
    objects = manifests({"model": {"source": "https://models.example/acme-7b.tar.gz", "sha256": "0" * 64}})
    (worker, router) = (
        named(objects, "Deployment", f"demo-baton-{name}")["spec"]["template"]["spec"]["initContainers"][0]["args"]
        for name in ("decode", "router")
    )
    assert worker[1] == arguments(objects, "demo-baton-decode")["model"]
    assert router[1] == arguments(objects, "demo-baton-router")["model"] == f"{worker[1]}-light"
    assert router[-1] == "--no-weights"
    assert arguments(objects, "demo-baton-decode")["served-model-name"] == "acme-7b"


def expressions() -> list[str]:
    alerts = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    scaled = re.findall(r"query: (.*)", (CHART / "templates/_scaling.tpl").read_text())
    adapter = re.findall(r"metric: \{name: (\w+)\}", (CHART / "templates/_scaling.tpl").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*(each["expr"] for each in alerts), *shown, *scaled, *adapter]


def test_alerts_panels_and_scalers_ask_for_metrics_that_exist() -> None:
    cells = re.findall(r"^\| (`baton_.+?) \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    rows = [
        (name, kind, text) for cell, kind in cells for name, text in re.findall(r"`(baton_\w+)(?:\{([\w,]+)\})?`", cell)
    ]
    known = {name for name, kind, _ in rows if kind != "histogram"}
    known |= {f"{name}_{end}" for name, kind, _ in rows if kind == "histogram" for end in ("bucket", "sum", "count")}
    labels = {name: set(text.split(",")) for name, _, text in rows}
    found = expressions()
    assert len(found) > 30
    for expression in found:
        names = re.findall(r"\bbaton_\w+", expression)
        assert names
        assert set(names) <= known, expression
        for name, inside in re.findall(r"\b(baton_\w+)\{([^}]*)\}", expression):
            base = name if name in labels else name.removesuffix("_bucket")
            used = set(re.findall(r"(\w+)!?=~?", inside)) - {"namespace", "pod"}
            assert used <= labels[base], expression


def test_alert_rules_are_rendered_for_this_release() -> None:
    (rule,) = [each for each in manifests(example("1p1d")) if each["kind"] == "PrometheusRule"]
    rules = rule["spec"]["groups"][0]["rules"]
    assert len({each["alert"] for each in rules}) == len(rules) > 10
    assert all(f'namespace="{NAMESPACE}",pod=~"demo-baton-.*"' in each["expr"] for each in rules)
    assert "SELECTOR" not in render(example("1p1d"))
