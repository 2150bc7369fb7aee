"""Alerts of the chart fire when what they are about is broken: a router's real metrics, judged by promtool.

A test breaks something, scrapes the router in steps, and lays the scrapes a minute apart. promtool evaluates the
chart's rules over them, so that expressions, labels, ``for`` and the first rise of a counter are what they are for
Prometheus.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.support.router.world import registration
from tests.support.servers.fake_worker import FakeWorker
from tests.support.watched import Watched, watched_router

from baton.errors import InternalError
from baton.types import Role

RULES = Path(__file__).parents[3] / "helm/baton/files/alerts.yaml"
SCRAPED = {"namespace": "serving", "pod": "router-0", "job": "router"}
"""Labels that Prometheus adds to what it scrapes."""
MINUTES = 16
"""Longer than any alert waits."""

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on this machine (apt-get install prometheus)"
)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with watched_router(tmp_path) as running:
        yield running


class Recording:
    """Scrapes of a router, one per minute of the recording."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._series: dict[str, list[str]] = {}
        self.minutes = 0

    async def scrape(self, times: int = 1) -> None:
        """Add the metrics of this moment, as they are for a number of minutes."""
        text = (await self._watched.http.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in (sample.labels | SCRAPED).items())
                values = self._series.setdefault(f"{sample.name}{{{labels}}}", ["_"] * self.minutes)
                values += [str(sample.value)] * times
        self.minutes += times
        for values in self._series.values():
            values += ["_"] * (self.minutes - len(values))

    def fired(self, directory: Path, until: int | None = None) -> set[str]:
        """Return the alerts that fired up to a minute, the last by default."""
        rules = yaml.safe_load(RULES.read_text().replace("SELECTOR", 'namespace="serving",pod=~"router-.*"'))
        (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "baton", "rules": rules}]}))
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
        command = ["promtool", "test", "rules", str(directory / "test.yaml")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        output = result.stdout + result.stderr
        found = set(re.findall(r'alertname=\\?"(\w+)', output))
        assert (result.returncode == 0) == (not found), output
        assert output.count("{} 1E+00") == len(found), output
        return found


async def healthy(watched: Watched, directory: Path) -> Recording:
    """Return a recording that begins with minutes in which requests succeed and nothing fires."""
    recording = Recording(watched)
    for at in range(6):
        assert (await watched.complete(f"well-{at}")).status_code == 200
        await recording.scrape()
    assert recording.fired(directory) == set()
    return recording


def test_the_rules_are_rules(tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text().replace("SELECTOR", 'namespace="serving"'))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "baton", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


async def test_a_lost_instance(watched: Watched, tmp_path: Path) -> None:
    """It registered, died, and its lease ran out: it is known to nothing but the router's memory of lost instances."""
    registry = watched.app.registry
    victim = FakeWorker(Role.PREFILL, "p1", token=watched.workers[0]._token)
    await victim.start()
    registry.register(registration(victim))
    await watched.until(lambda: len(registry.ready(Role.PREFILL)) == 2)
    recording = await healthy(watched, tmp_path)
    await victim.stop()
    await watched.until(lambda: len(registry.ready(Role.PREFILL)) == 1)
    registry.leases.extend(-3600)  # its lease ends
    registry.expire()
    assert "p1" not in {x.instance_id for x in registry.instances()}
    await recording.scrape(MINUTES)
    assert recording.fired(tmp_path) == {"BatonInstanceDown", "BatonInstancesLost"}


async def test_all_decode_instances_die(watched: Watched, tmp_path: Path) -> None:
    recording = await healthy(watched, tmp_path)
    for worker in watched.workers[1:]:
        await worker.stop()
    await watched.until(lambda: not watched.app.is_ready())
    for at in range(MINUTES):
        assert (await watched.complete(f"late-{at}")).status_code == 503
        await recording.scrape()
    assert recording.fired(tmp_path) >= {
        "BatonNoDecodeInstance",
        "BatonInstanceDown",
        "BatonInstancesLost",
        "BatonIndexStale",
        "BatonRequestsFail",
    }


async def test_instances_that_fail_their_requests(watched: Watched, tmp_path: Path) -> None:
    recording = await healthy(watched, tmp_path)
    for worker in watched.workers[1:]:
        worker.state.refuse = InternalError("the device is gone")
    for at in range(MINUTES):
        for number in range(3):
            assert (await watched.complete(f"broken-{at}-{number}")).status_code >= 500
        await recording.scrape()
    assert recording.fired(tmp_path) >= {"BatonRequestsFail", "BatonBreakerOpen", "BatonRetriesDenied"}


async def test_prefill_instances_that_fail(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = await healthy(watched, tmp_path)
    trace = FakeWorker._trace

    def failed(worker: FakeWorker, request: object) -> object:
        found = trace(worker, request)  # type: ignore[arg-type]
        found.failed_prefills.append("p0: unavailable")
        return found

    monkeypatch.setattr(FakeWorker, "_trace", failed)  # what decode instances report
    for at in range(MINUTES):
        assert (await watched.complete(f"local-{at}")).status_code == 200
        await recording.scrape()
    assert recording.fired(tmp_path) == {"BatonPrefillFails"}
