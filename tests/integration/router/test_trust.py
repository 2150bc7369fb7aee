"""Whoever can write to Redis, or listens where a service should be, gets neither the token nor a request.

A real Redis, real routers, and a rogue that answers like an instance and writes down whatever it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from tests.integration.router.test_router_process import Process, router
from tests.support.servers.fake_worker import FakeWorker
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.api.v1 import router_pb2, router_pb2_grpc, worker_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.redis import (
    MAX_ANSWER_BYTES,
    Registrations,
    instance_key,
    news_key,
    open_redis,
    redis_errors,
    redis_ms,
    sign_registration,
)
from baton.rpc.service_token import read_token
from baton.types import InstanceId, Role
from baton.worker.instance import Identity, Registration, redis_registration
from baton_router.replication.redis_log import RedisLog

pytestmark = pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
SECRET = "c0ffee-0123456789abcdef-of-the-services"


class Recorder(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Keeps the method and the metadata of every call, also of those that nobody serves."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        self.calls.append((details.method, str(details.invocation_metadata)))
        return await continuation(details)


class Rogue:
    """A process that knows no token and takes every call of an instance."""

    def __init__(self, role: Role) -> None:
        self.worker, self.recorder = FakeWorker(role, "rogue"), Recorder()
        self.worker.state.model_path = "models/baton-tiny"
        self._server = grpc.aio.server(interceptors=[self.recorder])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.worker, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> Rogue:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def saw(self, text: str) -> bool:
        return any(text in metadata for _, metadata in self.recorder.calls)

    def requests(self) -> list[str]:
        """Return the calls that it got, but those by which it should prove the token."""
        return [method for method, _ in self.recorder.calls if "AuthService" not in method]


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return str(path)


@contextlib.asynccontextmanager
async def honest(role: Role, name: str, token_file: str) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(role, name, token=read_token(token_file))
    worker.state.model_path = "models/baton-tiny"
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def metrics(process: Process) -> str:
    async with httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240) as http:
        return (await http.get("/metrics")).text


async def complete(process: Process) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{process.http}", timeout=240) as http:
        body = {"prompt": [1, 2, 3, 4] * 8, "max_tokens": 4}
        return await http.post("/v1/completions", json=body)


async def serves(process: Process) -> bool:
    return (await complete(process)).status_code == 200


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(240):
        while not await condition():
            await asyncio.sleep(0.05)


def refused(text: str, kind: str) -> float:
    name = f'baton_router_redis_refused_total{{kind="{kind}"}} '
    return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_who_writes_to_redis_gets_neither_the_token_nor_a_request(role: Role, token_file: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        rogue = await stack.enter_async_context(Rogue(role))
        worker = await stack.enter_async_context(honest(Role.DECODE, "d0", token_file))
        flags = ("--redis", redis.url, "--discover", "redis", "--decode", worker.address, "--token-file", token_file)
        process = await stack.enter_async_context(router(*flags))
        client = open_redis(redis.url)
        stack.push_async_callback(client.aclose)
        identity = {"address": rogue.address, "role": role.value, "epoch": "00" * 16}
        entry = {"replica": "r9", "epoch": "e", "seq": 1, "full": True, "v": 1, "registered": [[rogue.address, role]]}

        async def attacked() -> bool:
            await client.set(instance_key("baton", "rogue"), json.dumps(identity))
            await client.xadd(news_key("baton"), {"instance": "rogue", "what": "came"})
            entry["seq"] += 1
            await client.xadd("baton:replicas", {"m": json.dumps(entry)})
            text = await metrics(process)
            return bool(rogue.requests()) or (refused(text, "instance") > 1 and refused(text, "replica") > 1)

        await until(attacked)
        assert not rogue.saw(SECRET)
        assert rogue.recorder.calls == []
        await until(lambda: serves(process))
        assert rogue.recorder.calls == []


async def test_who_listens_where_an_instance_should_be_gets_neither_the_token_nor_a_request(token_file: str) -> None:
    async with Rogue(Role.PREFILL) as rogue, honest(Role.DECODE, "d0", token_file) as worker:
        flags = ("--prefill", rogue.address, "--decode", worker.address, "--token-file", token_file)
        async with router(*flags) as process:

            async def told() -> bool:
                text = await metrics(process)
                return 'baton_router_instance_refusals_total{field="token"} 1.0' in text or bool(rogue.requests())

            await until(told)
            assert not rogue.saw(SECRET)
            await until(lambda: serves(process))
        assert rogue.recorder.calls
        assert rogue.requests() == []


async def test_signed_registrations_are_found_and_can_be_neither_moved_nor_changed(token_file: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        rogue = await stack.enter_async_context(Rogue(Role.DECODE))
        worker = await stack.enter_async_context(honest(Role.DECODE, "d0", token_file))
        identity = Identity(worker.address, InstanceId("d0"), Role.DECODE, worker.epoch)
        registration = redis_registration(redis.url, "baton", identity, read_token(token_file))
        registration.start()
        stack.push_async_callback(registration.stop)
        process = await stack.enter_async_context(
            router("--redis", redis.url, "--discover", "redis", "--token-file", token_file)
        )
        await until(lambda: serves(process))
        client = open_redis(redis.url)
        stack.push_async_callback(client.aclose)
        signed: Any = await client.get(instance_key("baton", "d0"))
        assert SECRET.encode() not in signed
        await client.set(instance_key("baton", "d1"), signed)
        moved = signed.replace(worker.address.encode(), rogue.address.encode())
        assert moved != signed
        await client.set(instance_key("baton", "d2"), moved)

        async def ignored() -> bool:
            return refused(await metrics(process), "instance") >= 2

        await until(ignored)
        assert await serves(process)
        assert rogue.recorder.calls == []
        stub: Any = router_pb2_grpc.RouterServiceStub(
            await stack.enter_async_context(open_channel(process.grpc, token=read_token(token_file)))
        )
        known = await stub.ListInstances(router_pb2.ListInstancesRequest(), timeout=240)
        assert [x.address for x in known.instances] == [worker.address]


async def test_routers_with_a_token_believe_each_others_entries(token_file: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        worker = await stack.enter_async_context(honest(Role.DECODE, "d0", token_file))
        flags = ("--redis", redis.url, "--token-file", token_file)
        first = await stack.enter_async_context(router(*flags, "--replica-name", "r0"))
        second = await stack.enter_async_context(router(*flags, "--replica-name", "r1"))
        identity = Identity(worker.address, InstanceId("d0"), Role.DECODE, worker.epoch)
        registration = Registration(first.grpc, identity, read_token(token_file))
        registration.start()
        stack.push_async_callback(registration.stop)
        await until(lambda: serves(second))
        for process in (first, second):
            assert refused(await metrics(process), "replica") == 0


async def test_an_old_entry_of_the_stream_is_not_believed(token_file: str) -> None:
    async with RedisServer() as redis:
        why: list[str] = []
        logs = [RedisLog(redis.url, "baton", name, read_token(token_file), why.append) for name in ("r0", "r1")]
        client = open_redis(redis.url)
        try:
            for each in logs:
                await each.connect()
            await logs[0].publish(b"fresh")
            (_, fields), *_ = await client.xrange("baton:replicas")
            later = await redis_ms(client) + 11_000
            await client.xadd("baton:replicas", fields, id=f"{later}-0")
            changed = fields | {b"m": b"changed"}
            await client.xadd("baton:replicas", changed, id=f"{later}-1")
            reader = logs[1].read()
            assert await anext(reader) == [b"fresh"]
            await reader.aclose()
            assert why == ["it is an old one", "it is not signed with this side's token"]
        finally:
            await client.aclose()
            for each in logs:
                await each.close()


async def test_what_others_write_does_not_fill_the_memory_of_who_looks(token_file: str) -> None:
    token = read_token(token_file)
    async with RedisServer() as server, contextlib.aclosing(open_redis(server.url)) as redis:
        key, now_ms = instance_key("b", "d0"), await redis_ms(redis)
        await redis.set(key, sign_registration(token, key, {"address": "127.0.0.1:1"}, now_ms))
        await redis.lpush(instance_key("b", "list"), "x")
        for at in range(3):
            await redis.setrange(instance_key("b", f"big{at}"), 32 << 20, b"x")
        refused: list[int] = []
        registrations = Registrations(redis, instance_key("b", ""), token, itemgetter("address"), refused.append)
        tracemalloc.start()
        try:
            assert list(await registrations.read()) == ["d0"]
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        assert refused == [3]
        await redis.execute_command("ACL SETUSER", "default", "-get", "-mget", "-getrange")
        with pytest.raises(redis_errors()):  # no news, which is not the news that nobody is there
            await registrations.read()


async def test_however_many_keys_others_write_a_look_is_short_and_who_is_signed_is_found(
    token_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = read_token(token_file)
    async with RedisServer() as server, contextlib.aclosing(open_redis(server.url)) as redis:

        async def register(name: str) -> None:
            key = instance_key("b", name)
            await redis.set(key, sign_registration(token, key, {"address": name}, await redis_ms(redis)))

        async with redis.pipeline(transaction=False) as pipeline:
            for at in range(20_000):
                pipeline.set(instance_key("b", f"rogue{at}"), '{"address": "x"}')
            await pipeline.execute()
        await redis.set(instance_key("b", "n" * (8 << 20)), "a name that is too long")
        await register("d0")
        refused: list[int] = []
        async with contextlib.aclosing(open_redis(server.url, most=MAX_ANSWER_BYTES)) as bounded:
            registrations = Registrations(bounded, instance_key("b", ""), token, itemgetter("address"), refused.append)
            assert await registrations.read_named(["d0"]) == {"d0": "d0"}  # by news: at once
            for _ in range(50):
                before = sum(refused)
                assert "d0" in await registrations.read()  # who was believed is looked at each time
                assert sum(refused) - before <= 3000
                if registrations.complete:
                    break
            assert registrations.complete
            assert sum(refused) >= 20_000
            await register("d1")
            looks = 0
            while "d1" not in await registrations.read():  # found without news, too
                looks += 1
                assert looks < 50
        assert caplog.text.count("more than") == 1


async def test_entries_that_are_too_long_are_passed_over_unread(token_file: str) -> None:
    async with RedisServer() as redis:
        why: list[str] = []
        logs = [RedisLog(redis.url, "baton", name, read_token(token_file), why.append) for name in ("r0", "r1")]
        client: Any = open_redis(redis.url, timeout_s=30)
        try:
            for each in logs:
                await each.connect()
            await logs[0].publish(b"first")
            found: list[bytes] = []
            tracemalloc.start()

            async def read() -> None:
                while True:
                    with contextlib.suppress(*redis_errors()):  # a busy machine: Redis took more than a second
                        await logs[1].connect()  # as replicas do
                        async for data in logs[1].read():
                            found.extend(data)
                            if b"last" in found:
                                return

            try:
                reading = asyncio.create_task(read())
                await until(lambda: asyncio.sleep(0, b"first" in found))
                write = "redis.call('XADD', KEYS[1], '*', 'm', string.rep('x', ARGV[1]))"
                for _ in range(2):
                    await client.eval(write, 1, "baton:replicas", 32 << 20)
                await client.xadd("baton:replicas", {f"f{at}": b"x" * 1000 for at in range(4500)})
                await until(lambda: asyncio.sleep(0, bool(why)))
                assert tracemalloc.get_traced_memory()[1] < 30 << 20
            finally:
                tracemalloc.stop()

            async def heard() -> bool:
                await logs[0].publish(b"last")
                return reading.done()

            await until(heard)
            assert set(found) == {b"first", b"last"}
            assert set(why) == {"it is too long"}
        finally:
            await client.aclose()
            for each in logs:
                await each.close()


async def test_news_that_are_too_long_keep_nobody_from_being_found(token_file: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        client: Any = open_redis(redis.url, timeout_s=30)
        stack.push_async_callback(client.aclose)
        write = "redis.call('XADD', KEYS[1], '*', 'instance', string.rep('x', ARGV[1]))"
        await client.eval(write, 1, news_key("baton"), 64 << 20)
        flags = ("--redis", redis.url, "--discover", "redis", "--token-file", token_file)
        process = await stack.enter_async_context(router(*flags))
        worker = await stack.enter_async_context(honest(Role.DECODE, "d0", token_file))
        await client.eval(write, 1, news_key("baton"), 64 << 20)
        identity = Identity(worker.address, InstanceId("d0"), Role.DECODE, worker.epoch)
        registration = redis_registration(redis.url, "baton", identity, read_token(token_file))
        registration.start()
        stack.push_async_callback(registration.stop)
        await until(lambda: serves(process))
