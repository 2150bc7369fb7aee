"""Busy instances of ``benchmarks/control_plane.py`` and a registry that follows them: few messages, none lost."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.support.standstills import take_standstills_out

from baton.api.v1 import worker_pb2
from baton.config.router import RouterConfig
from baton.types import Role
from baton_router.indexer.events import EventApplier, IndexState
from baton_router.registry.registry import Registry

PATH = Path(__file__).parents[3] / "benchmarks" / "router" / "control_parts" / "instances.py"
STEPS = 400


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulated_instances", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["simulated_instances"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_busy_instance_sends_a_fraction_of_its_steps_and_the_index_is_exact(
    simulation: ModuleType, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[worker_pb2.StreamLoadResponse] = []
    monkeypatch.setattr("baton_router.registry.load.LoadTracker.observe", lambda _, report, __: reports.append(report))
    server, address, engine = await simulation.serve(role)
    config = RouterConfig(**{str(role): (address,)})
    registry = Registry(config, CollectorRegistry())
    registry.start()
    try:
        (instance,) = registry.instances()
        await until(lambda: instance.events.state is IndexState.EXACT)
        told = len(reports)
        before = instance.events.num_events
        for _ in range(STEPS):
            engine.step()
            await asyncio.sleep(0)
        engine.log.flush()
        await until(lambda: instance.events.resume_from(instance.info.epoch) == engine.log.sequence)
        assert instance.events.num_blocks == engine.pool.held
        assert instance.events.num_events > before
        assert instance.events.num_gaps == 0
        await until(lambda: instance.events.state is IndexState.EXACT)  # where all stood still for long it was not
        assert engine.log.sequence < STEPS / 4
        assert len(reports) - told < STEPS / 4
    finally:
        await registry.close()
        await server.stop(0)


async def test_only_an_instance_that_is_silent_is_probed(
    simulation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, beats = [], []
    get_info, heartbeat = simulation.WorkerServicer.GetInfo, EventApplier.heartbeat

    async def count_info(self: object, request: object, context: object) -> object:
        asked.append(request)
        return await get_info(self, request, context)

    def count_beat(*args: Any) -> None:
        beats.append(args)
        heartbeat(*args)

    monkeypatch.setattr(simulation.WorkerServicer, "GetInfo", count_info)
    monkeypatch.setattr(EventApplier, "heartbeat", count_beat)
    server, address, _ = await simulation.serve(Role.DECODE)
    registry = Registry(
        RouterConfig(decode=(address,), probe_interval_s=0.5, index_heartbeat_ms=5), CollectorRegistry()
    )
    registry.start()
    try:
        # Where nothing of this process runs, no instance in it can be heard either.
        take_standstills_out(asyncio.get_running_loop(), most_s=0.05)
        await until(lambda: len(beats) > 250)  # in twice the interval
        assert len(asked) == 1
        monkeypatch.setattr(EventApplier, "_hear", lambda _: None)
        await until(lambda: len(asked) > 3)
    finally:
        await registry.close()
        await server.stop(0)
