"""Who knows no token holds neither connections nor calls nor what others have, whatever it sends or leaves out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import sys
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.api.v1 import auth_pb2, router_pb2, router_pb2_grpc
from baton.errors import InvalidRequestError
from baton.rpc import channel as channel_module
from baton.rpc import connections, server
from baton.rpc.channel import open_channel
from baton.rpc.server import GrpcServer
from baton.rpc.service_token import Token

SERVICE = "baton.api.v1.RouterService"
TOKEN = Token("3b1f8a64c0de99a75b1f8a64c0de99a7")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Servicer(router_pb2_grpc.RouterServiceServicer):
    """Streams until it is told to end."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def Route(self, request: Any, context: Any) -> router_pb2.RouteResponse:
        return router_pb2.RouteResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
        yield router_pb2.RouterGenerateResponse(request_id="first")
        await self.end.wait()
        yield router_pb2.RouterGenerateResponse(request_id="last")


class Running:
    def __init__(self, made: GrpcServer, servicer: Servicer, port: int) -> None:
        self.server, self.servicer, self.port = made, servicer, port
        self.address = f"127.0.0.1:{port}"

    async def serves(self) -> bool:
        """Whether who knows the token is served."""
        async with open_channel(self.address, token=TOKEN) as channel:
            await router_pb2_grpc.RouterServiceStub(channel).Route(router_pb2.RouteRequest(), timeout=240)
        return True


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Running]:
    servicer = Servicer()
    made = GrpcServer(host="127.0.0.1", port=0, services=[SERVICE], token=TOKEN)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, made.server)
    port = await made.start()
    await made.set_serving(True)
    try:
        yield Running(made, servicer, port)
    finally:
        await made.stop(0)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call_of(path: str, stream: int = 1) -> bytes:
    """Return the head of a call; its request does not follow."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path.encode(), b":authority": b"x"}
    fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    return frame(1, 4, stream, b"".join(literal(*each) for each in fields.items()))


def message(data: bytes, stream: int = 1) -> bytes:
    return frame(0, 1, stream, b"\0" + len(data).to_bytes(4) + data)


async def connect(port: int, *frames: bytes, settings: bytes = b"") -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, PREFACE + frame(4, 0, 0, settings) + b"".join(frames))
    return sock


def hung_up(sock: socket.socket) -> bool:
    """Whether the server has closed a connection."""
    with contextlib.suppress(BlockingIOError):
        while sock.recv(65536):
            pass
        return True
    return False


async def until(condition: Any) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.02)


async def test_idle_connections_without_a_token_give_way_and_streams_of_services_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_SCAN_S", 0.1)
    async with running() as here, open_channel(here.address, token=TOKEN) as channel:
        stream = router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.RouterGenerateRequest())
        assert (await stream.read()).request_id == "first"
        idle = [await connect(here.port) for _ in range(3 * connections.MAX_UNKNOWN)]
        try:
            await until(lambda: sum(map(hung_up, idle)) >= 2 * connections.MAX_UNKNOWN)
            assert not all(map(hung_up, idle[-connections.MAX_UNKNOWN // 2 :])), "the oldest give way"
            assert await here.serves()
            here.servicer.end.set()
            assert (await stream.read()).request_id == "last"
        finally:
            for sock in idle:
                sock.close()


async def test_calls_without_their_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_S", 0.2)
    shorter = {"grpc.max_connection_idle_ms": 1000}
    monkeypatch.setattr(server, "_OPTIONS", list((dict(server._OPTIONS) | shorter).items()))
    paths = ["/baton.api.v1.AuthService/Challenge", "/baton.api.v1.AuthService/Prove"]
    paths += ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
    paths += [f"/{SERVICE}/Route", f"/{SERVICE}/Generate", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
    async with running() as here:

        async def ends(path: str) -> None:
            with await connect(here.port, call_of(path)) as sock:
                await until(lambda: hung_up(sock))  # a call that went on would keep it

        await asyncio.gather(*map(ends, paths))
        monkeypatch.undo()  # those whose requests do come have as long as ever
        assert await here.serves()


async def test_few_requests_of_health_checks_are_read_at_once() -> None:
    async with running() as here, grpc.aio.insecure_channel(here.address) as channel:
        check = channel.stream_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        silent = [check() for _ in range(8)]
        async with asyncio.timeout(240):
            results = await asyncio.gather(*silent, return_exceptions=True)
    errors = [each for each in results if isinstance(each, grpc.aio.AioRpcError)]
    assert len(errors) <= server._MAX_READING_PER_PEER
    assert {each.code() for each in errors} <= {grpc.StatusCode.DEADLINE_EXCEEDED}
    answers = [each for each in results if not isinstance(each, grpc.aio.AioRpcError)]
    assert answers, "the others are answered without their requests"
    assert {each.status for each in answers} == {health_pb2.HealthCheckResponse.SERVING}


async def test_long_messages_of_strangers_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    parse = server._parse

    def record(data: bytes, parser: Any) -> Any:
        lengths.append(len(data))
        return parse(data, parser)

    monkeypatch.setattr(server, "_parse", record)
    long = bytes(20 << 20)
    codes = []
    async with running() as here:
        for path in ("baton.api.v1.AuthService/Challenge", "baton.api.v1.AuthService/Prove"):
            codes.append(await _status(here.address, f"/{path}", long))
        assert lengths == [0, 0], "requests of proofs come from the heads"
        for path in ("grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"):
            codes.append(await _status(here.address, f"/{path}", long))
        assert lengths == [0, 0, len(long), len(long)]
        assert await here.serves()
    refused = grpc.StatusCode.INVALID_ARGUMENT
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, refused, refused]


async def _status(address: str, path: str, message: bytes) -> grpc.StatusCode:
    """Return the status of a call with one message, from a channel of its own."""
    async with grpc.aio.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_stream(path)(message, timeout=240)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        status: grpc.StatusCode = await call.code()
        return status


class _Message:
    """A message that weak references may refer to."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _num_aborted() -> int:
    return sum(isinstance(each, grpc.aio.AbortError) for each in gc.get_objects())


