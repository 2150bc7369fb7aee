"""Frames instead of gRPC: cutting them, who is let in, and what is closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import QueueFullError
from baton.rpc import frame_server
from baton.rpc import multiplex as many
from baton.rpc.call_stream import CallServer
from baton.rpc.frames import MAGIC, FrameError, Frames, frame, hello
from baton.rpc.multiplex import Calls, generate_many
from baton.rpc.server import MAX_MESSAGE_BYTES

EPOCH = b"e" * 16
TOKEN = "secret"


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 50), min_size=1))
@settings(deadline=None)
def test_frames_come_out_as_they_went_in_however_they_are_cut(payloads: list[bytes], sizes: list[int]) -> None:
    data, frames, out = b"".join(map(frame, payloads)), Frames(40), []
    at, turn = 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        out += frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert out == payloads


@given(st.integers(11, 2**32 - 1), st.integers(0, 3))
@settings(deadline=None)
def test_a_frame_that_is_too_long_is_refused_before_it_is_there(size: int, cut: int) -> None:
    frames, data = Frames(10), frame(b"fine") + size.to_bytes(4, "little")
    assert frames.feed(data[: 8 + cut]) == [b"fine"]
    with pytest.raises(FrameError):
        frames.feed(data[8 + cut :] + b"x")


class Engine:
    """Gives tokens 0, 1, ... and notes who was cut off."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.go_on = asyncio.Event()
        self.idle = asyncio.Event()

    async def generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        self.running.add(request.request_id)
        try:
            for at in range(request.sampling.max_tokens):
                if at:
                    await self.go_on.wait()
                if at % 1000 == 999:
                    await asyncio.sleep(0)  # as an engine's steps do
                yield worker_pb2.GenerateResponse(deltas=[worker_pb2.SequenceDelta(token_ids=[at])])
        finally:
            self.running.discard(request.request_id)
            if not self.running:
                self.idle.set()


class Client:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def next(self) -> bytes:
        async with asyncio.timeout(30):
            return await self.reader.readexactly(int.from_bytes(await self.reader.readexactly(4), "little"))

    async def until_closed(self) -> None:
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                await self.reader.read()

    def start(self, *names: str, tokens: int) -> None:
        message = worker_pb2.GenerateManyRequest()
        for call, name in enumerate(names, 1):
            sampling = common_pb2.SamplingParams(max_tokens=tokens)
            message.starts.add(call=call, request=worker_pb2.GenerateRequest(request_id=name, sampling=sampling))
        self.writer.write(frame(message.SerializeToString()))


class World:
    def __init__(self, engine: Engine, port: int, stack: contextlib.AsyncExitStack) -> None:
        self.engine, self._port, self._stack = engine, port, stack

    async def connect(self, *, buffer: int = 0) -> Client:
        sock = socket.socket()
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.connect(("127.0.0.1", self._port))
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        self._stack.callback(writer.close)
        return Client(reader, writer)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    engine = Engine()
    server = CallServer(lambda: Calls(engine.generate, None), lambda: EPOCH, TOKEN)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        port = await server.start("127.0.0.1")
        assert server._server is not None
        server._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        yield World(engine, port, stack)


async def test_a_step_is_one_frame_and_leaving_ends_all_calls(world: World) -> None:
    client = await world.connect()
    client.writer.write(hello(EPOCH, TOKEN))
    client.start("a", "b", "c", tokens=3)  # without waiting for the welcome
    assert await client.next() == b""
    message = worker_pb2.GenerateManyResponse.FromString(await client.next())
    assert (list(message.token_calls), list(message.token_ids)) == ([1, 2, 3], [0, 0, 0])
    assert world.engine.running == {"a", "b", "c"}
    client.writer.close()
    async with asyncio.timeout(30):
        await world.engine.idle.wait()


