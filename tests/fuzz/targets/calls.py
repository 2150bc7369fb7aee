"""``GenerateMany`` from both ends: whatever the other end says, each call gets its own, in order, and one end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tests.fuzz.choices import Choices
from tests.fuzz.event_loops import event_loop
from tests.support.call_stream import Wire

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import InternalError, QueueFullError
from baton.rpc.errors import status_details
from baton.rpc.multiplex import Call, CallEnded, CallStream
from baton.rpc.multiplex_server import generate_many

_TURNS = 30
"""Of an event loop: enough for what is ready to come to rest."""


def calls(data: bytes) -> None:
    """Either end of a stream of calls."""
    choices = Choices(data)
    event_loop(__name__).run_until_complete(_client(choices) if choices.flag() else _server(choices))


async def _rest() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _response(choices: Choices) -> worker_pb2.GenerateResponse:
    response = worker_pb2.GenerateResponse()
    for _ in range(choices.pick([1, 1, 1, 0, 2])):
        delta = response.deltas.add(token_ids=[choices.number(0, 9) for _ in range(choices.pick([1, 1, 0, 3]))])
        if choices.number(0, 3) == 0:
            delta.index = choices.number(0, 3)
            delta.finish_reason = choices.number(0, 5)  # type: ignore[assignment]
            if choices.flag():
                delta.stop_token_id = choices.number(0, 9)
            if choices.flag():
                delta.logprobs.add(token_id=choices.number(0, 9))
    if choices.number(0, 7) == 0:
        response.trace.CopyFrom(common_pb2.RequestTrace(prompt_tokens=choices.number(0, 9)))
    if choices.number(0, 7) == 0:
        response.prompt_logprobs.add()
    return response


# --- the client's end ---


_FAST = 7
"""Token ids from 0 to here go to the writer."""


class _Reader:
    """A call as it should be, and as its reader sees it."""

    def __init__(self) -> None:
        self.expected: list[object] = []
        self.code: int | None = None
        """It should end so; ``None``: it runs."""
        self.left = False
        self.got: list[object] = []
        self.end: list[CallEnded | None] = []
        self._unsent: list[int] = []

    @property
    def runs(self) -> bool:
        return self.code is None and not self.left

    def token_writer(self) -> _Reader:
        """Be the writer, too."""
        return self

    def push(self, token_id: int, now: float) -> bool:
        assert not self.end
        if token_id > _FAST:
            return False
        self._unsent.append(token_id)
        return True

    def flush(self) -> None:
        self.got += self._unsent
        self._unsent.clear()

    def close(self) -> None:
        self.flush()

    def on_tokens(self, token_ids: list[int]) -> None:
        assert token_ids
        assert not self.end
        self.flush()
        self.got += token_ids

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        assert not self.end
        self.flush()
        self.got.append(response.SerializeToString(deterministic=True))

    def on_end(self, failure: CallEnded | None) -> None:
        assert not self.end
        self.flush()
        self.end.append(failure)

    def check(self) -> None:
        if self.left:
            assert self.got == self.expected[: len(self.got)]
            return
        assert self.got == self.expected
        (failure,) = self.end
        assert (failure is None) == (self.code == 0)


def _said(choices: Choices, most: int) -> bytes:
    """Return what an instance says."""
    message = worker_pb2.GenerateManyResponse()
    for _ in range(choices.number(0, 5)):
        message.token_calls.append(choices.number(0, most))
        message.token_ids.append(choices.number(0, 9))
    if choices.number(0, 31) == 0:
        message.token_ids.append(7)
    for _ in range(choices.number(0, 2)):
        message.messages.add(call=choices.number(0, most), response=_response(choices))
    for _ in range(choices.pick([0, 0, 1, 2])):
        details = choices.pick([b"", status_details(QueueFullError("no room")), choices.take(20)])
        code = choices.pick([0, 0, 1, 8, 13, 14, 99, 2**32 - 1])
        message.ends.add(call=choices.number(0, most), code=code, message="why", details=choices.mutated(details))
    data = message.SerializeToString()
    return data if choices.number(0, 15) else choices.mutated(data)


def _take(data: bytes, readers: dict[int, _Reader]) -> bool:
    """Do what a message says; returns whether it makes sense."""
    try:
        message = worker_pb2.GenerateManyResponse.FromString(data)
    except DecodeError:
        return False
    running = {key: reader for key, reader in readers.items() if reader.runs}
    for key, token_id in zip(message.token_calls, message.token_ids, strict=False):
        if key in running:
            running[key].expected.append(token_id)
    if len(message.token_calls) != len(message.token_ids):
        return False
    for item in message.messages:
        if item.call in running:
            running[item.call].expected.append(item.response.SerializeToString(deterministic=True))
    for end in message.ends:
        if end.call in running:
            running.pop(end.call).code = end.code
    return True


async def _client(choices: Choices) -> None:
    wire = Wire()
    stream = CallStream(wire, "i", lambda each: _soon(each.deliver), lambda call: _soon(call.deliver_end))
    await stream._opening
    readers: dict[int, _Reader] = {}
    running: dict[int, Call] = {}
    while choices.more() and not stream.broken:
        action, key = choices.number(0, 11), choices.number(1, 6)
        call, reader = running.get(key), readers.get(key)
        if action <= 1 and len(readers) < 6:
            started = _Reader()
            request = worker_pb2.GenerateRequest(request_id="r" * choices.number(0, 5))
            begun = stream.start(request, started)
            running[begun.key], readers[begun.key] = begun, started
        elif action == 2 and call is not None:
            call.set_paused(choices.flag())
        elif action == 3 and call is not None and reader is not None:
            call.close()
            reader.left = True
        elif action == 4 and call is not None and reader is not None:
            if reader.runs:
                reader.code = 13
            call.fail(CallEnded(InternalError("ours"), grpc.StatusCode.INTERNAL))
        elif action == 5 and choices.number(0, 3) == 0:
            wire.end(choices.pick([*grpc.StatusCode]))
        elif action == 5 and choices.number(0, 3) == 0:
            wire.writable = False
        elif action == 5:
            wire.drain()
        else:
            said = _said(choices, 7)
            wire.say(said)
            _take(said, readers)
        for _ in range(choices.pick([_TURNS, 2])):
            await asyncio.sleep(0)
        if action > 4:  # the model has it already
            await _rest()
    wire.drain()
    await _rest()
    told = [start.call for message in wire.sent for start in message.starts]
    untold = {key for key, reader in readers.items() if not reader.runs} if not stream.broken else set(readers)
    assert sorted({*told, *untold}) == sorted(readers)
    assert len(set(told)) == len(told)
    wire.end(grpc.StatusCode.OK)
    await _rest()
    assert stream.broken
    for key, call in running.items():
        if readers[key].runs:
            readers[key].code = 14
        call.set_paused(False)
    while any(call.items for key, call in running.items() if not readers[key].left):
        await asyncio.sleep(0)  # a turn takes a few
    await _rest()
    for reader in readers.values():
        reader.check()


def _soon(work: Any) -> None:
    asyncio.get_running_loop().call_soon(work)


# --- the server's end ---


Item = tuple[str, object]


def _flat(response: worker_pb2.GenerateResponse) -> list[Item]:
    """Return what a response brings, however it is put together with others."""
    out: list[Item] = []
    for delta in response.deltas:
        out += [("delta", (delta.index, token_id)) for token_id in delta.token_ids]
        more = worker_pb2.SequenceDelta()
        more.CopyFrom(delta)
        more.ClearField("token_ids")
        if more.ByteSize():
            out.append(("delta", more.SerializeToString()))
    if response.HasField("trace"):
        out.append(("trace", response.trace.SerializeToString()))
    return out + [("prompt", b"")] * len(response.prompt_logprobs)


def _of(kind: str, items: list[Item]) -> list[object]:
    """Return what is of one kind: tokens may come in one message with a trace that was said before them."""
    return [item for each, item in items if each == kind]


class _Engine:
    """Generates what is written in a call's script, and keeps what it has given."""

    def __init__(self) -> None:
        self.scripts: dict[str, list[worker_pb2.GenerateResponse | Exception | None]] = {}
        self.given: dict[str, list[Item]] = {}
        self.running = 0

    async def generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        given = self.given.setdefault(request.request_id, [])
        self.running += 1
        try:
            for step in self.scripts[request.request_id]:
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await asyncio.sleep(0)
                    continue
                given += _flat(step)
                yield step
        finally:
            self.running -= 1


