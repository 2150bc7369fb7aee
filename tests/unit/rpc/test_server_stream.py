"""Calls whose answers a task reads, against gRPC's own server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.api.v1 import events_pb2, worker_pb2, worker_pb2_grpc
from baton.errors import QueueFullError
from baton.rpc.http2.message_stream import Dialer, ServerStream, StreamEnded
from baton.rpc.server import GrpcServer
from baton.rpc.service_token import Token

SERVICE = "baton.api.v1.WorkerService"
METHOD = f"/{SERVICE}/StreamKvEvents"
LIMIT_S = 240.0


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers with as many batches as ``from_sequence`` says, then as ``then`` says."""

    def __init__(self, then: str) -> None:
        self.then = then
        self.ended = asyncio.Event()

    async def StreamKvEvents(
        self, request: worker_pb2.StreamKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamKvEventsResponse]:
        try:
            for sequence in range(request.from_sequence):
                batch = events_pb2.KvEventBatch(sequence=sequence)
                yield worker_pb2.StreamKvEventsResponse(batch=batch)
            if self.then == "fails":
                raise QueueFullError("no room ä", retry_after_s=3.0)
            if self.then == "waits":
                await asyncio.Event().wait()
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def service(then: str = "", token: Token | None = None) -> AsyncIterator[tuple[Servicer, GrpcServer, Dialer]]:
    servicer = Servicer(then)
    server = GrpcServer(host="127.0.0.1", port=0, services=[SERVICE], token=token)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    dialer = Dialer(f"127.0.0.1:{await server.start()}", token=token)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield servicer, server, dialer
    finally:
        dialer.close()
        await server.stop(0)


def stream(dialer: Dialer, count: int, method: str = METHOD) -> ServerStream[worker_pb2.StreamKvEventsResponse]:
    request = worker_pb2.StreamKvEventsRequest(from_sequence=count)
    return ServerStream(dialer, method, request, worker_pb2.StreamKvEventsResponse)


@pytest.mark.parametrize("token", [None, Token("the-token-0123456789")])
async def test_all_answers_come_in_their_order_and_then_the_end(token: Token | None) -> None:
    async with service(token=token) as (_, _, dialer):
        assert [answer.batch.sequence async for answer in stream(dialer, 2000)] == [*range(2000)]
        assert [answer async for answer in stream(dialer, 0)] == []


async def test_an_error_comes_behind_the_answers_before_it() -> None:
    async with service("fails") as (_, _, dialer):
        call = stream(dialer, 3)
        assert [(await anext(call)).batch.sequence for _ in range(3)] == [0, 1, 2]
        with pytest.raises(StreamEnded, match="no room ä") as caught:
            await anext(call)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(caught.value.error, QueueFullError)


async def test_a_method_that_is_not_there() -> None:
    async with service() as (_, _, dialer):
        with pytest.raises(StreamEnded) as caught:
            await anext(stream(dialer, 1, f"/{SERVICE}/Nothing"))
        assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_that_stops_and_one_that_is_not_there() -> None:
    async with service("waits") as (_, server, dialer):
        call = stream(dialer, 1)
        assert (await anext(call)).batch.sequence == 0
        await server.stop(0)
        with pytest.raises(StreamEnded):
            await anext(call)
        with pytest.raises(StreamEnded) as caught:
            await anext(stream(dialer, 1))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_call_that_is_given_up_ends_at_the_server_and_for_who_waits() -> None:
    async with service("waits") as (servicer, _, dialer):
        call = stream(dialer, 1)
        await anext(call)
        waiting = asyncio.ensure_future(anext(call))
        await asyncio.sleep(0)
        call.cancel()
        call.cancel()
        with pytest.raises(StreamEnded) as caught:
            await waiting
        assert caught.value.code is grpc.StatusCode.CANCELLED
        await servicer.ended.wait()
        never_begun = stream(dialer, 1)
        never_begun.cancel()
        with pytest.raises(StreamEnded):
            await anext(never_begun)


async def test_an_answer_that_cannot_be_read() -> None:
    async def odd(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"\xff\xff"

    handler = grpc.unary_stream_rpc_method_handler(odd)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"StreamKvEvents": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    dialer = Dialer(f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(StreamEnded, match="StreamKvEvents cannot be read"):
                await anext(stream(dialer, 1))
    finally:
        dialer.close()
        await server.stop(0)
