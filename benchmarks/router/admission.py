"""What admission costs a request, with 16 prefill and 16 decode instances: before an empty queue and a long one."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import asyncio
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry
from tests.support.servers.fake_worker import FINGERPRINT

from baton.config.router import RouterConfig
from baton.token_ids import token_ids
from baton.types import Epoch, InstanceId, RequestId, Role, SamplingParams
from baton_router.admission.estimates import Estimates, Room
from baton_router.admission.gate import Admission
from baton_router.registry.instance import InstanceInfo, Status
from baton_router.registry.registry import Registry
from baton_router.scheduler.placer import Placer, SchedulerMetrics
from baton_router.scheduler.policies import make_policy
from baton_router.scheduler.speeds import Speeds
from baton_router.types import RoutedRequest

_INSTANCES = 16
_ROUNDS = 20_000
_WAITING = 1000


def make_registry(metrics: CollectorRegistry) -> Registry:
    """Return a registry whose instances are ready, though no process is at their addresses."""
    names = {role: tuple(f"{role.value}-{i}:1" for i in range(_INSTANCES)) for role in (Role.PREFILL, Role.DECODE)}
    config = RouterConfig(prefill=names[Role.PREFILL], decode=names[Role.DECODE])
    registry = Registry(config, metrics)
    registry.start()
    kind = replace(FINGERPRINT, block_size=16, block_bytes=1024)
    for x in registry.instances():
        registry._monitors[x.address][1].cancel()
        x.info = InstanceInfo(
            InstanceId(x.address), x.role, Epoch(b"e" * 16), kind, 10_000, 8192, "m", "", 1000, frozenset(), "", 64
        )
        x.status = Status.READY
        x.generation = 1
    return registry


def request(number: int) -> RoutedRequest:
    """Return a request of 512 prompt tokens that shares nothing."""
    sampling = SamplingParams(max_tokens=100, seed=1)
    return RoutedRequest(RequestId(str(number)), token_ids([number % 900] * 512), sampling, tenant=f"t{number % 10}")


async def main() -> None:
    metrics = CollectorRegistry()
    speeds = Speeds()
    registry = make_registry(metrics)
    terms = SchedulerMetrics(CollectorRegistry(), registry.ready)
    placer = Placer(registry, make_policy("match_minus_load"), terms, max_prefills=3, threshold=None, speeds=speeds)
    estimates = Estimates(placer, speeds, registry)
    one = request(0)
    gate = Admission(Room(registry, speeds, None, None, time.monotonic), estimates, RouterConfig(), CollectorRegistry())
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            ticket = await gate.enter(one)
            gate.first_token(ticket)
            gate.release(ticket)
        best = min(best, time.perf_counter() - began)
    print(f"empty queue: {1e6 * best / _ROUNDS:.1f} us per request")

    closed = Room(registry, speeds, 1, None, time.monotonic)
    gate = Admission(closed, estimates, RouterConfig(), CollectorRegistry())
    for x in registry.ready(Role.DECODE):
        x.load.requests = 1
    began = time.perf_counter()
    waiting = [asyncio.create_task(gate.enter(request(i))) for i in range(_WAITING)]
    await asyncio.sleep(0)  # each of them runs until it waits
    assert len(gate.queue) == _WAITING
    print(f"into the queue: {1e6 * (time.perf_counter() - began) / _WAITING:.1f} us per request")
    began = time.perf_counter()
    closed._slots = 0  # room for all
    await asyncio.gather(*waiting)
    print(f"out of it: {1e6 * (time.perf_counter() - began) / _WAITING:.1f} us per request")
    await registry.close()


if __name__ == "__main__":
    asyncio.run(main())
