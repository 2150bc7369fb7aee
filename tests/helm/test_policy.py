"""A scan of all examples' manifests for bad habits; what is left has a reason here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make install")
from tests.support.chart import EXAMPLES, example, render

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("CKV_K8S_11", ""): "a CPU limit throttles a server in the middle of a token; requests reserve what it needs",
    ("CKV_K8S_15", ""): "IfNotPresent: a registry that is away must not keep an instance from starting again",
    ("CKV_K8S_43", ""): "no image is published: whoever builds them gives image.digest, or tags that do not move",
    ("CKV_K8S_38", "demo-baton-router"): "the router asks the API server where instances are",
    ("CKV_K8S_38", "demo-baton-autoscaler"): "the autoscaler patches the replicas of two Deployments",
    ("CKV_K8S_25", "demo-baton-prefill"): "IPC_LOCK, which the example multi-pool asks for: RDMA pins memory",
    ("CKV_K8S_8", "demo-baton-test"): "helm test: a pod that asks once and ends",
    ("CKV_K8S_9", "demo-baton-test"): "helm test: a pod that asks once and ends",
}
"""By check and resource (empty: any) why a finding is none."""


def scan(folder: Path) -> list[tuple[str, str]]:
    """Return the failed checks: check and name of the object."""
    own = Path(sys.prefix) / "scan/bin/checkov"
    program = str(own) if own.exists() else shutil.which("checkov")
    if program is None:
        pytest.skip("checkov is not installed: make helm-test")
    command = [
        program,
        "-d",
        str(folder),
        "--framework",
        "kubernetes",
        "--skip-download",
        "--compact",
        "--quiet",
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["resource_count"] > 1
    return [(each["check_id"], each["resource"].rpartition(".")[2]) for each in report["results"]["failed_checks"]]


def test_every_finding_of_the_scan_has_a_reason_and_every_reason_a_finding(tmp_path: Path) -> None:
    for name in EXAMPLES:
        (tmp_path / f"{name}.yaml").write_text(render(example(name)))
    found = set(scan(tmp_path))
    assert {each for each in found if each not in EXCEPTIONS and (each[0], "") not in EXCEPTIONS} == set()
    assert {each for each in EXCEPTIONS if each not in found and each[0] not in {check for check, _ in found}} == set()


def test_the_scan_would_see_a_bad_habit(tmp_path: Path) -> None:
    text = render(example("cpu-demo"))
    (tmp_path / "bad.yaml").write_text(
        text.replace("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false").replace(
            "allowPrivilegeEscalation: false", "privileged: true"
        )
    )
    found = {check for check, _ in scan(tmp_path)}
    assert {"CKV_K8S_16", "CKV_K8S_20", "CKV_K8S_22"} <= found
