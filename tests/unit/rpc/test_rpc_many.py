"""Many calls on one stream: what comes together is one message, and each call ends as it would by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import INTERNAL_TEXT, BatonError, InvalidRequestError, QueueFullError
from baton.rpc import multiplex_server
from baton.rpc.errors import STATUS_CODES, from_status
from baton.rpc.multiplex_server import Outbox, generate_many


def token(token_id: int) -> worker_pb2.GenerateResponse:
    return worker_pb2.GenerateResponse(deltas=[worker_pb2.SequenceDelta(token_ids=[token_id])])


class UntellableError(BatonError):
    """An error that no end of a call can be made of."""

    @property
    def grpc_status(self) -> str:  # type: ignore[override]
        raise ZeroDivisionError("in the handler")


class Engine:
    """Gives each request the tokens 0, 1, 2, ... whenever it is told to step."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []
        self.running: set[str] = set()
        self.changed = asyncio.Event()

    async def generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        if request.request_id == "full":
            raise QueueFullError("no room", retry_after_s=3.0)
        if request.request_id == "broken":
            raise ZeroDivisionError("of ours")
        if request.request_id == "mute":
            raise UntellableError("of ours")
        self.running.add(request.request_id)
        try:
            for at in range(request.sampling.max_tokens):
                step = asyncio.get_running_loop().create_future()
                self.waiting.append(step)
                self.changed.set()
                await step
                yield token(at)
        finally:
            self.running.discard(request.request_id)
            self.changed.set()

    def step(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(240):
            while len(self.waiting) < count:
                self.changed.clear()
                await self.changed.wait()


class Stream:
    """A caller's end."""

    def __init__(self, engine: Engine) -> None:
        self.requests: asyncio.Queue[worker_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self.answers = generate_many(engine.generate, self._requests(), None)

    async def _requests(self) -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def start(self, *calls: tuple[int, str, int]) -> None:
        message = worker_pb2.GenerateManyRequest()
        for call, name, tokens in calls:
            sampling = common_pb2.SamplingParams(max_tokens=tokens)
            message.starts.add(call=call, request=worker_pb2.GenerateRequest(request_id=name, sampling=sampling))
        self.requests.put_nowait(message)

    async def next(self) -> worker_pb2.GenerateManyResponse:
        async with asyncio.timeout(240):
            return await anext(self.answers)


async def test_a_step_is_one_message() -> None:
    engine = Engine()
    stream = Stream(engine)
    stream.start((1, "a", 2), (2, "b", 2), (3, "c", 3))
    first = asyncio.ensure_future(stream.next())
    await engine.until_waiting(3)
    engine.step()
    message = await first
    assert (list(message.token_calls), list(message.token_ids)) == ([1, 2, 3], [0, 0, 0])
    await engine.until_waiting(3)
    engine.step()
    message = await stream.next()
    assert list(message.token_ids) == [1, 1, 1]
    assert [(end.call, end.code) for end in message.ends] == [(1, 0), (2, 0)]
    stream.requests.put_nowait(None)
    engine.step()
    message = await stream.next()
    assert list(message.token_calls) == [3]
    with pytest.raises(StopAsyncIteration):
        await stream.next()


async def test_a_call_that_fails_ends_alone_and_says_why() -> None:
    engine = Engine()
    stream = Stream(engine)
    stream.start((1, "full", 1), (2, "broken", 1), (3, "fine", 1))
    ends = {end.call: end for end in (await stream.next()).ends}
    error = from_status(_code(ends[1].code), ends[1].message, ends[1].details)
    assert isinstance(error, QueueFullError)
    assert (error.message, error.retry_after_s) == ("no room", 3.0)
    assert ends[2].message == INTERNAL_TEXT
    assert engine.running == {"fine"}
    await stream.answers.aclose()
    assert engine.running == set()


async def test_a_call_whose_error_cannot_be_told_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(Engine())
    stream.start((1, "mute", 1))
    (end,) = (await stream.next()).ends
    assert (end.call, _code(end.code)) == (1, grpc.StatusCode.INTERNAL)
    assert "in the handler" in (caplog.records[-1].exc_text or "")
    await stream.answers.aclose()


async def test_cancel_ends_one_call_and_closing_the_stream_all() -> None:
    engine = Engine()
    stream = Stream(engine)
    stream.start((1, "a", 9), (2, "b", 9), (3, "c", 9))
    first = asyncio.ensure_future(stream.next())
    await engine.until_waiting(3)
    stream.requests.put_nowait(worker_pb2.GenerateManyRequest(cancels=[2, 77]))
    (end,) = (await first).ends
    assert end.call == 2
    assert engine.running == {"a", "c"}
    await stream.answers.aclose()
    assert engine.running == set()


async def test_calls_beyond_the_bound_are_refused_without_being_begun() -> None:
    engine = Engine()

    async def requests() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        starts = [
            worker_pb2.CallStart(
                call=call,
                request=worker_pb2.GenerateRequest(
                    request_id=str(call), sampling=common_pb2.SamplingParams(max_tokens=1)
                ),
            )
            for call in range(5)
        ]
        yield worker_pb2.GenerateManyRequest(starts=starts)
        await engine.until_waiting(2)
        engine.step()

    ends: dict[int, BaseException | None] = {}
    async for message in generate_many(engine.generate, requests(), None, max_calls=2):
        for end in message.ends:
            ends[end.call] = from_status(STATUS_CODES[end.code], end.message, end.details) if end.code else None
    assert ends.pop(0) is ends.pop(1) is None
    assert set(ends) == {2, 3, 4}
    assert all(isinstance(error, QueueFullError) for error in ends.values())
    assert not engine.running


async def test_a_call_that_is_cancelled_before_it_began_is_forgotten() -> None:
    engine = Engine()
    stream = Stream(engine)
    message = worker_pb2.GenerateManyRequest(cancels=[1])
    message.starts.add(call=1, request=worker_pb2.GenerateRequest(request_id="a"))
    stream.requests.put_nowait(message)
    stream.requests.put_nowait(None)
    async with asyncio.timeout(240):  # the stream ends when the last call has
        assert [message async for message in stream.answers] == []


async def test_a_caller_that_reads_nothing_is_told_the_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(multiplex_server, "MAX_MESSAGE_BYTES", 100_000)
    ended = asyncio.Event()

    async def generate(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        try:
            for at in range(10**9):
                if at % 1000 == 999:
                    await asyncio.sleep(0)  # as an engine's steps do
                yield token(at)
        finally:
            ended.set()

    requests: asyncio.Queue[worker_pb2.GenerateManyRequest] = asyncio.Queue()
    message = worker_pb2.GenerateManyRequest()
    message.starts.add(call=1, request=worker_pb2.GenerateRequest(request_id="a"))
    requests.put_nowait(message)

    async def sent() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        while True:
            yield await requests.get()

    stream = generate_many(generate, sent(), None)
    async with asyncio.timeout(240):
        await anext(stream)  # and takes no more
        await ended.wait()
        with pytest.raises(QueueFullError, match="more than 100000 bytes"):
            await anext(stream)
    assert "its caller left more than 100000 bytes unread" in caplog.text


async def test_when_requests_cannot_be_read_any_more_the_stream_ends_and_its_calls_with_it() -> None:
    engine, begun = Engine(), asyncio.Event()

    async def requests() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        message = worker_pb2.GenerateManyRequest()
        sampling = common_pb2.SamplingParams(max_tokens=9)
        message.starts.add(call=1, request=worker_pb2.GenerateRequest(request_id="a", sampling=sampling))
        yield message
        await begun.wait()
        raise ValueError("not a message")

    answers = generate_many(engine.generate, requests(), None)
    first = asyncio.ensure_future(anext(answers))
    await engine.until_waiting(1)
    begun.set()
    async with asyncio.timeout(240):
        (end,) = (await first).ends  # instead of a caller that waits for calls which were never read
        assert _code(end.code).name == "CANCELLED"
        with pytest.raises(ValueError, match="not a message"):
            await anext(answers)
    assert engine.running == set()


async def test_an_answer_too_large_for_a_message_ends_its_own_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplex_server, "MAX_MESSAGE_BYTES", 100_000)
    monkeypatch.setattr(multiplex_server, "MAX_RESPONSE_BYTES", 50_000)

    async def generate(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        large = request.request_id == "large"
        yield worker_pb2.GenerateResponse(deltas=[worker_pb2.SequenceDelta(error="x" * 60_000)]) if large else token(1)

    message = worker_pb2.GenerateManyRequest()
    for call, name in enumerate(("large", "small")):
        message.starts.add(call=call, request=worker_pb2.GenerateRequest(request_id=name))

    async def requests() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        yield message

    (answer,) = [x async for x in generate_many(generate, requests(), None)]
    assert list(answer.token_calls) == [1]
    ends = {end.call: end for end in answer.ends}
    assert ends[1].code == 0
    error = from_status(_code(ends[0].code), ends[0].message, ends[0].details)
    assert isinstance(error, InvalidRequestError)  # no other instance could do better
    assert "50000 bytes" in error.message


async def test_what_one_call_sends_keeps_its_order() -> None:
    outbox = Outbox()
    outbox.send(1, token(5))
    outbox.send(1, worker_pb2.GenerateResponse(deltas=[worker_pb2.SequenceDelta(index=1, token_ids=[6])]))
    outbox.send(1, token(7))
    outbox.send(2, token(8))
    message = await outbox.next()
    assert message is not None
    assert list(zip(message.token_calls, message.token_ids, strict=True)) == [(1, 5), (2, 8)]
    assert [list(item.response.deltas[0].token_ids) for item in message.messages] == [[6], [7]]


async def test_tokens_that_wait_behind_a_message_of_their_call_join_it() -> None:
    outbox = Outbox()
    first = token(5)
    first.trace.prompt_tokens = 3
    outbox.send(1, first)
    for token_id in (6, 7):
        outbox.token(1, token_id)
    last = token(8)
    last.deltas[0].finish_reason = common_pb2.FINISH_REASON_LENGTH
    outbox.send(1, last)
    message = await outbox.next()
    assert message is not None
    assert not message.token_calls
    assert [list(item.response.deltas[0].token_ids) for item in message.messages] == [[5, 6, 7], [8]]
    assert [item.response.HasField("trace") for item in message.messages] == [True, False]
    assert list(first.deltas[0].token_ids) == [5]

    outbox.token(1, 9)
    message = await outbox.next()
    assert message is not None
    assert (message.token_calls, message.token_ids) == ([1], [9])


def _code(value: int) -> Any:
    import grpc

    return next(code for code in grpc.StatusCode if code.value[0] == value)
