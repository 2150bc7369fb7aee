"""The kinds that the API server of the tests knows, and what it says of itself: groups, versions, OpenAPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VERSION = "1.33"
"""The Kubernetes that it says it is, and whose schemas objects must fit."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of objects.

    Attributes:
        api: ``apiVersion``: ``v1``, ``apps/v1``.
        name: ``kind``.
        plural: In URLs.
        namespaced: Whether its objects stand in a namespace.
        short: Short name for kubectl.
        scales: Whether it has the subresource ``scale``.
    """

    api: str
    name: str
    plural: str
    namespaced: bool = True
    short: str = ""
    scales: bool = False

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api.rpartition("/")[0]

    @property
    def root(self) -> str:
        """Beginning of its URLs."""
        return f"/apis/{self.api}" if self.group else f"/api/{self.api}"

    @property
    def subresources(self) -> list[str]:
        """The parts of an object that have URLs of their own."""
        found = ["status"] if self.name in ("Deployment", "StatefulSet", "Pod", "HorizontalPodAutoscaler") else []
        return [*found, *(["scale"] if self.scales else []), *(["log"] if self.name == "Pod" else [])]


KINDS = (
    Kind("v1", "Namespace", "namespaces", namespaced=False, short="ns"),
    Kind("v1", "Pod", "pods", short="po"),
    Kind("v1", "Service", "services", short="svc"),
    Kind("v1", "Secret", "secrets"),
    Kind("v1", "ConfigMap", "configmaps", short="cm"),
    Kind("v1", "ServiceAccount", "serviceaccounts", short="sa"),
    Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", short="pvc"),
    Kind("v1", "Event", "events", short="ev"),
    Kind("apps/v1", "Deployment", "deployments", short="deploy", scales=True),
    Kind("apps/v1", "ReplicaSet", "replicasets", short="rs", scales=True),
    Kind("apps/v1", "StatefulSet", "statefulsets", short="sts", scales=True),
    Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", short="hpa"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", short="pdb"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", short="netpol"),
    Kind("networking.k8s.io/v1", "Ingress", "ingresses", short="ing"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
)
BY_NAME = {(kind.api, kind.name): kind for kind in KINDS}
BY_URL = {(kind.root, kind.plural): kind for kind in KINDS}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def versions() -> Json:
    """Answer ``/version``."""
    major, minor = VERSION.split(".")
    return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0", "platform": "linux/amd64"}


def groups() -> Json:
    """Answer ``/apis``."""
    apis = dict.fromkeys(kind.api for kind in KINDS if kind.group)
    found = []
    for api in apis:
        group, _, version = api.partition("/")
        one = {"groupVersion": api, "version": version}
        found.append({"name": group, "versions": [one], "preferredVersion": one})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


def resources(api: str) -> Json:
    """Answer ``/api/v1`` or ``/apis/GROUP/VERSION``."""
    found: list[Json] = []
    for kind in KINDS:
        if kind.api != api:
            continue
        entry = {"name": kind.plural, "singularName": kind.name.lower(), "kind": kind.name}
        entry |= {"namespaced": kind.namespaced, "verbs": _VERBS, "shortNames": [kind.short] if kind.short else []}
        found.append(entry)
        for part in kind.subresources:
            part_kind = {"group": "autoscaling", "version": "v1", "kind": "Scale"} if part == "scale" else {}
            found.append(
                {"name": f"{kind.plural}/{part}", "singularName": "", "kind": kind.name}
                | part_kind
                | {"namespaced": True, "verbs": ["get", "patch", "update"]}
            )
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": found}


def openapi_index() -> Json:
    """Answer ``/openapi/v3``."""
    roots = dict.fromkeys(kind.root for kind in KINDS)
    return {"paths": {root[1:]: {"serverRelativeURL": f"/openapi/v3{root}?hash={VERSION}"} for root in roots}}


def openapi(root: str) -> Json:
    """Answer for one group and version: that writes may be validated, which is what clients look for."""
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string"}}
        for name in ("dryRun", "fieldManager", "fieldValidation", "force")
    ]
    paths = {}
    for kind in (each for each in KINDS if each.root == root):
        where = f"{root}/namespaces/{{namespace}}" if kind.namespaced else root
        operation = {
            "operationId": f"patch{kind.name}",
            "parameters": parameters,
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-group-version-kind": {
                "group": kind.group,
                "version": kind.api.rpartition("/")[2],
                "kind": kind.name,
            },
        }
        paths[f"{where}/{kind.plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": f"v{VERSION}.0"}, "paths": paths}
