"""Nearly all tokens of streams go to a token writer: it must write, count and end as chunks do."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from tests.support.call_stream import open_call_stream
from tests.support.scripted import ANSWER, MODEL, ScriptedDispatcher, encode
from tests.unit.router.frontend.test_openai_pipeline import pipeline
from tests.unit.router.frontend.test_plain_tokens import BODIES, STREAM, completion

from baton.api.v1 import worker_pb2
from baton.rpc.http2.message_stream import StreamEnded
from baton.rpc.multiplex import Call, CallEnded, CallStream, TokenWriter
from baton.tokenizer import IncrementalDetokenizer
from baton_router.frontend.anthropic.answer import message_formatter
from baton_router.frontend.anthropic.messages import parse_message
from baton_router.frontend.openai.answer import EventStream, EventWriter
from baton_router.frontend.openai.openai_request import parse_chat
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.responses import parse_response, response_formatter
from baton_router.processor.output_processor import GenerationClock, GenerationMetrics
from baton_router.processor.text_request import TextChunk, TextDelta


def unchunked(data: bytes) -> list[bytes]:
    """Return the pieces of a body in chunks."""
    pieces = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        pieces.append(data[:length])
        data = data[length + 2 :]
    return pieces


@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_a_writers_events_are_those_of_chunks(body: dict[str, Any]) -> None:
    request = (parse_chat if "messages" in body else completion)({**STREAM, **body})
    text = pipeline(ScriptedDispatcher())
    prepared = [await text.prepare(item) for item in request.requests]
    fast, slow = (EventStream(request, prepared, "id", 1700000000) for _ in range(2))
    first = TextChunk([TextDelta(0, "first", [5])])
    assert fast.add(first) == slow.add(first)
    changing = {"logprobs", "return_token_ids", "n"} & set(body) or "continuous" in str(body)
    registry = CollectorRegistry()
    clock = GenerationClock(GenerationMetrics(registry), 0.0)
    clock.count_tokens(0, 1)
    written, ids, counted = list[bytes](), [5], list[int]()
    tokenizer = prepared[0].text_model.tokenizer
    path = fast.token_writer(written.append, ids, clock, counted.append)
    assert (path is None) == bool(changing)
    if path is None:
        return
    sent, decoder = encode(ANSWER * 3), IncrementalDetokenizer(tokenizer)
    for token_id in sent:
        decoder.push((token_id,))  # so that its text is known, if it is whole
    taken = []
    for at, token_id in enumerate(sent):
        known = tokenizer.whole_texts.get(token_id)
        assert path.push(token_id, at / 1000) == (known is not None)
        if known is not None:
            taken.append((token_id, known))
        if at == 9:
            path.flush()
    path.close()
    assert [ids[1:], sum(counted)] == [[x for x, _ in taken], len(taken)]
    assert 1 < len(counted) < len(taken) / 8
    assert unchunked(b"".join(written)) == [slow.add(TextChunk([TextDelta(0, known, [x])])) for x, known in taken]
    assert fast.end() == slow.end()
    assert len(written) == 2, "one write per turn, one when it is left"
    assert registry.get_sample_value("baton_request_itl_seconds_count") == len(taken)
    assert registry.get_sample_value("baton_request_generated_tokens_total") == clock.generated == 1 + len(taken)


async def test_events_of_other_forms_have_no_writer() -> None:
    text = pipeline(ScriptedDispatcher())
    chat = {"model": "baton-tiny", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    responses = parse_response({"model": "baton-tiny", "stream": True, "input": "x"}, None, ResponseStore())
    clock = GenerationClock(GenerationMetrics(CollectorRegistry()), 0.0)
    for request, formatter in (
        (parse_message({**chat, "max_tokens": 9}, None, ResponseStore()), message_formatter),
        (responses, response_formatter),
    ):
        prepared = [await text.prepare(item) for item in request.requests]
        form = formatter(request, prepared)(request, prepared, "id", 1700000000)
        assert isinstance(form, EventStream)
        assert form.token_writer([].append, [5], clock, [].append) is None


def test_special_tokens_and_unknown_ones_go_to_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = MODEL.tokenizer
    clock = GenerationClock(GenerationMetrics(CollectorRegistry()), 0.0)
    clock.count_tokens(0, 1)
    path = EventWriter(b"", b"", lambda _: None, tokenizer, [], clock, lambda _: None)
    (special, *_), (half, *_) = tokenizer.special_ids, encode("\U0001f469")
    monkeypatch.setitem(tokenizer.whole_texts, special, "<special>")
    assert not path.push(special, 0.0)
    assert not path.push(half, 0.0)


class Writer:
    """A writer that notes; takes tokens up to 100."""

    def __init__(self, notes: list[Any]) -> None:
        self._notes, self._unsent = notes, list[int]()

    def push(self, token_id: int, now: float) -> bool:
        if token_id > 100:
            return False
        self._unsent.append(token_id)
        return True

    def flush(self) -> None:
        if self._unsent == [13]:
            raise ZeroDivisionError("of ours")
        self._notes.append(("written", self._unsent))
        self._unsent = []

    def close(self) -> None:
        if self._unsent:
            self.flush()


class Notes:
    """A reader with a writer behind its first token."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def on_tokens(self, token_ids: list[int]) -> None:
        self.notes.append(("read", token_ids))

    def on_message(self, response: worker_pb2.GenerateResponse) -> None:
        self.notes.append(("message", response.deltas[0].token_ids[:]))

    def on_end(self, failure: CallEnded | None) -> None:
        self.notes.append(("end", failure))

    def token_writer(self) -> TokenWriter | None:
        return Writer(self.notes)