async def test_requests_of_refused_calls_are_freed_at_once() -> None:
    alive: list[weakref.ref[_Message]] = []

    def parse(data: bytes) -> _Message:
        made = _Message(data)
        alive.append(weakref.ref(made))
        return made

    async def refuse(request: _Message, context: Any) -> bytes:
        raise InvalidRequestError("no", field="data")

    async def refuse_later(request: _Message, context: Any) -> AsyncIterator[bytes]:
        yield b""
        raise InvalidRequestError("no", field="data")

    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=parse),
        "Stream": grpc.unary_stream_rpc_method_handler(refuse_later, request_deserializer=parse),
    }
    made = GrpcServer(host="127.0.0.1", port=0, services=[])
    made.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.Test", handlers),))
    port = await made.start()
    gc.disable()
    try:
        for name in handlers:
            for _ in range(5):
                code = await _status(f"127.0.0.1:{port}", f"/baton.Test/{name}", b"data")
                assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(alive) == 10
        assert not any(ref() for ref in alive)
        before = _num_aborted()
        for name in ("Check", "Watch"):  # bytes have no weak references, but what would hold them does
            code = await _status(f"127.0.0.1:{port}", f"/grpc.health.v1.Health/{name}", b"data" * 1000)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert _num_aborted() == before
    finally:
        gc.enable()
        await made.stop(0)


async def test_a_server_without_descriptors_makes_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is this process's, so the other ends are a process of their own."""
    monkeypatch.setattr(connections, "_SCAN_S", 0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running() as here:
        code = (
            "import socket, sys\n"
            f"held = [socket.create_connection(('127.0.0.1', {here.port})) for _ in range(200)]\n"
            f"for sock in held: sock.sendall({PREFACE + frame(4, 0, 0, b'')!r})\n"
            "print('all', flush=True)\n"
            "sys.stdin.read()\n"
        )
        try:
            pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
            flood = await asyncio.create_subprocess_exec(sys.executable, "-c", code, **pipes)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
            assert flood.stdin is not None
            assert flood.stdout is not None
            assert await asyncio.wait_for(flood.stdout.readline(), 240) == b"all\n"

            def room() -> bool:
                return len(os.listdir("/proc/self/fd")) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 20

            async with asyncio.timeout(240):
                while True:
                    with contextlib.suppress(OSError):
                        if room():
                            break
                    await asyncio.sleep(0.05)
            assert await here.serves()
            flood.stdin.close()
            await flood.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_baton_s_own_callers_leave_before_they_are_idle_for_too_long() -> None:
    idle_ms = dict(channel_module._OPTIONS)["grpc.client_idle_timeout_ms"]
    assert idle_ms < dict(server._OPTIONS)["grpc.max_connection_idle_ms"]


async def test_a_watcher_that_reads_nothing_keeps_no_service_from_stopping() -> None:
    watch = call_of("/grpc.health.v1.Health/Watch") + message(b"")
    no_window = (4).to_bytes(2) + (0).to_bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE
    async with running() as here:
        with await connect(here.port, watch, settings=no_window):
            await until(lambda: here.server._health._watching.total() == 1)
            async with asyncio.timeout(240):
                await here.server.set_serving(False)
                await here.server.set_serving(True)


async def test_a_watcher_that_leaves_takes_no_news_from_others() -> None:
    async with running() as here, grpc.aio.insecure_channel(here.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stays, leaves = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        assert (await stays.read()).status == (await leaves.read()).status == health_pb2.HealthCheckResponse.SERVING
        leaves.cancel()
        await until(lambda: here.server._health._watching.total() == 1)
        await here.server.set_serving(False)
        assert (await asyncio.wait_for(stays.read(), 240)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody's"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        for call in (stays, unknown):
            call.cancel()


async def test_what_is_compressed_is_refused_and_not_unpacked() -> None:
    request = health_pb2.HealthCheckRequest(service="x" * (40 << 20))  # more than a message may have, once unpacked
    async with running() as here:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(here.address, options, compression=grpc.Compression.Gzip) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=240)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await here.serves()


async def test_answers_of_a_stranger_are_not_unpacked_either() -> None:
    async def challenge(request: Any, context: Any) -> auth_pb2.ChallengeResponse:
        return auth_pb2.ChallengeResponse(nonce=bytes(40 << 20))

    handler = grpc.unary_unary_rpc_method_handler(
        challenge, response_serializer=auth_pb2.ChallengeResponse.SerializeToString
    )
    rogue = grpc.aio.server(
        options=[("grpc.max_send_message_length", -1)],
        compression=grpc.Compression.Gzip,
    )
    name = "baton.api.v1.AuthService"
    rogue.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Challenge": handler}),))
    port = rogue.add_insecure_port("127.0.0.1:0")
    await rogue.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", token=TOKEN) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router_pb2_grpc.RouterServiceStub(channel).Route(router_pb2.RouteRequest(), timeout=240)
        assert caught.value.code() is grpc.StatusCode.INTERNAL  # RESOURCE_EXHAUSTED comes after unpacking
        assert "'gzip' is disabled" in str(caught.value.details())
    finally:
        await rogue.stop(0)
