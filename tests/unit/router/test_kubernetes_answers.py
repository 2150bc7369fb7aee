"""What an API server answers that makes no sense: discovery asks again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from baton.config.router import RouterConfig
from baton_router.registry import discovery as module
from baton_router.registry.discovery import KUBERNETES, KubernetesDiscovery


class Instances:
    """A registry that notes what it is told."""

    failures = 0

    def set_discovered(self, source: str, instances: object) -> None:
        assert source == KUBERNETES

    def discovery_failed(self, source: str) -> None:
        assert source == KUBERNETES
        self.failures += 1


async def discovery_of(
    answer: Callable[[httpx.Request], httpx.Response], account: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[KubernetesDiscovery, Instances]:
    """Return discovery that asks ``answer``, and asks soon again."""
    (account / "token").write_text("token")
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.05)
    config = RouterConfig(
        discover=("kubernetes",),
        kubernetes_selector="a=b",
        kubernetes_api="http://api",
        kubernetes_account=str(account),
        kubernetes_namespace="n",
    )
    registry: Any = Instances()
    discovery = KubernetesDiscovery(config, registry, None)
    monkeypatch.setattr(discovery._roles, "set_addresses", lambda addresses: None)
    await discovery._api.http.aclose()
    discovery._api.http = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(answer))
    return discovery, registry


async def test_a_version_that_fits_into_no_url_does_not_end_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = 0
    twice = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal lists
        lists += 1
        if lists > 1:
            twice.set()
        return httpx.Response(200, content=orjson.dumps({"metadata": {"resourceVersion": "9" * 100_000}}))

    discovery, _ = await discovery_of(answer, tmp_path, monkeypatch)
    discovery.start()
    async with asyncio.timeout(240):
        await twice.wait()
    await discovery.close()


async def test_an_api_server_that_is_away_is_told_once_and_once_that_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, away, answered = 0, True, asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked, away
        asked += 1
        if away:
            away = asked < 8
            return httpx.Response(503)
        if "watch" not in request.url.params:
            return httpx.Response(200, content=orjson.dumps({"items": [], "metadata": {"resourceVersion": "1"}}))
        if asked > 12:
            answered.set()
        return httpx.Response(200, content=b"")  # a watch that ends at once

    discovery, instances = await discovery_of(answer, tmp_path, monkeypatch)
    discovery.start()
    async with asyncio.timeout(240):
        await answered.wait()
    await discovery.close()
    assert instances.failures == 8
    lines = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert len(lines) == 2, lines
    assert lines[0].startswith("Kubernetes does not answer, the instances found so far are kept: ")
    assert lines[1] == "Kubernetes answers again"
