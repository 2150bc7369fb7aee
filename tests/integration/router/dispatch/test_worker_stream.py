"""The router's streams to decode instances: what breaks one, and what a message that cannot be read takes with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.call_stream import Wire, open_call_stream
from tests.support.router.world import PROMPT, World, assert_right, make_request, run

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import InternalError, UnavailableError
from baton.rpc.multiplex import Call, CallEnded, CallStream, Reader
from baton.token_ids import token_ids
from baton_router.dispatch.attempt import Attempt, AttemptFailed, Group, Sequence
from baton_router.dispatch.event_loop import END, TurnBatcher
from baton_router.registry.instance import Instance
from baton_router.scheduler.placement import PlacementRequest


async def test_a_stream_that_broke_is_opened_again(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    for at in range(3):
        decode.state.break_after = 0
        request = make_request(f"r{at}")
        assert_right(await run(router, request), request)
    assert len(router.dispatcher._context.streams._streams) == 1
    router.assert_nothing_held()


@pytest.fixture
async def opened() -> tuple[CallStream, Wire, TurnBatcher]:
    stream, wire, steps = open_call_stream()
    await stream._opening
    return stream, wire, steps


Opened = tuple[CallStream, Wire, TurnBatcher]


REQUEST = worker_pb2.GenerateRequest()


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

    def token_writer(self) -> None:
        """There is none."""


@pytest.mark.parametrize(
    "behind", [b"\xff\xff", worker_pb2.GenerateManyResponse(token_calls=[1])], ids=["garbage", "odd"]
)
async def test_what_cannot_be_read_takes_nothing_with_it_that_could(opened: Opened, behind: Any) -> None:
    (stream, wire, _), first, second = opened, Notes(), Notes()
    stream.start(REQUEST, first)
    stream.start(REQUEST, second)
    good = worker_pb2.GenerateManyResponse(token_calls=[1], token_ids=[7])
    good.ends.add(call=1)
    wire.say(good)
    wire.say(behind)
    await asyncio.sleep(0)  # the turn's end
    assert (first.tokens, first.ends) == ([7], [None])
    (failure,) = second.ends
    assert failure is not None
    assert isinstance(failure.error, InternalError)
    assert stream.broken


async def test_a_reader_that_leaves_between_its_tokens_and_its_end_gets_no_end(opened: Opened) -> None:
    (stream, _, steps), failures = opened, list[str]()

    class Fickle(Notes):
        def on_tokens(self, token_ids: list[int]) -> None:
            super().on_tokens(token_ids)
            steps.schedule(END, Call.close, call)  # before the call's own, which is put behind it

    notes = Fickle()
    call = stream.start(REQUEST, notes)
    message = worker_pb2.GenerateManyResponse(token_calls=[1], token_ids=[7])
    message.ends.add(call=1)
    stream._read_message(message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton_router.dispatch.event_loop.log.exception", failures.append)
        await asyncio.sleep(0)
    assert (notes.tokens, notes.ends, failures) == ([7], [], [])


async def test_a_reader_that_fails_hinders_no_other_when_the_stream_breaks(opened: Opened) -> None:
    (stream, wire, _), fine = opened, Notes()

    class Failing(Notes):
        def on_end(self, failure: CallEnded | None) -> None:
            raise ZeroDivisionError("of ours")

    stream.start(REQUEST, Failing())
    stream.start(REQUEST, fine)
    wire.end()
    await asyncio.sleep(0)  # the turn's end
    (failure,) = fine.ends
    assert failure is not None


async def test_a_reader_that_fails_learns_that_its_call_ended(opened: Opened) -> None:
    (stream, wire, _), fine = opened, Notes()

    class Failing(Notes):
        def on_tokens(self, token_ids: list[int]) -> None:
            raise ZeroDivisionError("of ours")

    failing = Failing()
    stream.start(REQUEST, failing)
    stream.start(REQUEST, fine)
    wire.say(worker_pb2.GenerateManyResponse(token_calls=[1, 2], token_ids=[7, 8]))
    await asyncio.sleep(0)  # the turn's end
    (failure,) = failing.ends
    assert failure is not None
    assert isinstance(failure.error, InternalError)
    assert (fine.tokens, fine.ends) == ([8], [])


async def test_calls_fail_when_nothing_can_be_sent(opened: Opened) -> None:
    (stream, wire, _), notes = opened, Notes()

    def send(message: bytes) -> None:
        raise ZeroDivisionError("of ours")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "send", send)
        stream.start(REQUEST, notes)
        await asyncio.sleep(0)  # it is sent
        await asyncio.sleep(0)  # the turn's end
    (failure,) = notes.ends
    assert failure is not None
    assert isinstance(failure.error, UnavailableError)
    assert stream.broken


async def test_what_an_instance_does_not_take_waits_here_and_goes_as_one_message(opened: Opened) -> None:
    (stream, wire, _) = opened
    wire.writable = False
    for name in ("a", "b", "c"):
        call = stream.start(worker_pb2.GenerateRequest(request_id=name), Notes())
    call.close()
    await asyncio.sleep(0)
    assert wire.sent == []
    wire.drain()
    await asyncio.sleep(0)
    (message,) = wire.sent
    assert [start.request.request_id for start in message.starts] == ["a", "b"]
    assert list(message.cancels) == [call.key]


async def test_a_held_call_keeps_what_comes_in_its_order(opened: Opened) -> None:
    (stream, _, _), order = opened, list[int]()

    class Slow(Notes):
        def on_tokens(self, token_ids: list[int]) -> None:
            order.extend(token_ids)
            if len(order) < 3:
                call.set_paused(True)

        def on_message(self, response: worker_pb2.GenerateResponse) -> None:
            order.extend(response.deltas[0].token_ids)

    notes = Slow()
    call = stream.start(REQUEST, notes)
    for first in range(0, 40, 2):
        message = worker_pb2.GenerateManyResponse(token_calls=[1], token_ids=[first])
        delta = worker_pb2.SequenceDelta(token_ids=[first + 1])
        message.messages.add(call=1, response=worker_pb2.GenerateResponse(deltas=[delta]))
        stream._read_message(message)
    stream._read_message(worker_pb2.GenerateManyResponse(ends=[worker_pb2.CallEnd(call=1)]))
    await asyncio.sleep(0)
    assert order == [0]
    while len(order) < 40:
        call.set_paused(False)
    await asyncio.sleep(0)
    assert order == list(range(40))
    assert notes.ends == [None]


class Alone:
    """Streams of which there is one."""

    def __init__(self, stream: CallStream) -> None:
        self.stream = stream

    def start(self, instance: Instance, request: worker_pb2.GenerateRequest, reader: Reader) -> Call:
        return self.stream.start(request, reader)


class Run:
    """Notes why its attempt ended."""

    def __init__(self) -> None:
        self.ends: list[AttemptFailed | None] = []

    def check_end(self, attempt: Attempt, failure: AttemptFailed | None) -> None:
        self.ends.append(failure)

    def on_closed(self, attempt: Attempt) -> None:
        """It gives nothing back."""

    def continue_group(self, group: Group) -> None:
        """It does not."""


async def test_a_message_that_makes_no_sense_ends_its_own_call_alone(world: World, opened: Opened) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    (stream, _, _), wrong, fine = opened, Run(), Notes()
    placement = router.dispatcher._placer.place(PlacementRequest(token_ids(PROMPT), "", 1))
    assert placement is not None
    run: Any = wrong
    streams: Any = Alone(stream)
    attempt = Attempt(run, Group([Sequence(0)]), placement, 1)
    attempt.start(streams, REQUEST)
    stream.start(REQUEST, fine)
    odd = common_pb2.TokenLogprob(token_id=5, top_token_ids=[5, 6], top_logprobs=[-1.0])
    delta = worker_pb2.SequenceDelta(token_ids=[5], logprobs=[odd])
    message = worker_pb2.GenerateManyResponse(token_calls=[2], token_ids=[7])
    message.messages.add(call=1, response=worker_pb2.GenerateResponse(deltas=[delta]))
    message.ends.add(call=2)
    stream._read_message(message)
    await asyncio.sleep(0)  # the turn's end
    assert (fine.tokens, fine.ends) == ([7], [None])
    (failure,) = wrong.ends
    assert failure is not None
    assert failure.reason == "protocol"
    assert attempt.closed
    router.assert_nothing_held()
