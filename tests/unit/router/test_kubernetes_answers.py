"""What an API server answers that makes no sense: discovery asks again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from baton_router.config import RouterConfig
from baton_router.registry.discovery import kubernetes
from baton_router.registry.discovery.kubernetes import KubernetesDiscovery


async def test_a_version_that_fits_into_no_url_does_not_end_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("token")
    lists = 0
    twice = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal lists
        lists += 1
        if lists > 1:
            twice.set()
        return httpx.Response(200, content=orjson.dumps({"metadata": {"resourceVersion": "9" * 100_000}}))

    monkeypatch.setattr(kubernetes, "_LONGEST_PAUSE_S", 0.05)
    config = RouterConfig(
        discover=("kubernetes",),
        kubernetes_selector="a=b",
        kubernetes_api="http://api",
        kubernetes_account=str(tmp_path),
        kubernetes_namespace="n",
    )
    registry: Any = None
    discovery = KubernetesDiscovery(config, registry, None)
    monkeypatch.setattr(discovery._roles, "found", lambda addresses: None)
    await discovery._http.aclose()
    discovery._http = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(answer))
    discovery.start()
    async with asyncio.timeout(60):
        await twice.wait()
    await discovery.close()