async def test_a_call_can_be_cancelled_and_ends(world: World) -> None:
    client = await world.connect()
    client.writer.write(hello(EPOCH, TOKEN))
    client.start("a", "b", tokens=2)
    assert await client.next() == b""
    await client.next()
    client.writer.write(frame(worker_pb2.GenerateManyRequest(cancels=[1]).SerializeToString()))
    message = worker_pb2.GenerateManyResponse.FromString(await client.next())
    assert [end.call for end in message.ends] == [1]
    world.engine.go_on.set()
    message = worker_pb2.GenerateManyResponse.FromString(await client.next())
    assert (list(message.token_calls), [end.call for end in message.ends]) == ([2], [2])


@pytest.mark.parametrize(
    ("greeting", "answer"),
    [
        (hello(EPOCH, None), b"token"),
        (hello(EPOCH, "wrong"), b"token"),
        (hello(b"f" * 16, TOKEN), b"epoch"),
        (MAGIC + frame(b""), b"token"),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (MAGIC + (2**31).to_bytes(4, "little"), None),
    ],
)
async def test_strangers_are_not_let_in(world: World, greeting: bytes, answer: bytes | None) -> None:
    client = await world.connect()
    client.writer.write(greeting)
    if answer is not None:
        assert await client.next() == answer
    await client.until_closed()
    assert not world.engine.running


@pytest.mark.parametrize("data", [frame(b"\xff"), (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")])
async def test_what_is_no_message_ends_the_connection_and_its_calls(world: World, data: bytes) -> None:
    client = await world.connect()
    client.writer.write(hello(EPOCH, TOKEN))
    client.start("a", tokens=2)
    assert await client.next() == b""
    await client.next()
    client.writer.write(data)
    await client.until_closed()
    async with asyncio.timeout(30):
        await world.engine.idle.wait()


async def test_a_call_that_is_cancelled_before_it_began_is_forgotten() -> None:
    async def requests() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        message = worker_pb2.GenerateManyRequest(cancels=[1])
        message.starts.add(call=1, request=worker_pb2.GenerateRequest(request_id="a"))
        yield message

    async with asyncio.timeout(30):  # the stream ends when the last call has
        assert [message async for message in generate_many(Engine().generate, requests(), None)] == []


async def flooded(world: World) -> Client:
    """A client that has begun a call whose answers it does not read."""
    client = await world.connect(buffer=4096)
    client.reader._limit = 1  # type: ignore[attr-defined]  # the stream reads ahead no more than this
    client.writer.write(hello(EPOCH, TOKEN))
    client.start("a", tokens=10**9)
    world.engine.go_on.set()
    return client


async def test_a_client_that_reads_nothing_is_given_up_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frame_server, "UNREAD_S", 0.1)
    await flooded(world)
    async with asyncio.timeout(30):
        await world.engine.idle.wait()
    assert "its client has read nothing for 0.1 s" in caplog.text


async def test_what_a_client_leaves_unread_is_bounded_in_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(many, "MAX_MESSAGE_BYTES", 100_000)
    await flooded(world)
    async with asyncio.timeout(30):
        await world.engine.idle.wait()
    assert "its caller left more than 100000 bytes unread" in caplog.text


async def test_a_caller_over_grpc_that_reads_nothing_is_told_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MAX_MESSAGE_BYTES", 100_000)
    engine, forever = Engine(), asyncio.Event()
    engine.go_on.set()

    async def requests() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        message = worker_pb2.GenerateManyRequest()
        sampling = common_pb2.SamplingParams(max_tokens=10**9)
        message.starts.add(call=1, request=worker_pb2.GenerateRequest(request_id="a", sampling=sampling))
        yield message
        await forever.wait()

    stream = generate_many(engine.generate, requests(), None)
    async with asyncio.timeout(30):
        await anext(stream)  # and takes no more
        await engine.idle.wait()
        with pytest.raises(QueueFullError, match="more than 100000 bytes"):
            await anext(stream)