async def _server(choices: Choices) -> None:
    engine, told = _Engine(), asyncio.Queue[Any]()
    starts: list[tuple[int, str]] = []
    cancelled: set[int] = set()

    async def requests() -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        while (item := await told.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    got: dict[int, list[Item]] = {}
    ends: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    answers = generate_many(engine.generate, requests(), None)

    async def read() -> None:
        async with aclosing(answers):
            async for answer in answers:
                assert len(answer.token_calls) == len(answer.token_ids)
                for key, token_id in zip(answer.token_calls, answer.token_ids, strict=True):
                    got.setdefault(key, []).append(("delta", (0, token_id)))
                for item in answer.messages:
                    got.setdefault(item.call, []).extend(_flat(item.response))
                for end in answer.ends:
                    ends[end.call] += 1
                    refused[end.call] += end.code == grpc.StatusCode.ALREADY_EXISTS.value[0]

    reader = asyncio.create_task(read())
    broken = False
    while choices.more():
        message = worker_pb2.GenerateManyRequest()
        for _ in range(choices.number(0, 3)):
            message.starts.add(call=choices.number(0, 4))
        message.cancels.extend(choices.number(0, 5) for _ in range(choices.pick([0, 0, 1, 2])))
        if choices.number(0, 15) == 0:
            try:
                message = worker_pb2.GenerateManyRequest.FromString(choices.mutated(message.SerializeToString()))
            except DecodeError:
                told.put_nowait(ValueError("gRPC cannot read it"))
                broken = True
                break
        for start in message.starts:
            start.request.request_id = name = f"{len(starts)}"
            starts.append((start.call, name))
            steps: list[worker_pb2.GenerateResponse | Exception | None] = []
            for _ in range(choices.number(0, 5)):
                kind = choices.number(0, 15)
                failure = choices.pick([QueueFullError("no room"), ZeroDivisionError("of ours")])
                steps.append(None if kind < 7 else _response(choices) if kind < 15 else failure)
            engine.scripts[name] = steps
        cancelled.update(message.cancels)
        told.put_nowait(message)
        for _ in range(choices.number(0, 3)):
            await asyncio.sleep(0)
    leaves = choices.flag()
    if leaves:
        reader.cancel()
    told.put_nowait(None)
    async with asyncio.timeout(240):
        (outcome,) = await asyncio.gather(reader, return_exceptions=True)
    assert engine.running == 0
    whole = not (leaves or broken)
    assert outcome is None if whole else isinstance(outcome, asyncio.CancelledError | ValueError | None)
    for key in {call for call, _ in starts}:
        names = [name for call, name in starts if call == key]
        given = [each for name in names for each in engine.given.get(name, ())]
        for kind in ("delta", "trace", "prompt"):
            came, all_of_it = _of(kind, got.get(key, [])), _of(kind, given)
            assert came == (all_of_it if whole else all_of_it[: len(came)])
        assert ends[key] <= len(names)
        if whole and key not in cancelled:
            assert ends[key] == len(names)
            assert len(names) - refused[key] == sum(name in engine.given for name in names)
    assert set(got) | set(ends) <= {call for call, _ in starts}
