"""Scrapes of Baton's processes, laid a minute apart, over which promtool judges the chart's alerts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).parents[2] / "helm/baton/files/alerts.yaml"
SELECTOR = 'namespace="serving"'
PROMTOOL = shutil.which("promtool", path=os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)]))
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on this machine (scripts/install_promtool.sh .venv/bin)"
)
MINUTES = 16
"""Longer than any alert waits."""

Scrape = Callable[[], Awaitable[str]]


def run_promtool(*args: str) -> subprocess.CompletedProcess[str]:
    """Run it, in tests that are marked with ``needs_promtool``."""
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *args], capture_output=True, text=True, check=False)


def write_rules(path: Path) -> list[dict[str, Any]]:
    """Write the chart's alerts as a file that Prometheus reads, and return them."""
    rules: list[dict[str, Any]] = yaml.safe_load(RULES.read_text().replace("SELECTOR", SELECTOR))
    path.write_text(yaml.safe_dump({"groups": [{"name": "baton", "rules": rules}]}))
    return rules


def scrape_of(registry: CollectorRegistry) -> Scrape:
    """Return a scrape of a registry in this process."""

    async def scrape() -> str:
        return generate_latest(registry).decode()

    return scrape


class Recording:
    """Scrapes of processes, one per minute of the recording.

    Attributes:
        pods: Processes by the name of their pod.
        minutes: Length.
    """

    def __init__(self, **pods: Scrape) -> None:
        self.pods = pods
        self._series: dict[str, list[str]] = {}
        self.minutes = 0

    async def scrape(self, times: int = 1) -> None:
        """Add the metrics of this moment, as they are for a number of minutes."""
        for pod, scrape in self.pods.items():
            for family in text_string_to_metric_families(await scrape()):
                for sample in family.samples:
                    named = sample.labels | {"namespace": "serving", "pod": pod, "job": "baton"}
                    labels = ",".join(f'{name}="{value}"' for name, value in named.items())
                    values = self._series.setdefault(f"{sample.name}{{{labels}}}", ["_"] * self.minutes)
                    values += [str(sample.value)] * times
        self.minutes += times
        for values in self._series.values():
            values += ["_"] * (self.minutes - len(values))

    def fired(self, directory: Path, until: int | None = None) -> set[str]:
        """Return the alerts that fired up to a minute, the last by default."""
        rules = write_rules(directory / "rules.yaml")
        at = self.minutes - 1 if until is None else until
        asked = set(re.findall(r"baton_\w+", RULES.read_text()))
        series = [
            {"series": name, "values": " ".join(values)}
            for name, values in self._series.items()
            if name.partition("{")[0] in asked
        ]
        tests = []
        for name in sorted({rule["alert"] for rule in rules}):
            firing = f'count_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[2h])'
            never = {"expr": f"(count({firing}) or vector(0)) > bool 0", "eval_time": f"{at}m"}
            tests.append({**never, "exp_samples": [{"labels": "{}", "value": 0}]})
        test = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
        (directory / "test.yaml").write_text(
            yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
        )
        result = run_promtool("test", "rules", str(directory / "test.yaml"))
        output = result.stdout + result.stderr
        found = set(re.findall(r'alertname=\\?"(\w+)', output))
        assert (result.returncode == 0) == (not found), output
        assert output.count("{} 1E+00") == len(found), output
        return found
