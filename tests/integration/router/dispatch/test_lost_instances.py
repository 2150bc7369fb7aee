"""Instances that die or hang without a word are shown as lost, and only these."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.router.world import Router, World, registration
from tests.support.servers.fake_worker import FakeWorker
from tests.support.watched import Watched, watched_router

from baton.cli.main import main
from baton.types import Role
from baton_router.registry.lost_instances import KEEP_S

HEALTHY = "baton_router_instance_healthy"


def healthy(router: Router, worker: FakeWorker) -> float | None:
    """Return the gauge of a worker; ``None``: it has no series."""
    return router.metrics.get_sample_value(HEALTHY, {"instance": worker.instance_id, "role": worker.role.value})


def lost_names(router: Router) -> list[str]:
    return [x.instance_id for x in router.registry.lost.recent()]


async def registered(world: World, *workers: FakeWorker, **options: object) -> tuple[Router, dict[str, str]]:
    """Return a router at which the workers registered, and their leases by name."""
    router = await world.router(lease_ttl_s=10.0, **options)
    leases = {x.instance_id: router.registry.register(registration(x)).lease_id for x in workers}
    await router.ready(*workers)
    return router, leases


def let_lease_end(router: Router, leases: dict[str, str], *others: FakeWorker) -> None:
    """Move the clock past the end of all leases but those of ``others``."""
    router.clock.now += 9
    for worker in others:
        assert router.registry.heartbeat(leases[worker.instance_id])
    router.clock.now += 2
    router.registry.expire()


async def test_a_hung_instance_stays_in_sight_at_0_for_minutes(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.router(lease_ttl_s=10.0, probe_timeout_s=1.0)
    proxy = await world.proxy(decodes[0])
    message = registration(decodes[0])
    message.address = f"127.0.0.1:{proxy.port}"
    router.registry.register(message)
    leases = {"d1": router.registry.register(registration(decodes[1])).lease_id}
    await router.ready(*decodes)
    assert [healthy(router, x) for x in decodes] == [1.0, 1.0]
    assert router.metric("instances_lost_total", role="decode") == 0.0
    proxy.freeze()  # as SIGSTOP: connections stay open, nothing is answered
    await router.until(lambda: healthy(router, decodes[0]) == 0.0)
    let_lease_end(router, leases, decodes[1])
    assert lost_names(router) == ["d0"]
    assert healthy(router, decodes[0]) == 0.0
    assert router.metric("instances_lost_total", role="decode") == 1.0
    router.clock.now += 600
    assert [healthy(router, x) for x in decodes] == [0.0, 1.0], "ten minutes: longer than the alert waits"
    router.clock.now += KEEP_S
    assert healthy(router, decodes[0]) is None


async def test_one_that_comes_back_is_lost_no_more(world: World) -> None:
    decodes = await world.decodes(2)
    router, leases = await registered(world, *decodes)
    await decodes[0].stop()
    await router.until(lambda: not router.instance(decodes[0]).ready)
    let_lease_end(router, leases, decodes[1])
    assert lost_names(router) == ["d0"]
    await decodes[0].start()  # elsewhere
    router.registry.register(registration(decodes[0]))
    await router.ready(decodes[0])
    assert (lost_names(router), healthy(router, decodes[0])) == ([], 1.0)
    assert router.metric("instances_lost_total", role="decode") == 1.0, "once, though it was down and then forgotten"


async def test_one_whose_place_another_has_is_lost_no_more(world: World) -> None:
    decodes = await world.decodes(3)
    router, leases = await registered(world, *decodes[:2])
    await decodes[0].stop()
    await router.until(lambda: not router.instance(decodes[0]).ready)
    let_lease_end(router, leases, decodes[1])
    assert lost_names(router) == ["d0"]
    router.registry.register(registration(decodes[2]))
    await router.ready(decodes[2])
    assert lost_names(router) == []


@pytest.mark.parametrize("how", ["deregisters", "drains"])
async def test_one_that_leaves_in_order_is_not_lost(world: World, how: str) -> None:
    decodes = await world.decodes(2)
    router, leases = await registered(world, *decodes)
    if how == "deregisters":
        router.registry.deregister(leases["d0"])
    else:
        decodes[0].set_load(draining=True)
        await router.until(lambda: router.instance(decodes[0]).load.draining)
        await decodes[0].stop()
        await router.until(lambda: not router.instance(decodes[0]).admitted)
        let_lease_end(router, leases, decodes[1])
    assert [x.instance_id for x in router.registry.instances()] == ["d1"]
    assert (lost_names(router), healthy(router, decodes[0])) == ([], None)
    assert router.metric("instances_lost_total", role="decode") == 0.0


@pytest.mark.parametrize("dies", [True, False])
async def test_discovery_tells_the_dead_from_the_withdrawn(world: World, dies: bool) -> None:
    decodes = await world.decodes(2)
    router = await world.router()
    router.registry.set_discovered("kubernetes", {x.address: Role.DECODE for x in decodes})
    await router.ready(*decodes)
    if dies:
        await decodes[0].stop()
        await router.until(lambda: not router.instance(decodes[0]).ready)
    router.registry.set_discovered("kubernetes", {decodes[1].address: Role.DECODE})
    assert lost_names(router) == (["d0"] if dies else [])
    assert router.metric("instances_lost_total", role="decode") == dies


async def test_a_static_instance_is_counted_once_per_loss(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for losses in (1, 2):
        await decodes[0].stop()
        await router.until(lambda: not router.instance(decodes[0]).ready)
        assert healthy(router, decodes[0]) == 0.0
        assert router.metric("instances_lost_total", role="decode") == losses
        await decodes[0].restart()
        await router.ready(decodes[0])


async def console(watched: Watched) -> list[dict[str, Any]]:
    """Return the instances that the console shows."""
    found: list[dict[str, Any]] = (await watched.get("/debug/console"))["instances"]
    return found


async def test_status_and_console_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with watched_router(tmp_path, decodes=1) as watched:
        registry = watched.app.registry
        victim = FakeWorker(Role.DECODE, "d1", token=watched.workers[0]._token)
        await victim.start()
        registry.register(registration(victim))
        await watched.until(lambda: len(registry.ready(Role.DECODE)) == 2)
        status = ["status", "--url", watched.url, "--api-key-file", watched.key_file]
        assert await asyncio.to_thread(main, status) == 0
        assert "lost" not in capsys.readouterr().out
        await victim.stop()
        await watched.until(lambda: len(registry.ready(Role.DECODE)) == 1)
        registry.leases.extend(-3600)  # its lease ends
        registry.expire()
        async with asyncio.timeout(240):  # the console's data are made at most twice a second
            while not (shown := [x for x in await console(watched) if x["status"] == "lost"]):
                await asyncio.sleep(0.01)
        (lost,) = shown
        assert (lost["id"], lost["role"]) == ("d1", "decode")
        assert lost["lost_s"] >= 0
        assert "its lease ran out" in lost["reason"]
        assert await asyncio.to_thread(main, status) == 1
        out = capsys.readouterr().out
        assert "1 lost" in out
        assert [line for line in out.splitlines() if "d1" in line and "lost" in line]