def tokens(*pairs: tuple[int, int], message: tuple[int, int] | None = None, end: int = 0) -> Any:
    """Return a message of an instance."""
    out = worker_pb2.GenerateManyResponse(token_calls=[x for x, _ in pairs], token_ids=[x for _, x in pairs])
    if message is not None:
        delta = worker_pb2.SequenceDelta(token_ids=[message[1]])
        out.messages.add(call=message[0], response=worker_pb2.GenerateResponse(deltas=[delta]))
    if end:
        out.ends.add(call=end)
    return out


async def started(count: int = 1) -> tuple[CallStream, list[Notes], list[Call]]:
    """Return a stream with calls that have their first token."""
    stream, _, _ = open_call_stream()
    readers = [Notes() for _ in range(count)]
    calls = [stream.start(worker_pb2.GenerateRequest(), reader) for reader in readers]
    stream._read_message(tokens(*((at, 0) for at in range(1, count + 1))))
    await asyncio.sleep(0)
    assert [reader.notes for reader in readers] == [[("read", [0])]] * count
    for reader in readers:
        reader.notes.clear()
    return stream, readers, calls


async def test_what_a_turn_brings_is_sent_together_and_in_order() -> None:
    stream, (reader,), _ = await started()
    stream._read_message(tokens((1, 1)))
    stream._read_message(tokens((1, 2), (1, 3)))
    await asyncio.sleep(0)
    assert reader.notes == [("written", [1, 2, 3])]
    stream._read_message(tokens((1, 4), (1, 101), (1, 5)))  # what it does not take, and what comes behind that
    stream._read_message(tokens((1, 6)))
    await asyncio.sleep(0)
    assert reader.notes[1:] == [("written", [4]), ("read", [101, 5, 6])]
    stream._read_message(tokens((1, 7)))
    stream._read_message(tokens((1, 8), message=(1, 9)))
    stream._read_message(tokens((1, 10)))
    await asyncio.sleep(0)
    assert reader.notes[3:] == [("written", [7, 8]), ("message", [9]), ("read", [10])]
    stream._read_message(tokens((1, 11), end=1))
    await asyncio.sleep(0)
    assert reader.notes[6:] == [("written", [11]), ("end", None)]
    assert not stream._calls


async def test_a_paused_call_and_a_closed_one_have_no_writer() -> None:
    stream, (held, closed), (first, second) = await started(2)
    first.set_paused(True)
    second.close()
    stream._read_message(tokens((1, 1), (2, 1)))
    stream._read_message(tokens((1, 2), (2, 2)))
    await asyncio.sleep(0)
    assert (held.notes, closed.notes) == ([], [])
    first.set_paused(False)
    assert held.notes == [("read", [1, 2])]
    stream._read_message(tokens((1, 3)))
    await asyncio.sleep(0)
    stream._read_message(tokens((1, 4)))
    await asyncio.sleep(0)
    assert held.notes[1:] == [("read", [3]), ("written", [4])]


async def test_what_a_paused_call_kept_leaves_turns_to_others() -> None:
    stream, (slow, other), (first, _) = await started(2)
    first.set_paused(True)
    for at in range(100):
        stream._read_message(tokens(message=(1, at)))
    stream._read_message(tokens((1, 100), end=1))
    await asyncio.sleep(0)
    first.set_paused(False)
    before = []
    for at in range(3):
        stream._read_message(tokens((2, at)))
        await asyncio.sleep(0)
        before.append(len(slow.notes))
    assert other.notes == [("written", [0]), ("written", [1]), ("written", [2])]
    assert 0 < before[0] < before[1] < before[2] < 50
    first.set_paused(True)
    await asyncio.sleep(0)
    held = len(slow.notes)
    await asyncio.sleep(0)
    assert len(slow.notes) == held, "paused again"
    first.set_paused(False)
    async with asyncio.timeout(60):
        while slow.notes[-1] != ("end", None):
            await asyncio.sleep(0)
    assert slow.notes == [*(("message", [at]) for at in range(100)), ("read", [100]), ("end", None)]
    assert list(stream._calls) == [2]


async def test_a_writer_that_fails_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    stream, (failing, fine, slow), _ = await started(3)
    stream._read_message(tokens((1, 13), (2, 1), (3, 101)))
    await asyncio.sleep(0)
    assert (fine.notes, slow.notes) == ([("written", [1])], [("read", [101])])
    ((kind, failure),) = failing.notes
    assert (kind, failure.code) == ("end", grpc.StatusCode.INTERNAL)
    assert re.findall("a reader of d0 failed", caplog.text)
    stream._read_message(tokens((2, 2)))
    await asyncio.sleep(0)
    assert fine.notes[1:] == [("written", [2])]


async def test_what_was_taken_is_sent_before_the_stream_breaks() -> None:
    stream, (reader,), _ = await started()
    stream._read_message(tokens((1, 1)))
    stream.on_end(StreamEnded(grpc.StatusCode.UNAVAILABLE, "gone"))
    await asyncio.sleep(0)
    (taken, (kind, failure)) = reader.notes
    assert (taken, kind) == (("written", [1]), "end")
    assert failure is not None
