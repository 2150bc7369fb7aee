"""Alerts of the chart fire when what they are about is broken: real metrics, judged by promtool.

A test breaks something, scrapes in steps, and lays the scrapes a minute apart. promtool evaluates the
chart's rules over them, so that expressions, labels, ``for`` and the first rise of a counter are what they are for
Prometheus.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from tests.support.alerts import MINUTES, Recording, Scrape, needs_promtool, run_promtool, scrape_of, write_rules
from tests.support.router.world import registration
from tests.support.servers.fake_worker import FakeWorker
from tests.support.transport.store_rig import Rig, chain
from tests.support.watched import PROMPT, Watched, watched_router
from tests.unit.autoscale.test_controller import CONFIG, World, run
from tests.unit.kvstore.test_kvstore_disk_full import write

from baton.api.v1 import common_pb2
from baton.autoscale.controller import AutoscaleMetrics, Controller
from baton.config.kvstore import KVStoreConfig
from baton.config.router import RouterConfig
from baton.engine.request import EngineStats
from baton.errors import InternalError
from baton.kv_transfer.connector.store.backend import StoreUse
from baton.types import RequestId, Role, SamplingParams
from baton.worker.engine_thread import EngineThread
from baton.worker.metrics import WorkerMetrics
from baton_kvstore.server import KVStoreServer
from baton_router.admission.queue import Waiting
from baton_router.app import RouterApp
from baton_router.processor.output_processor import GenerationClock, GenerationMetrics
from baton_router.types import RoutedRequest

pytestmark = needs_promtool


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with watched_router(tmp_path) as running:
        yield running


async def healthy(watched: Watched, directory: Path, **pods: Scrape) -> Recording:
    """Return a recording of the router and other pods, whose first minutes are well: nothing fires."""
    recording = Recording(router=watched.scrape, **pods)
    for at in range(6):
        assert (await watched.complete(f"well-{at}")).status_code == 200
        await recording.scrape()
    assert recording.fired(directory) == set()
    return recording


def test_the_rules_are_rules(tmp_path: Path) -> None:
    write_rules(tmp_path / "rules.yaml")
    result = run_promtool("check", "rules", str(tmp_path / "rules.yaml"))
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
        "BatonRequestsRefused",
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


async def test_requests_that_wait_long(watched: Watched, tmp_path: Path) -> None:
    recording = await healthy(watched, tmp_path)
    admission = watched.app.dispatcher.admission
    request = RoutedRequest(RequestId("r"), array("I", PROMPT), SamplingParams())
    for at in range(MINUTES):
        future = asyncio.get_running_loop().create_future()
        admission.metrics.started(Waiting(request, at, 0.0, math.inf, math.inf, 1.0, future), 25.0)
        await recording.scrape()
    assert recording.fired(tmp_path) == {"BatonQueueLong"}


async def test_streams_that_stutter(watched: Watched, tmp_path: Path) -> None:
    """A client in direct mode reports gaps of 0.8 s."""
    registry = CollectorRegistry()
    clock = GenerationClock(GenerationMetrics(registry), 0.0)
    recording = await healthy(watched, tmp_path, other=scrape_of(registry))
    for at in range(MINUTES):
        clock.record_report(None, [0.8] * 100, 100 * (at + 1))
        await recording.scrape()
    assert recording.fired(tmp_path) == {"BatonTokensSlow"}


class Engine:
    """What metrics read of an engine's thread."""

    def __init__(self) -> None:
        self.stats = EngineStats(*[0] * len(EngineStats.__dataclass_fields__))
        self.steps, self.step_seconds = 0, 0.0
        executor = SimpleNamespace(description="toy", quality=None)
        self.core = SimpleNamespace(speculator=None, grammars=None, masks=None, executor=executor)


def instance(engine: Engine, store: StoreUse | None = None) -> WorkerMetrics:
    metrics = WorkerMetrics()
    metrics.watch(cast(EngineThread, engine), lambda: 0, store or StoreUse(), {})
    return metrics


