"""Three routers over one Redis: they share what each has placed, and never place more than an instance may have."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from tests.integration.router.test_router_process import Process, router
from tests.support.servers.fake_tokens import expected_tokens
from tests.support.servers.fake_worker import FakeWorker
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.api.v1 import common_pb2, router_pb2, router_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.convert import role_to_pb
from baton.types import Role

pytestmark = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
CAPACITY = 6
TOKENS = 12
PATIENT = ("--no-instance-wait-s", "240", "--queue-timeout-s", "3600")
"""What waits while others are held is neither given up nor foreseen to wait for too long."""


class Replica:
    """A router process, and what it says of itself."""

    def __init__(self, process: Process, stub: Any, http: httpx.AsyncClient) -> None:
        self.process, self.stub, self.http = process, stub, http

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get("/debug/replicas")).json()
        return found

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def generate(self, number: int) -> list[int]:
        prompt = [number % 900, *range(20)]
        request = router_pb2.RouterGenerateRequest(
            token_ids=router_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=TOKENS, seed=number),
        )
        found = []
        async for message in self.stub.Generate(request, timeout=240):
            found += [token for delta in message.deltas for token in delta.token_ids]
        assert found == expected_tokens(prompt, TOKENS, seed=number)
        return found


@contextlib.asynccontextmanager
async def workers(count: int, role: Role = Role.DECODE, *, caches: bool = True) -> AsyncIterator[list[FakeWorker]]:
    found = [FakeWorker(role, f"{role.value[0]}{number}", caches=caches) for number in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for worker in found:
            worker.state.model_path = "models/baton-tiny"
            await worker.start()
            stack.push_async_callback(worker.stop)
        yield found


@contextlib.asynccontextmanager
async def replicas(count: int, redis: RedisServer, *flags: str) -> AsyncIterator[list[Replica]]:
    async with contextlib.AsyncExitStack() as stack:

        async def one(number: int) -> Replica:
            process = await stack.enter_async_context(
                router("--redis", redis.url, "--replica-name", f"r{number}", *PATIENT, *flags)
            )
            channel = await stack.enter_async_context(open_channel(process.grpc))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240))
            return Replica(process, router_pb2_grpc.RouterServiceStub(channel), http)

        yield list(await asyncio.gather(*map(one, range(count))))


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 240.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def all_are(routers: list[Replica], state: str) -> bool:
    found = [await x.state() for x in routers]
    return all(x["state"] == state for x in found) and (
        state != "shared" or all(len(x["others"]) == len(routers) - 1 for x in found)
    )


async def test_three_replicas_never_place_more_than_the_capacity_while_redis_dies_and_comes_back() -> None:
    async with RedisServer() as redis, workers(2) as decodes:
        flags = ("--decode", ",".join(x.address for x in decodes), "--max-inflight-per-instance", str(CAPACITY))
        async with replicas(3, redis, *flags) as routers:
            await until(lambda: all_are(routers, "shared"))
            numbers, stop, done = itertools.count(), asyncio.Event(), [0, 0, 0]

            async def client(at: int) -> None:
                while not stop.is_set():
                    await routers[at].generate(next(numbers))
                    done[at] += 1

            async def served(more: int) -> None:
                """Wait until each router has served so many more."""
                goals = [count + more for count in done]

                async def reached() -> bool:
                    return all(count >= goal for count, goal in zip(done, goals, strict=True))

                await until(reached)

            async def run(count: int) -> None:
                """Hold all requests until so many run on each instance, and let them go."""
                for worker in decodes:
                    worker.state.pause_after = 2
                for worker in decodes:
                    await worker.wait_until(lambda worker=worker: len(worker.state.running) == count)
                for worker in decodes:
                    worker.state.pause_after = None
                    worker.changed()

            async with asyncio.TaskGroup() as clients:
                for _ in range(20):
                    clients.create_task(client(0))
                await run(CAPACITY - 2)  # all that two idle routers don't keep for themselves
                for at in (1, 2):
                    for _ in range(8):
                        clients.create_task(client(at))
                await served(20)
                await redis.kill()
                await until(lambda: all_are(routers, "alone"))
                assert 'baton_router_replica_state{state="alone"} 1.0' in await routers[0].metrics()
                await served(20)
                await redis.start()
                await until(lambda: all_are(routers, "shared"))
                await served(20)
                await run(CAPACITY)
                stop.set()
            for worker in decodes:
                await worker.wait_until(lambda worker=worker: not worker.state.running)
                assert worker.state.peak == CAPACITY
                assert not worker.state.cancelled
            assert sum(len(x.state.finished) for x in decodes) == sum(done)
            for x in routers:

                async def idle(x: Replica = x) -> bool:
                    return {part["in_flight"] for part in (await x.state())["units"].values()} == {0}

                await until(idle)
                assert "baton_router_request_failures_total{" not in await x.metrics()


async def test_replicas_share_loads_and_registrations_and_one_that_dies_loses_both() -> None:
    async with RedisServer() as redis, workers(1, caches=False) as (worker,), replicas(3, redis) as routers:
        first, second, third = routers
        lease = await first.stub.Register(
            router_pb2.RegisterRequest(
                address=worker.address, instance_id="d0", role=role_to_pb(Role.DECODE), epoch=worker.epoch
            )
        )

        async def knows(who: Replica, in_flight: int) -> bool:
            metrics = await who.metrics()
            return (
                f'baton_router_instance_shared_in_flight{{instance="d0"}} {in_flight}.0' in metrics
                and f"baton_router_replica_expectations {in_flight}.0\n" in metrics
            )

        for x in (second, third):
            await until(lambda x=x: knows(x, 0))
        worker.state.pause_after = 2
        held = [asyncio.create_task(x.generate(number)) for number, x in enumerate((second, second, third))]
        for who, count in ((first, 3), (second, 1), (third, 2)):
            await until(lambda who=who, count=count: knows(who, count))
        third.process.process.kill()
        await asyncio.wait([held[2]])
        for who, count in ((first, 2), (second, 0)):
            await until(lambda who=who, count=count: knows(who, count))
        worker.state.pause_after = None
        worker.changed()
        await asyncio.gather(*held[:2])
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await held[2]
        await first.stub.Deregister(router_pb2.DeregisterRequest(lease_id=lease.lease_id))

        async def gone() -> bool:
            return 'instance="d0"' not in await second.metrics()

        await until(gone)


async def test_a_prompt_goes_where_another_router_has_it_computed_until_redis_is_away() -> None:
    async with (
        RedisServer() as redis,
        workers(2, Role.PREFILL) as prefills,
        workers(2, caches=False) as decodes,  # of what they hold nobody hears: only expectations count
    ):
        addresses = [",".join(x.address for x in found) for found in (prefills, decodes)]
        flags = ("--prefill", addresses[0], "--decode", addresses[1], "--beta", "0.2", "--prefill-candidates", "1")
        async with replicas(2, redis, *flags) as routers:
            first, second = routers
            running: list[asyncio.Task[list[int]]] = []

            async def placed(who: Replica, number: int) -> tuple[str, str]:
                """Begin a request whose prefill does not end; return the addresses of its instances."""
                before = {id(request) for x in decodes for request in x.state.requests}
                running.append(asyncio.create_task(who.generate(number)))
                found: list[tuple[str, str]] = []

                async def is_there() -> bool:
                    found.extend(
                        (x.address, request.prefill_candidates[0])
                        for x in decodes
                        for request in x.state.requests
                        if id(request) not in before
                    )
                    return bool(found)

                await until(is_there)
                return found[0]

            async def finish() -> None:
                for x in decodes:
                    x.state.pause_after = None
                    x.changed()
                await asyncio.gather(*running)
                running.clear()
                for x in decodes:
                    x.state.pause_after = 0

            async def counted(*numbers: int) -> bool:
                """Each router has taken over so many chains, and told those of the other."""
                metrics = [await x.metrics() for x in routers]
                told = [(await x.state())["expectations_told"] for x in reversed(routers)]
                return told == list(numbers) and all(
                    f"baton_router_replica_expectations {number}.0\n" in text
                    for number, text in zip(numbers, metrics, strict=True)
                )

            await until(lambda: all_are(routers, "shared"))
            for x in decodes:
                x.state.pause_after = 0
            _, prefill = await placed(first, 1)
            await until(lambda: counted(0, 1))
            assert (await second.state())["others"][0]["expectations"] == 1
            assert (await placed(second, 1))[1] == prefill
            await until(lambda: counted(1, 1))
            assert (await placed(second, 2))[1] != prefill, "by load alone it goes elsewhere"
            await finish()
            await until(lambda: counted(0, 0))
            assert "baton_router_replica_expectations_told_total 0.0\n" not in await first.metrics()

            _, prefill = await placed(first, 3)
            await until(lambda: counted(0, 1))
            await redis.kill()
            await until(lambda: all_are(routers, "alone"))
            await until(lambda: counted(0, 0))
            await placed(second, 3)
            assert (await placed(first, 3))[1] == prefill, "its own expectations count"
            await redis.start()
            await until(lambda: all_are(routers, "shared"))
            _, prefill = await placed(second, 4)
            await until(lambda: counted(1, 0))
            assert (await placed(first, 4))[1] == prefill
            await finish()
            await until(lambda: counted(0, 0))
            for router_ in routers:
                assert "baton_router_request_failures_total{" not in await router_.metrics()
