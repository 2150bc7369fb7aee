"""Unary calls as frames: answers, errors, deadlines, cancellation, limits, and what travels with what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from baton.api.v1 import kvstore_pb2
from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
)
from baton.rpc import unary
from baton.rpc.frame_server import FrameServer
from baton.rpc.frames import hello
from baton.rpc.unary import UnaryClient, UnaryServer, methods_of

EPOCH = b"e" * 16
WAIT_S = 30.0
SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"]


class Servicer:
    """Notes whom it was asked for; blocks whose lease is 0 are waited for until ``go_on``."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[str] = []
        self.changed = asyncio.Event()
        self.go_on = asyncio.Event()
        self.remaining: float | None = None

    def __getattr__(self, name: str) -> Any:
        return self.Contains  # methods that are not called here

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        self.begun.append(request.lease_id)
        self.remaining = context.time_remaining()
        self.changed.set()
        if request.lease_id == 0:
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                self.changed.set()
                raise
            self.ended.append("well")
        return kvstore_pb2.ReleaseResponse(found=True)

    async def Contains(self, request: kvstore_pb2.ContainsRequest, context: Any) -> kvstore_pb2.ContainsResponse:
        if request.block_hashes:
            raise QueueFullError("full", field="block_hashes", retry_after_s=1.5)
        raise ValueError("not ours")

    async def until(self, begun: Sequence[int], ended: Sequence[str] = ()) -> None:
        async with asyncio.timeout(WAIT_S):
            while (self.begun, self.ended) != (list(begun), list(ended)):
                self.changed.clear()
                await self.changed.wait()


class World:
    def __init__(self, servicer: Servicer, calls: UnaryServer, port: FrameServer, client: UnaryClient) -> None:
        self.servicer, self.calls, self.port, self.client = servicer, calls, port, client

    def release(self, lease_id: int, timeout_s: float = WAIT_S, **options: Any) -> asyncio.Future[Any]:
        request = kvstore_pb2.ReleaseRequest(lease_id=lease_id).SerializeToString()
        return self.client.call("Release", request, timeout_s, kvstore_pb2.ReleaseResponse.FromString, **options)

    def post(self, lease_id: int) -> None:
        self.client.post("Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id).SerializeToString())


@pytest.fixture
async def world() -> AsyncIterator[World]:
    servicer = Servicer()
    calls = UnaryServer(methods_of(servicer, SERVICE))
    async with AsyncExitStack() as stack:
        port = FrameServer(calls.connection, lambda: EPOCH, None)
        stack.push_async_callback(port.stop)
        number = await port.start("127.0.0.1")
        client = await UnaryClient("the store", hello(EPOCH, None)).connect("127.0.0.1", number)
        stack.callback(client.close)
        yield World(servicer, calls, port, client)
        await calls.stop(0)


async def test_many_calls_at_a_time_have_their_own_answers(world: World) -> None:
    slow = world.release(0)
    answers = await asyncio.gather(*(world.release(i) for i in range(1, 50)))
    assert all(answer.found for answer in answers)
    assert not slow.done()
    world.servicer.go_on.set()
    assert (await slow).found
    assert world.servicer.begun == list(range(50))
    assert world.servicer.remaining is not None
    assert 0 < world.servicer.remaining <= WAIT_S


@pytest.mark.parametrize(
    ("method", "request_bytes", "error", "field", "retry_after_s"),
    [
        ("Contains", kvstore_pb2.ContainsRequest(block_hashes=[b""]), QueueFullError, "block_hashes", 1.5),
        ("Contains", kvstore_pb2.ContainsRequest(), InternalError, None, None),
        ("Contains", b"\xff", InvalidRequestError, "request", None),
        ("Nothing", b"", InternalError, None, None),
        ("StreamStoreEvents", b"", InternalError, None, None),
    ],
)
async def test_errors_come_as_they_were_raised(
    world: World, method: str, request_bytes: Any, error: type[BatonError], field: Any, retry_after_s: Any
) -> None:
    data = request_bytes if isinstance(request_bytes, bytes) else request_bytes.SerializeToString()
    with pytest.raises(error) as caught:
        await world.client.call(method, data, WAIT_S, bytes)
    assert (type(caught.value), caught.value.field, caught.value.retry_after_s) == (error, field, retry_after_s)
    assert (await world.release(1)).found  # the connection goes on


async def test_a_deadline_ends_a_call_on_both_sides(world: World) -> None:
    with pytest.raises(DeadlineError):
        await world.release(0, 0.05)
    await world.servicer.until([0], ["cancelled"])
    assert (await world.release(1)).found


async def test_the_server_keeps_a_deadline_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.client, "_expire", lambda call, method: None)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(DeadlineError, match="longer than its deadline"):
            await world.release(0, 0.05)
    await world.servicer.until([0], ["cancelled"])


async def test_whoever_cancels_a_call_cancels_it_there_too(world: World) -> None:
    call = world.release(0)
    await world.servicer.until([0])
    call.cancel()
    await world.servicer.until([0], ["cancelled"])


async def test_a_call_that_is_cancelled_before_it_left_is_never_made(world: World) -> None:
    world.release(0)
    await world.servicer.until([0])  # while one runs, others wait for the end of the turn
    world.release(7).cancel()
    assert (await world.release(1)).found
    assert world.servicer.begun == [0, 1]


async def test_calls_at_a_time_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unary, "MAX_CALLS", 2)
    running = [world.release(0), world.release(0)]
    with pytest.raises(QueueFullError):
        await world.release(1)
    world.servicer.go_on.set()
    assert all(answer.found for answer in await asyncio.gather(*running))
    assert (await world.release(1)).found


async def test_what_is_posted_goes_behind_the_next_call_or_before_it_or_alone(world: World) -> None:
    world.post(5)
    assert (await world.release(1)).found
    await world.servicer.until([1, 5])
    world.post(6)
    assert (await world.release(2, posts_first=True)).found
    assert world.servicer.begun == [1, 5, 6, 2]
    world.post(7)
    await world.servicer.until([1, 5, 6, 2, 7])


async def test_what_was_posted_goes_out_before_the_client_hangs_up(world: World) -> None:
    world.post(5)
    world.client.close()
    await world.servicer.until([5])


async def test_a_connection_that_breaks_fails_its_calls_and_ends_them_there(world: World) -> None:
    call = world.release(0)
    await world.servicer.until([0])
    world.client.abort()
    with pytest.raises(UnavailableError):
        await call
    with pytest.raises(UnavailableError):
        await world.release(1)
    await world.servicer.until([0], ["cancelled"])


@pytest.mark.parametrize("patient", [True, False])
async def test_a_server_that_stops_lets_calls_end_for_a_while(world: World, patient: bool) -> None:
    call = world.release(0)
    await world.servicer.until([0])
    stopping = asyncio.create_task(world.calls.stop(WAIT_S if patient else 0))
    with pytest.raises((UnavailableError, CancelledError)):
        await world.release(1)
    if patient:
        world.servicer.go_on.set()
    await stopping
    await world.port.stop()
    if patient:
        assert (await call).found
    else:
        with pytest.raises(CancelledError):
            await call
    assert world.servicer.begun == [0]
