"""The chart's values: linted, held to the closed schema; examples valid for the oldest and the newest Kubernetes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
import helm_python
import kubernetes_validate
from kubernetes_validate import utils
from tests.support.chart import CHART, EXAMPLES, ROOT, example, manifests, render, without_secrets

OLDEST, NEWEST = "1.28", "1.37"
CUSTOM = {
    "gateway.networking.k8s.io/v1/HTTPRoute": {"parentRefs", "hostnames", "rules"},
    "cert-manager.io/v1/Certificate": {"secretName", "duration", "privateKey", "usages", "dnsNames", "issuerRef"},
    "monitoring.coreos.com/v1/PodMonitor": {"selector", "podMetricsEndpoints"},
    "monitoring.coreos.com/v1/PrometheusRule": {"groups"},
    "keda.sh/v1alpha1/ScaledObject": {
        "scaleTargetRef",
        "minReplicaCount",
        "maxReplicaCount",
        "advanced",
        "triggers",
    },
}
"""Kinds that are not Kubernetes' own, with the fields of their spec that the chart uses."""


@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, example(name) if name else {}, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_every_object_of_the_schema_is_closed_and_every_value_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def look(node: dict[str, Any], values: Any, path: str) -> None:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        if path.endswith(".flags") or path in (".prefill", ".decode"):
            return
        assert set(values) == set(node["properties"]) - {"global", "role"}, path
        for name, child in node["properties"].items():
            if name not in ("global", "role"):
                look(child, values[name], f"{path}.{name}")

    look(schema, defaults, "")


def values(text: str) -> dict[str, Any]:
    return helm_python.parse_set_string(text)


@pytest.mark.parametrize(
    "text",
    [
        "prefill.replicas=2,decode.replicas=3,model.source=Qwen/Qwen3-8B",
        "decode.flags.max-num-seqs=128,decode.flags.kv-memory-fraction=0.5,decode.flags.prefix-caching=false",
        "router.flags.policy=cost_ms,router.flags.cors-origins={https://a.example,https://b.example}",
        "pools.long.role=prefill,pools.long.replicas=2,pools.long.flags.tp=2",
        "kvstore.enabled=true,kvstore.flags.capacity-bytes=17179869184",
    ],
)
def test_these_values_are_taken(text: str) -> None:
    assert manifests(values(text))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prefil.replicas=2", "prefil"),
        ("decode.replica=2", "replica"),
        ("decode.replicas=-1", "replicas"),
        ("decode.replicas=two", "replicas"),
        ("decode.role=prefill", "decode"),
        ("decode.flags.max-num-seq=128", "max-num-seq"),
        ("decode.flags.max-num-seqs=many", "max-num-seqs"),
        ("decode.flags.dtype=fp8", "dtype"),
        ("decode.flags.port=1", "port"),
        ("router.flags.token-file=x", "token-file"),
        ("kvstore.replication=3", "replication"),
        ("kvstore.flags.eviction=fifo", "eviction"),
        ("pools.long.replicas=1", "role"),
        ("pools.prefill.role=prefill", "prefill"),
        ("pools.Long.role=prefill", "Long"),
        ("model.sha256=abc", "sha256"),
        ("router.image.digest=latest", "digest"),
        ("worker.pipes={udp}", "pipes"),
        ("router.service.port=0", "port"),
        ("router.replicas=2", "redis.enabled"),
        ("router.autoscaling.enabled=true", "redis.enabled"),
        ("redis.enabled=true,redis.existingSecret=other", "redis.existingSecret"),
        ("kvstore.enabled=true,kvstore.replication=2", "kvstore.replicas"),
        ("tls.enabled=true", "tls.certManager.issuerRef"),
        ("router.ingress.enabled=true", "router.ingress.host"),
        ("router.httpRoute.enabled=true", "parentRefs"),
        ("monitoring.podMonitor.enabled=true", "networkPolicy.monitoring"),
        ("decode.autoscaling.enabled=true,decode.autoscaling.kind=keda", "autoscaling.prometheus"),
        ("model.init.image=models/acme", "model.servedName"),
        ("decode.leaderWorkerSet.size=2", "leaderWorkerSet"),
        ("pools.big.role=prefill,pools.big.nodes=2", "nodes"),
        ("decode.replicas=0", "decode.replicas"),
        (r"decode.resources.limits.nvidia\.com/gpu=1", "decode.flags.device"),
        (r"worker.resources.limits.amd\.com/gpu=1", "flags.device"),
        (r"pools.big.role=prefill,pools.big.resources.limits.nvidia\.com/mig-1g\.5gb=1", "big.flags.device"),
    ],
)
def test_these_values_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(named)):
        render(values(text))


def test_a_gpu_with_its_device_and_decodes_in_another_pool_are_taken() -> None:
    gpu = r"decode.resources.limits.nvidia\.com/gpu=1,decode.flags.device=cuda:0"
    assert "nvidia.com/gpu" in str(render(values(gpu)))
    assert render(values("decode.replicas=0,pools.more.role=decode,pools.more.replicas=1"))


def validate(each: dict[str, Any], version: str) -> None:
    kind = f"{each['apiVersion']}/{each['kind']}"
    if kind in CUSTOM:
        assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
        assert set(each["spec"]) <= CUSTOM[kind], kind
    else:
        assert kubernetes_validate.validate(each, version, strict=True) == version


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_valid(name: str, version: str) -> None:
    objects = manifests(example(name))
    assert objects
    for each in objects:
        validate(each, version)
    identities = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(identities)) == len(identities)


def test_validation_sees_unknown_kinds_fields_and_types() -> None:
    (service, *_) = [each for each in manifests() if each["kind"] == "Service"]
    for changed in (
        service | {"kind": "Sevrice"},
        service | {"spec": service["spec"] | {"selectors": {}}},
        service | {"spec": service["spec"] | {"ports": "http"}},
    ):
        with pytest.raises((utils.SchemaNotFoundError, kubernetes_validate.ValidationError)):
            validate(changed, NEWEST)


def test_the_supported_versions_are_those_of_the_chart_and_the_document() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    assert utils.all_versions()[-1].startswith(NEWEST)
    assert f"{OLDEST} to {NEWEST}" in (ROOT / "docs/kubernetes.md").read_text()
    version: dict[str, str] = {}
    exec((ROOT / "src/baton/version.py").read_text(), version)
    assert chart["appVersion"] == version["__version__"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_render_to_their_golden_files(name: str) -> None:
    golden = Path(__file__).parent / f"golden/{name}.yaml"
    assert without_secrets(render(example(name))) == golden.read_text(), "python -m tests.helm.write_golden"


def test_secrets_are_drawn_anew_and_long() -> None:
    made = [
        {
            each["metadata"]["name"]: each["stringData"]
            for each in manifests({"redis": {"enabled": True}})
            if each["kind"] == "Secret"
        }
        for _ in range(2)
    ]
    for key in ("token", "tenant-secret", "ticket-key", "api-key"):
        first, second = (each["demo-baton-auth"][key] for each in made)
        assert first != second
        assert len(first) == 43
    assert made[0]["demo-baton-redis"]["password"] in made[0]["demo-baton-redis"]["url"]


def test_notes_say_how_to_try_it() -> None:
    notes = render(notes=True)
    assert "helm -n prod test demo" in notes
    assert "service/demo-baton 8000" in notes
    assert "WARNING" not in notes
    assert "WARNING" in render({"auth": {"apiKeys": False}}, notes=True)
