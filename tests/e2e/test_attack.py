"""A tenant with one request a minute does all it can for a minute, and others notice next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from tests.support.attacks import ATTACKS
from tests.support.servers.up import Running, running_up

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # it measures others' times
log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
ATTACK_S = 60.0
ALONE_S = 15.0
HEALTH_P99_S = 0.25
LARGEST_GAP_S = 0.5
GROWTH = 256 << 20
KEPT = 64 << 20
"""Bytes by which the router's memory may grow meanwhile, and stay grown."""


@dataclass
class Seen:
    """What another tenant and an operator see: times in seconds, memory in bytes."""

    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def health_p99(self) -> float:
        return statistics.quantiles(self.health, n=100)[-1]

    def __str__(self) -> str:
        return (
            f"health p99 {1000 * self.health_p99:.0f} ms, worst {1000 * max(self.health):.0f} ms, "
            f"largest gap {1000 * max(self.gaps):.0f} ms of {len(self.gaps)}; memory {max(self.memory) >> 20} MiB"
        )


@pytest.fixture(scope="module")
def up(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("attack")
    (root / "token").write_text("the services' token")
    tenants = {
        "mallory": {"keys": ["sk-mallory"], "requests_per_minute": 1, "max_in_flight": 1},
        "bob": {"keys": ["sk-bob"]},
    }
    (root / "keys.json").write_text(json.dumps({"tenants": tenants}))
    args = ("--token-file", str(root / "token"), "--router-args", f"--api-keys {root / 'keys.json'}")
    with running_up("--ratio", "1P1D", "--dtype", "float32", "--model", model, *args) as running:
        yield running


def router_of(up: Running) -> psutil.Process:
    children = psutil.Process(up.process.pid).children(recursive=True)
    return next(child for child in children if "baton_router.main" in " ".join(child.cmdline()))


async def observe(client: httpx.AsyncClient, router: psutil.Process, seconds: float) -> Seen:
    """Ask for health, and read streams, one after the other, as Bob."""
    seen = Seen()
    ends = time.monotonic() + seconds

    async def ask() -> None:
        while time.monotonic() < ends:
            begun = time.monotonic()
            (await client.get("/health")).raise_for_status()
            seen.health.append(time.monotonic() - begun)
            seen.memory.append(router.memory_info().rss)
            await asyncio.sleep(0.02)

    async def stream() -> None:
        body = {"model": "baton-tiny", "prompt": "def main():\n", "max_tokens": 200, "stream": True, "ignore_eos": True}
        while time.monotonic() < ends:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                last = None
                async for _ in answer.aiter_bytes():
                    now = time.monotonic()
                    if last is not None:
                        seen.gaps.append(now - last)
                    last = now

    await asyncio.gather(ask(), stream())
    return seen


@contextlib.contextmanager
def attacked(up: Running) -> Iterator[None]:
    command = (sys.executable, "-m", "tests.support.attacks")
    processes = [subprocess.Popen([*command, name, up.url, up.grpc, "sk-mallory"], cwd=ROOT) for name in ATTACKS]
    try:
        yield
        assert all(process.poll() is None for process in processes), "an attack has ended by itself"
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(60)


async def test_others_notice_little_of_all_attacks_at_once(up: Running) -> None:
    router = router_of(up)
    headers = {"authorization": "Bearer sk-bob"}
    async with httpx.AsyncClient(base_url=up.url, timeout=120, headers=headers) as client:
        await observe(client, router, 3)  # everything has been used once
        alone = await observe(client, router, ALONE_S)
        with attacked(up):
            beside = await observe(client, router, ATTACK_S)
        before = max(alone.memory)
        times = f"alone: {alone}; beside the attacks: {beside}"
        log.info(times)
        assert beside.health_p99 <= HEALTH_P99_S, times
        assert max(beside.gaps) <= LARGEST_GAP_S, times
        assert max(beside.memory) - before <= GROWTH, times
        ends = time.monotonic() + 60
        while router.memory_info().rss - before > KEPT:
            assert time.monotonic() < ends, f"{router.memory_info().rss >> 20} MiB are kept, {before >> 20} before"
            await asyncio.sleep(0.5)
