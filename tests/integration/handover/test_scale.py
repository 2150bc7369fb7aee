"""``baton scale`` under load: 2P2D, 1P3D, 3P1D by role switch; no request fails, tokens and prefix caches stay."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.servers.cluster import slow_steps

from baton import AsyncClient
from baton.client.scaling import plan_switches, switch_role
from baton.config import EngineConfig
from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig
from baton.errors import BusyError, ConfigError
from baton.types import Role
from baton.worker.instance import WorkerInstance
from baton_router.app import RouterApp
from baton_router.indexer.events import IndexState

TINY = str(Path(__file__).parents[3] / "models" / "baton-tiny")
P, D = Role.PREFILL, Role.DECODE
TOKENS = 20


def prompt(at: int) -> list[int]:
    return [(11 * i + 37 * at) % 400 + 10 for i in range(96)]


@contextlib.asynccontextmanager
async def fleet(roles: dict[str, Role]) -> AsyncIterator[tuple[AsyncClient, RouterApp, list[WorkerInstance]]]:
    async with contextlib.AsyncExitStack() as stack:
        app = RouterApp(RouterConfig(model=TINY, remote_prefill_threshold=32, port=0, grpc_port=0))
        await app.start()
        stack.push_async_callback(app.stop)
        instances = []
        for name, role in roles.items():
            config = WorkerConfig(instance_id=name, routers=(f"127.0.0.1:{app.grpc_port}",), pipes=("tcp",))
            instance = WorkerInstance(role, config, EngineConfig(model=TINY, dtype="float32", kv_blocks=200))
            await instance.start()
            stack.push_async_callback(instance.stop, 0)
            instances.append(instance)
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{app.grpc_port}", timeout=240, retries=0))
        async with asyncio.timeout(240):
            while ready(app) != Counter(roles.values()):
                await app.registry.wait_changed(0.05)
        yield client, app, instances


def ready(app: RouterApp) -> Counter[Role]:
    return Counter(x.role for x in app.registry.instances() if x.ready and x.events.state is IndexState.EXACT)


async def scale(client: AsyncClient, targets: dict[Role, int], wait_s: float) -> list[str]:
    switches = plan_switches(await client.list_instances(), targets)
    for each in switches:
        await switch_role(client, each, wait_s)
    return [each.instance for each in switches]


async def test_the_ratio_changes_under_load() -> None:
    async with fleet({"i0": P, "i1": P, "i2": D, "i3": D}) as (client, app, instances):
        alone = [(await client.generate(prompt(at), max_tokens=TOKENS, temperature=0)).token_ids for at in range(6)]
        stop, done, wrong = asyncio.Event(), Counter[int](), list[object]()

        async def load(at: int) -> None:
            while not stop.is_set():
                try:
                    answer = await client.generate(prompt(at), max_tokens=TOKENS, temperature=0)
                except Exception as error:
                    wrong.append(error)
                    return
                if answer.token_ids != alone[at]:
                    wrong.append(answer)
                done[at] += 1

        loads = [asyncio.create_task(load(at)) for at in range(6)]
        try:
            cached = {x.context.base.instance_id: x.context.engine.core.stats().blocks_cached for x in instances}
            for targets, wait_s in (({P: 1, D: 3}, 60.0), ({P: 3, D: 1}, 0.0)):
                before = done.total()
                changed = await scale(client, targets, wait_s)
                async with asyncio.timeout(240):
                    while ready(app) != Counter(targets):  # its index follows
                        await app.registry.wait_changed(0.05)
                    while done.total() < before + 12 and not wrong:
                        await asyncio.sleep(0.01)
                for instance in instances:
                    if instance.context.base.instance_id in changed:
                        assert (
                            instance.context.engine.core.stats().blocks_cached
                            >= cached[instance.context.base.instance_id]
                        )
        finally:
            stop.set()
            await asyncio.gather(*loads)
        assert wrong == []
        assert min(done.values()) > 0
        for instance in instances:
            engine = instance.context.engine
            await engine.call(engine.core.check_integrity)


async def test_what_runs_goes_on_elsewhere_when_the_time_is_up() -> None:
    async with fleet({"d0": D, "d1": D}) as (client, _, instances):
        alone = (await client.generate(prompt(0), max_tokens=400, temperature=0, ignore_eos=True)).token_ids
        slow = slow_steps(*instances)
        stream = await client.generate(prompt(0), max_tokens=400, temperature=0, ignore_eos=True, stream=True)
        chunks = [await anext(stream)]
        owner = next(x for x in instances if x.context.admission.active)
        name = owner.context.base.instance_id
        with pytest.raises(BusyError):
            await client.set_role(name, P)
        with pytest.raises(ConfigError):
            await scale(client, {P: 2}, 0.0)
        assert await client.drain(name, wait=0.0, migrate=True) == 0
        slow.clear()
        await client.set_role(name, P)
        chunks += [chunk async for chunk in stream]
        assert [token for chunk in chunks for token in chunk.token_ids] == alone
        assert stream.trace is not None
        assert stream.trace.num_migrations == 1
        assert owner.role is P


async def test_a_drained_instance_is_opened_again_in_its_own_role() -> None:
    async with fleet({"d0": D}) as (client, _, instances):
        assert await client.drain("d0", wait=1.0) == 0
        assert instances[0].context.admission.draining
        await client.set_role("d0", D)
        assert not instances[0].context.admission.draining
        async with asyncio.timeout(240):
            while any(each.load.draining for each in await client.list_instances()):  # the router hears of it
                await asyncio.sleep(0.05)
        answer = await client.generate(prompt(1), max_tokens=3, temperature=0, ignore_eos=True)
        assert len(answer.token_ids) == 3
