"""Where a Kubernetes cluster's API server is, and in whose name it is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from baton.config.flags import option

ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
API_HELP = "URL of the API server; default: the one of this pod's cluster"
ACCOUNT_HELP = "folder with the service account's token, ca.crt, namespace"


@dataclass(frozen=True)
class KubernetesConfig:
    """Whose pods the controller of the ratio counts."""

    kubernetes_prefill: str = option("", "Deployment of the prefill instances, whose replicas are patched")
    kubernetes_decode: str = option("", "Deployment of the decode instances, likewise")
    kubernetes_namespace: str = option("", "where they are; default: this pod's namespace")
    kubernetes_api: str = option("", API_HELP)
    kubernetes_account: str = option(ACCOUNT_FOLDER, ACCOUNT_HELP)


def in_cluster_api() -> str:
    """Return the URL of the API server of the cluster in which this is a pod; empty: it is none."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""
