"""The router's connections of frames to decode instances: which way calls go, and that nothing of one stays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from tests.integration.router.test_router_dispatch import World, assert_right, make_request, registration, run
from tests.support.servers.fake_worker import FakeWorker

from baton.api.v1 import common_pb2, worker_pb2
from baton.types import Role
from baton_router.dispatch.attempt import Attempt, AttemptFailed, Message
from baton_router.dispatch.calls import Call, CallEnded, CallStream, Reader
from baton_router.dispatch.turn_batching import END, Steps
from baton_router.dispatch.worker_stream import FrameSession
from baton_router.registry.instance import Instance


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)


def connections(worker: FakeWorker) -> int:
    assert worker._calls is not None
    return len(worker._calls.connections)


async def test_metrics_tell_whether_calls_go_as_frames(world: World) -> None:
    prefill = await world.worker(Role.PREFILL, "p0")
    decodes = [await world.worker(Role.DECODE, "d0"), await world.worker(Role.DECODE, "d1", frames=False)]
    router = await world.cluster([prefill], decodes)
    collected = next(x for x in router.metrics.registry.collect() if x.name == "baton_router_instance_frames")
    assert {x.labels["instance"]: x.value for x in collected.samples} == {"d0": 1.0, "d1": 0.0}


async def test_connections_that_broke_are_forgotten(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    instance = router.instance(decode)
    for at in range(3):
        assert decode._calls is not None
        for connection in list(decode._calls.connections):
            connection.abort()
        await router.until(lambda: not router.registry.sessions.over_frames(instance))
        request = make_request(f"r{at}")
        assert_right(await run(router, request), request)  # which dials again
        await router.ready(decode)
    assert len(instance._closing) == 1
    await router.until(lambda: connections(decode) == 1)


async def test_an_instance_that_left_while_it_was_dialled_keeps_no_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (decode,) = await world.decodes(1)
    go_on = asyncio.Event()
    connect = FrameSession.connect

    async def slow(self: FrameSession, host: str, port: int) -> FrameSession:
        session = await connect(self, host, port)
        await go_on.wait()
        return session

    monkeypatch.setattr(FrameSession, "connect", slow)
    router = await world.router()
    lease = router.registry.register(registration(decode))
    await router.until(lambda: connections(decode) == 1)
    router.registry.deregister(lease.lease_id)
    await router.until(lambda: not router.registry._retired)
    go_on.set()
    await router.until(lambda: connections(decode) == 0)


class Silent(CallStream):
    """A stream that nothing leaves."""

    def close(self) -> None:
        """There is nothing to close."""

    def _wake(self) -> None:
        """Nothing is sent."""


class Notes:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[CallEnded | None] = []

    def on_tokens(self, token_ids: list[int]) -> None:
        self.tokens += token_ids

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        raise AssertionError("nobody sent one")

    def on_end(self, failure: CallEnded | None) -> None:
        self.ends.append(failure)


@pytest.mark.parametrize("behind", [b"\xff", worker_pb2.GenerateManyResponse(token_calls=[1]).SerializeToString()])
async def test_what_cannot_be_read_takes_nothing_with_it_that_could(behind: bytes) -> None:
    stream, notes = Silent("d0", Steps()), Notes()
    stream.start(b"", notes)
    good: Any = worker_pb2.GenerateManyResponse(token_calls=[1], token_ids=[7])
    good.ends.add(call=1)
    with pytest.raises((DecodeError, ValueError)):
        stream._take(map(worker_pb2.GenerateManyResponse.FromString, (good.SerializeToString(), behind)))
    await asyncio.sleep(0)  # the turn's end
    assert (notes.tokens, notes.ends) == ([7], [None])


async def test_a_reader_that_leaves_between_its_tokens_and_its_end_gets_no_end() -> None:
    steps, failures = Steps(), list[str]()
    stream = Silent("d0", steps)

    class Fickle(Notes):
        def on_tokens(self, token_ids: list[int]) -> None:
            super().on_tokens(token_ids)
            steps.later(END, Call.close, call)  # before the call's own, which is put behind it

    notes = Fickle()
    call = stream.start(b"", notes)
    message = worker_pb2.GenerateManyResponse(token_calls=[1], token_ids=[7])
    message.ends.add(call=1)
    stream._take([message])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton_router.dispatch.turn_batching.log.exception", failures.append)
        await asyncio.sleep(0)
    assert (notes.tokens, notes.ends, failures) == ([7], [], [])


class Alone:
    """Sessions with one stream."""

    def __init__(self, stream: CallStream) -> None:
        self.stream = stream

    def start(self, instance: Instance, request: bytes, reader: Reader) -> Call:
        return self.stream.start(request, reader)


class Ends:
    def __init__(self) -> None:
        self.ends: list[AttemptFailed | None] = []

    def on_message(self, message: Message) -> None:
        raise AssertionError("it makes no sense")

    def on_end(self, failure: AttemptFailed | None) -> None:
        self.ends.append(failure)


async def test_a_message_that_makes_no_sense_ends_its_own_call_alone(world: World) -> None:
    (decode,) = await world.decodes(1)
    instance = (await world.cluster([], [decode])).instance(decode)
    stream, wrong, fine = Silent("d0", Steps()), Ends(), Notes()
    sessions: Any = Alone(stream)
    attempt = Attempt(sessions, instance, b"", [0], wrong)
    stream.start(b"", fine)
    odd = common_pb2.TokenLogprob(token_id=5, top_token_ids=[5, 6], top_logprobs=[-1.0])
    delta = worker_pb2.SequenceDelta(token_ids=[5], logprobs=[odd])
    message = worker_pb2.GenerateManyResponse(token_calls=[2], token_ids=[7])
    message.messages.add(call=1, response=worker_pb2.GenerateResponse(deltas=[delta]))
    message.ends.add(call=2)
    stream._take([message])
    await asyncio.sleep(0)  # the turn's end
    attempt.close()
    assert (fine.tokens, fine.ends) == ([7], [None])
    (failure,) = wrong.ends
    assert failure is not None
    assert failure.reason == "protocol"
