"""What can happen to a request between two of its steps: between its place and its call, between tokens and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.router.world import Router, World, make_request
from tests.support.servers.fake_worker import FakeWorker

from baton.errors import DeadlineError
from baton.rpc.multiplex import Call
from baton.tracing import Span
from baton_router.dispatch.event_loop import PLACE
from baton_router.dispatch.interface import RoutedChunk
from baton_router.dispatch.request import DispatchMetrics
from baton_router.dispatch.retry import Breakers


class Sink:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.chunks: list[RoutedChunk] = []
        self.ends: list[Exception | None] = []
        self.ended = asyncio.Event()

    def on_chunk(self, chunk: RoutedChunk) -> None:
        self.chunks.append(chunk)

    def on_end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ended.set()

    def token_writer(self, *_: object) -> None:
        """There is none."""


@pytest.fixture
async def cluster(world: World, caplog: pytest.LogCaptureFixture) -> AsyncIterator[tuple[Router, FakeWorker]]:
    """One decode instance, and a router over it; nothing may be held or logged when the test is over."""
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    yield router, decode
    router.assert_nothing_held()
    assert not router.dispatcher._context.deadlines._due
    assert not [x for x in caplog.records if x.levelname == "ERROR"]


async def test_a_request_that_is_cancelled_between_place_and_call_makes_no_call(
    cluster: tuple[Router, FakeWorker],
) -> None:
    router, decode = cluster
    sink, steps = Sink(), router.dispatcher._context.steps
    running = router.dispatcher.start(make_request(), sink)
    held: list[int] = []

    def cancel(_: None) -> None:
        held.append(router.instance(decode).load.requests)
        running.cancel()

    steps.schedule(PLACE, cancel, None)  # behind the request's own step
    await asyncio.sleep(0)
    assert held == [1]
    router.assert_nothing_held()
    other = Sink()
    router.dispatcher.start(make_request("other"), other)
    await other.ended.wait()
    assert [x.request_id for x in decode.state.requests] == ["other"]
    assert not sink.chunks
    assert not sink.ends


async def test_a_request_that_is_cancelled_before_its_place_takes_none(cluster: tuple[Router, FakeWorker]) -> None:
    router, _ = cluster
    sink = Sink()
    router.dispatcher.start(make_request(), sink).cancel()
    await asyncio.sleep(0)
    assert router.metric("decisions_total", policy="match_minus_load") == 0
    assert not sink.ends


@pytest.mark.parametrize(
    "fault", [(DispatchMetrics, "observe_trace"), (Span, "end"), (Call, "close"), (Breakers, "request_ended")]
)
async def test_a_fault_in_the_end_of_a_request_leaves_nobody_waiting(
    world: World, fault: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **fields: object) -> None:
        raise ZeroDivisionError("in the end")

    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    sink = Sink()
    with monkeypatch.context() as patch:
        patch.setattr(*fault, fail)
        router.dispatcher.start(make_request(), sink)
        async with asyncio.timeout(60):
            await sink.ended.wait()
    (end,) = sink.ends
    await router.until(lambda: router.dispatcher.num_in_flight == 0)
    router.assert_nothing_held()
    assert not router.dispatcher._context.deadlines._due
    logged = any("in the end" in (record.exc_text or "") for record in caplog.records)
    assert logged or isinstance(end, ZeroDivisionError)  # which the sink logs


async def test_a_request_whose_time_ends_between_place_and_call_fails(cluster: tuple[Router, FakeWorker]) -> None:
    router, decode = cluster
    sink = Sink()
    router.dispatcher.start(make_request(), sink)

    def expire(_: None) -> None:
        for item in list(router.dispatcher._context.deadlines._due):
            item.expire()

    router.dispatcher._context.steps.schedule(PLACE, expire, None)
    await asyncio.sleep(0)
    (error,) = sink.ends
    assert isinstance(error, DeadlineError)
    assert not decode.state.requests
