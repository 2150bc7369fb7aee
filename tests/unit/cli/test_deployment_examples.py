"""Examples for running Baton outside of Kubernetes: units, scrape targets, alerts and a dashboard that fit the code."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli.plan import Ratio, make_plan, service_configs
from baton.cli.up import add_parser
from baton.config import add_flags, from_flags
from baton.config.deployment import ListenConfig

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "examples" / "monitoring"
UNITS = sorted((ROOT / "examples" / "systemd").glob("*.service"))


def test_scrape_targets_are_the_ports_of_metrics_port() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    found = {each["labels"]["pod"]: each["targets"] for each in job["static_configs"]}
    listen = ListenConfig(port=0, grpc_port=0, metrics_port=9100)
    plan = make_plan(ratio=Ratio(2, 3), listen=listen, router_metrics_port=9100, kvstore=True)
    specs = [spec for group in plan.groups for spec in group]
    expected = {spec.name: [dict(spec.listens)["metrics"].removesuffix("/metrics")] for spec in specs}
    assert found == expected | {"autoscale": [f"127.0.0.1:{plan.scaling_metrics_port}"]}
    assert config["rule_files"] == ["alerts.yaml"]
    assert job["job_name"] == "baton"


def test_further_instances_keep_their_ports() -> None:
    plan = make_plan(ratio=Ratio(1, 1), listen=ListenConfig(port=0, grpc_port=0, metrics_port=9100))
    assert plan.worker is not None

    def port(name: str) -> str:
        assert plan.worker is not None
        return dict(plan.worker("decode", name, None).listens)["metrics"]

    assert [port("decode-1"), port("decode-2"), port("decode-1")] == [
        f"127.0.0.1:{number}/metrics" for number in (9105, 9106, 9105)
    ]


def expressions() -> list[str]:
    alerts = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    (group,) = alerts["groups"]
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [rule["expr"] for rule in group["rules"]] + shown


def test_queries_select_the_job_alone() -> None:
    chart: Any = yaml.safe_load((ROOT / "helm/baton/files/alerts.yaml").read_text().replace("SELECTOR", 'job="baton"'))
    assert expressions()[: len(chart)] == [rule["expr"] for rule in chart]
    for expression in expressions():
        assert "namespace" not in expression
        assert "SELECTOR" not in expression
        selectors = re.findall(r"baton_\w+(\{[^}]*\})?", expression)
        assert selectors
        assert all('job="baton"' in selector for selector in selectors), expression


def test_they_are_made_of_the_charts() -> None:
    command = [sys.executable, str(ROOT / "scripts/gen_monitoring.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_services_with_flags_that_they_have(path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    command, *words = shlex.split(unit["Service"]["ExecStart"].replace("%i", "9000"))
    if command.endswith("/baton"):
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        assert parser.parse_args(words).metrics_port == 9100
        return
    service = command.rpartition("baton-")[2]
    parser = argparse.ArgumentParser()
    configs = service_configs()["worker" if service in ("prefill", "decode") else service]
    for config in configs:
        add_flags(parser, config)
    from_flags(configs[0], parser.parse_args(words))
