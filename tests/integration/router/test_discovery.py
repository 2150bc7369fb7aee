"""Finding instances through Redis and through Kubernetes' EndpointSlices, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import ssl
import subprocess
import urllib.parse
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.support.servers.fake_worker import FakeWorker
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.rpc.redis import cancel_task, instance_key, open_redis
from baton.types import InstanceId, Role
from baton.worker.instance import Identity, redis_registration
from baton_router.registry.discovery import RedisDiscovery, discoveries
from baton_router.registry.registry import Registry


@dataclass
class World:
    stack: contextlib.AsyncExitStack
    clock: list[float] = field(default_factory=lambda: [100.0])

    async def worker(self, role: Role, name: str) -> FakeWorker:
        worker = FakeWorker(role, name)
        await worker.start()
        self.stack.push_async_callback(worker.stop)
        return worker

    async def registry(self, **options: Any) -> Registry:
        config = RouterConfig(**options, reconnect_max_s=0.2)
        registry = Registry(config, CollectorRegistry())
        registry.start()
        self.stack.push_async_callback(registry.close)
        for source in discoveries(config, registry, None, None):
            if isinstance(source, RedisDiscovery):
                source.watch.now = lambda: self.clock[0]
            source.start()
            self.stack.push_async_callback(source.close)
        return registry


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.01)


def names(registry: Registry, role: Role = Role.DECODE) -> set[str]:
    return {x.instance_id for x in registry.ready(role)}


def known(registry: Registry) -> set[str]:
    return {x.address for x in registry.instances()}


# Redis


@pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
async def test_instances_are_found_through_redis_and_kept_while_it_is_away(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    redis = await world.stack.enter_async_context(RedisServer())
    registry = await world.registry(redis=redis.url, discover=("redis",))
    workers = [await world.worker(Role.DECODE, "d0"), await world.worker(Role.PREFILL, "p0")]
    registrations = []
    for worker in workers:
        identity = Identity(worker.address, InstanceId(worker.instance_id), worker.role, worker.epoch)
        registration = redis_registration(redis.url, "baton", identity, None)
        registration.start()
        world.stack.push_async_callback(registration.stop)
        registrations.append(registration)
    await until(lambda: names(registry) == {"d0"} and names(registry, Role.PREFILL) == {"p0"})
    client = open_redis(redis.url, timeout_s=20)
    world.stack.push_async_callback(client.aclose)
    await client.set(instance_key("baton", "bad"), b'{"address": "nowhere", "role": "decode"}')

    await redis.kill()
    # Between two commands its end is not seen, and a client would come to the new one as if it were the old.
    await until(lambda: "Redis is away, the instances" in caplog.text)
    assert len(known(registry)) == 2
    world.clock[0] += 50  # longer than a lease
    await redis.start()  # empty

    async def registered() -> bool:
        return bool(await client.exists(*(instance_key("baton", x.instance_id) for x in workers)) == 2)

    async with asyncio.timeout(240):
        while not await registered():
            assert len(known(registry)) == 2
            await asyncio.sleep(0.02)
    assert len(known(registry)) == 2
    await until(lambda: "Redis answers again, the instances are followed" in caplog.text)
    told = [x.getMessage() for x in caplog.records if x.levelno > logging.INFO and "the instances" in x.getMessage()]
    assert len(told) % 2 == 0, told
    # In turns: a Redis that is slow on a busy machine may be away more than once, but each time is told once.
    assert all("Redis is away" in x for x in told[::2]), told
    assert all("Redis answers again" in x for x in told[1::2]), told
    assert registry._metrics.discovery_failures.labels("redis").value > 0
    await registrations[1].stop()
    await until(lambda: known(registry) == {workers[0].address})
    await cancel_task(registrations[0]._task)
    await client.delete(instance_key("baton", "d0"))  # as if its time had ended: it may still come back
    world.clock[0] += 6
    await client.xadd("baton:instances", {"what": "came", "instance": "x"})
    assert known(registry) == {workers[0].address}
    world.clock[0] += 11
    await until(lambda: known(registry) == set())


# Kubernetes


def endpoint_slice(name: str, *endpoints: tuple[str, bool | None], port: int, version: int) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 9}, {"name": "grpc", "port": port}],
        "endpoints": [{"addresses": [host], "conditions": {"ready": ready}} for host, ready in endpoints],
    }


class ApiServer:
    """As much of Kubernetes' API as a watcher meets: pages, watches, bookmarks, 410, streams that break."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.lists = 0
        self.refused = 0
        self.oldest = 0
        self.watches: list[str] = []
        self.streams: set[asyncio.Queue[bytes | None]] = set()
        self.url = ""

    async def start(self, stack: contextlib.AsyncExitStack, tls: ssl.SSLContext | None) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stack.callback(server.close)
        stack.callback(self.break_streams)

    def send(self, kind: str, item: dict[str, Any]) -> None:
        for stream in self.streams:
            stream.put_nowait(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def bookmark(self) -> None:
        self.version += 1
        self.send("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def break_streams(self) -> None:
        for stream in self.streams:
            stream.put_nowait(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                target = urllib.parse.urlsplit(head.split(b" ")[1].decode())
                query = dict(urllib.parse.parse_qsl(target.query))
                assert target.path == "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
                assert query["labelSelector"] == "app=baton"
                if b"authorization: bearer sesame" not in head.lower():
                    self.refused += 1
                    self._answer(writer, 401, {"kind": "Status", "code": 401})
                elif "watch" not in query:
                    self._list(writer, query)
                elif int(query["resourceVersion"]) < self.oldest:
                    self._answer(writer, 410, {"kind": "Status", "code": 410})
                else:
                    await self._watch(writer, query)
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.transport.abort()

    def _list(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        self.lists += 1
        at = int(query.get("continue", "0"))
        more = str(at + 1) if at + 1 < len(self.items) else ""
        metadata = {"resourceVersion": str(self.version), "continue": more}
        self._answer(writer, 200, {"metadata": metadata, "items": self.items[at : at + 1]})

    async def _watch(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        self.watches.append(query["resourceVersion"])
        assert query["allowWatchBookmarks"] == "true"
        stream: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.streams.add(stream)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while (line := await stream.get()) is not None:
                for part in (line[:10], line[10:]):  # lines come in any pieces
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
        finally:
            self.streams.discard(stream)

    @staticmethod
    def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))


@pytest.fixture(params=["http", "https"])
async def api(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> ApiServer:
    (tmp_path / "token").write_text("sesame\n")
    (tmp_path / "namespace").write_text("serving")
    tls = None
    if request.param == "https":
        if shutil.which("openssl") is None:
            pytest.skip("no openssl to make a certificate with")
        await asyncio.to_thread(
            subprocess.run,
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.crt"), "-days", "2"),
                *("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
    server = ApiServer()
    await server.start(world.stack, tls)
    return server


async def watch(world: World, api: ApiServer, account: Path) -> Registry:
    return await world.registry(
        discover=("kubernetes",),
        kubernetes_api=api.url,
        kubernetes_account=str(account),
        kubernetes_selector="app=baton",
    )


async def test_endpoint_slices_are_listed_and_watched(world: World, api: ApiServer, tmp_path: Path) -> None:
    prefill, decode, late = [
        await world.worker(role, name)
        for role, name in ((Role.PREFILL, "p0"), (Role.DECODE, "d0"), (Role.DECODE, "d1"))
    ]
    here = "127.0.0.1"
    api.items = [
        endpoint_slice("a", (here, True), port=prefill.port, version=1),
        endpoint_slice("b", (here, None), ("127.0.0.9", False), port=decode.port, version=1),
    ]
    registry = await watch(world, api, tmp_path)
    await until(lambda: names(registry) == {"d0"} and names(registry, Role.PREFILL) == {"p0"})
    assert api.lists == 2, "two pages"

    await until(lambda: bool(api.streams))
    api.version = 5
    api.send("ADDED", endpoint_slice("c", (here, True), port=late.port, version=5))
    await until(lambda: names(registry) == {"d0", "d1"})
    api.send("MODIFIED", endpoint_slice("c", (here, False), port=late.port, version=6))
    await until(lambda: names(registry) == {"d0"})
    api.send("DELETED", endpoint_slice("a", port=prefill.port, version=7))
    await until(lambda: known(registry) == {decode.address})

    # A stream that breaks goes on from the last bookmark.
    api.version = 41
    api.bookmark()
    api.break_streams()
    await until(lambda: api.watches[-1] == "42" and bool(api.streams))
    assert api.lists == 2
    api.send("MODIFIED", endpoint_slice("c", (here, True), port=late.port, version=43))
    await until(lambda: names(registry) == {"d0", "d1"})

    # 410 in the stream, then 410 as the answer: everything is listed anew.
    api.items = [endpoint_slice("c", (here, True), port=late.port, version=50)]
    api.version = 50
    api.send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
    await until(lambda: known(registry) == {late.address})
    await until(lambda: api.watches[-1] == "50" and bool(api.streams))
    lists, api.oldest, api.version = api.lists, 60, 61
    api.items.append(endpoint_slice("b", (here, True), port=decode.port, version=61))
    api.break_streams()
    await until(lambda: known(registry) == {late.address, decode.address})
    assert api.lists == lists + 2
    await until(lambda: api.watches[-1] == "61")

    # The token is read for every request.
    (tmp_path / "token").write_text("wrong")
    await until(lambda: bool(api.streams))
    api.break_streams()
    await until(lambda: api.refused > 0)
    assert known(registry) == {late.address, decode.address}
    (tmp_path / "token").write_text("sesame")
    await until(lambda: bool(api.streams))


@pytest.mark.parametrize("api", ["http"], indirect=True)
async def test_answers_of_another_shape_end_no_watch(world: World, api: ApiServer, tmp_path: Path) -> None:
    decode = await world.worker(Role.DECODE, "d0")
    registry = await watch(world, api, tmp_path)
    for watches, shape in enumerate(
        ([], {"type": "ADDED", "object": None}, {"type": "ADDED", "object": {"metadata": 5}})
    ):
        # Streams that the client left are still among the server's: a new watch is waited for.
        await until(lambda n=watches: len(api.watches) > n)
        lists = api.lists
        for stream in api.streams:
            stream.put_nowait(json.dumps(shape).encode() + b"\n")
        await until(lambda before=lists: api.lists > before)  # what came may have been half taken
    await until(lambda: len(api.watches) > 3)
    api.send("ADDED", endpoint_slice("c", ("127.0.0.1", True), port=decode.port, version=5))
    await until(lambda: names(registry) == {"d0"})


def test_configuration_names_what_is_missing(tmp_path: Path) -> None:
    for options, name in (
        ({"discover": ("dns",)}, "discover"),
        ({"discover": ("redis",)}, "redis"),
        ({"discover": ("kubernetes",)}, "kubernetes_selector"),
    ):
        with pytest.raises(ConfigError) as refused:
            RouterConfig(**options)  # type: ignore[arg-type]
        assert refused.value.field == name
    config = RouterConfig(discover=("kubernetes",), kubernetes_selector="a=b", kubernetes_account=str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        discoveries(config, Registry(config, CollectorRegistry()), None, None)
    assert refused.value.field == "kubernetes_api"