async def test_prompts_that_wait_in_an_engine(watched: Watched, tmp_path: Path) -> None:
    engine = Engine()
    recording = await healthy(watched, tmp_path, prefill=scrape_of(instance(engine).registry))
    for at in range(MINUTES):
        engine.stats = replace(engine.stats, waiting_prompt_tokens=40_000, prefill_tokens=60_000 * (at + 1))
        await recording.scrape()
    assert recording.fired(tmp_path) == {"BatonPromptsWait"}


async def test_a_kv_pool_that_is_too_small(watched: Watched, tmp_path: Path) -> None:
    engine = Engine()
    recording = await healthy(watched, tmp_path, decode=scrape_of(instance(engine).registry))
    for at in range(2 * MINUTES):
        engine.stats = replace(engine.stats, num_preemptions=10 * (at + 1))
        await recording.scrape()
    assert recording.fired(tmp_path) == {"BatonKvPoolSmall"}


async def test_kv_that_comes_over_another_pipe(watched: Watched, tmp_path: Path) -> None:
    metrics = instance(Engine())
    recording = await healthy(watched, tmp_path, decode=scrape_of(metrics.registry))
    remote = common_pb2.PREFILL_PATH_REMOTE
    for _ in range(MINUTES):
        metrics.count_trace(common_pb2.RequestTrace(path=remote, pipe="tcp", pipe_fallback="memory: no such segment"))
        for _ in range(9):
            metrics.count_trace(common_pb2.RequestTrace(path=remote, pipe="memory"))
        await recording.scrape()
    assert recording.fired(tmp_path) == {"BatonPipeFallback"}


async def test_a_router_without_redis(watched: Watched, tmp_path: Path) -> None:
    app = RouterApp(RouterConfig(port=0, grpc_port=0, redis="redis://127.0.0.1:1"))
    recording = await healthy(watched, tmp_path)
    await app.start()
    try:
        recording.pods["other"] = scrape = scrape_of(app.metrics)
        async with asyncio.timeout(240):
            while 'baton_router_replica_state{state="alone"} 1.0' not in await scrape():
                await app.registry.wait_changed(0.01)
        await recording.scrape(MINUTES)
    finally:
        await app.stop()
    assert recording.fired(tmp_path) == {"BatonRedisAway"}


async def test_a_store_node_that_is_gone(watched: Watched, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        rig = Rig("three", stack)
        await rig.start(tmp_path)
        client = await rig.client(cooldown_s=3600.0)
        recording = await healthy(watched, tmp_path, decode=scrape_of(instance(Engine(), client.use).registry))
        await client.put(chain())
        await recording.scrape(MINUTES)
        assert recording.fired(tmp_path) == set()
        await rig.holder().stop()
        for _ in range(2):
            await client.get(chain())
        await recording.scrape(MINUTES)
        assert recording.fired(tmp_path) == {"BatonStoreNodeResting"}


async def test_a_disk_that_fails(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KVStoreServer(KVStoreConfig(disk_path=str(tmp_path / "kv")))
    assert store.disk is not None
    try:
        recording = await healthy(watched, tmp_path, kvstore=scrape_of(store.metrics.registry))
        assert write(store.disk, 1, 2) == [True, True]
        store.metrics.refresh()
        await recording.scrape(MINUTES)
        assert recording.fired(tmp_path) == set()

        def failed(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", failed)
            assert write(store.disk, 3, 4) == [False, False]
        store.metrics.refresh()
        await recording.scrape(MINUTES)
    finally:
        store.disk.close()
    assert recording.fired(tmp_path) == {"BatonStoreDiskErrors"}


async def test_a_replica_that_the_autoscaler_gives_up(watched: Watched, tmp_path: Path) -> None:
    world = World()
    metrics = AutoscaleMetrics()
    made = Controller(replace(CONFIG, scale_start_s=60.0), world, world, print, metrics=metrics, now=lambda: world.now)
    recording = await healthy(watched, tmp_path, autoscaler=scrape_of(metrics.registry))
    world.under_way = "baton-decode has 2 of 3 pods"
    await run(made, world, 62)
    world.under_way = ""  # it was taken back
    await run(made, world, 1)
    await recording.scrape(2)
    assert recording.fired(tmp_path) == {"BatonReplicaGivenUp"}
