"""The text pipeline over a scripted dispatcher: checks, defaults, stop strings, closing."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.grpc_calls import Context, servicer
from tests.support.scripted import ANSWER, EOS, MODEL, ScriptedDispatcher, encode

from baton.api.v1 import common_pb2, router_pb2
from baton.errors import (
    BatonError,
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
)
from baton.token_ids import TokenIds, token_ids
from baton.tokenizer import PromptText, TextDelta, TextModel, TextModelCache, TokenDelta
from baton.types import FinishReason, SamplingParams
from baton_router.dispatch.interface import ChunkSink, RoutedChunk
from baton_router.frontend.grpc.servicer import text_request
from baton_router.processor import output_processor
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import (
    GenerationClock,
    GenerationMetrics,
    OutputProcessor,
    cached_tokens,
)
from baton_router.processor.text_request import ChatPrompt, TextChunk, TextRequest
from baton_router.scheduler.decision import DecisionLog
from baton_router.types import ModelInfo, RoutedRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)


def pipeline(dispatcher: ScriptedDispatcher, **options: Any) -> InputProcessor:
    return InputProcessor(
        dispatcher, TextModelCache(), **{"metrics": GenerationMetrics(CollectorRegistry()), **options}
    )


async def collect(dispatcher: ScriptedDispatcher, request: TextRequest, **options: Any) -> list[TextChunk]:
    text = pipeline(dispatcher, **options)
    async with aclosing(text.stream(await text.prepare(request))) as chunks:
        return [chunk async for chunk in chunks]


def texts(chunks: list[TextChunk], index: int = 0) -> list[str]:
    return [delta.text for chunk in chunks for delta in chunk.deltas if delta.index == index]


def last(chunks: list[TextChunk], index: int = 0) -> Any:
    return [delta for chunk in chunks for delta in chunk.deltas if delta.index == index][-1]


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_text_without_broken_characters_and_without_the_end_token(per_chunk: int) -> None:
    dispatcher = ScriptedDispatcher(per_chunk=per_chunk)
    chunks = await collect(dispatcher, TextRequest("x", GREEDY))
    pieces = texts(chunks)
    assert "".join(pieces) == ANSWER
    assert not any("\ufffd" in piece for piece in pieces)
    end = last(chunks)
    assert (end.finish_reason, end.stop_reason, end.token_ids[-1]) == (FinishReason.STOP, None, EOS)
    assert (dispatcher.open_streams, dispatcher.closed_early) == (0, 0)


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("stop", [(), ("return a",)])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_text_of_each_token_by_itself(per_chunk: int, stop: tuple[str, ...], logprobs: int | None) -> None:
    request = TextRequest("x", GREEDY.replace(stop=stop, logprobs=logprobs, n=2), per_token=True)
    alone = await collect(ScriptedDispatcher(), msgspec.structs.replace(request, per_token=False))
    chunks = await collect(ScriptedDispatcher(per_chunk=per_chunk), request)
    for index in range(2):
        expected, found = (
            [delta for chunk in some for delta in chunk.deltas if delta.index == index] for some in (alone, chunks)
        )
        assert found == expected
        assert {len(delta.token_ids) for delta in found} == {1}


async def test_tokens_that_come_together_are_as_many_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(output_processor, "time", SimpleNamespace(perf_counter=lambda: now))
    registry = CollectorRegistry()
    clock = GenerationClock(GenerationMetrics(registry), arrived=0.0)
    for at, *counts in ((1.0, (0, 1)), (1.5, (0, 2), (1, 1)), (1.9, (0, 1), (0, 1), (1, 1)), (2.0, (0, 0))):
        now = at
        clock.count_deltas([TextDelta(index, "", [7] * count) for index, count in counts])
    assert registry.get_sample_value("baton_request_ttft_seconds_sum") == 1.0
    assert registry.get_sample_value("baton_request_itl_seconds_count") == 5  # of seven tokens, without each first one
    assert registry.get_sample_value("baton_request_itl_seconds_sum") == pytest.approx(0.9 + 0.4)
    assert registry.get_sample_value("baton_request_itl_seconds_bucket", {"le": "0.25"}) == 4
    assert registry.get_sample_value("baton_request_generated_tokens_total") == clock.generated == 7


async def test_what_waited_for_a_slow_client_comes_together() -> None:
    class Kept:
        """Hands on a token at its start, and three when it is held no more."""

        def start(self, request: RoutedRequest, sink: ChunkSink) -> Kept:
            self.sink, self.ids = sink, encode("one two three four")
            return self

        def set_paused(self, paused: bool) -> None:
            if not paused:
                self.sink.on_chunk(RoutedChunk([TokenDelta(0, self.ids[:3])]))

        def cancel(self) -> None:
            pass

    kept, chunks = Kept(), list[TextChunk]()
    text = pipeline(ScriptedDispatcher())
    prepared = await text.prepare(TextRequest("x", GREEDY, per_token=True))
    sink = SimpleNamespace(on_chunk=chunks.append)
    run = OutputProcessor(prepared, sink, text.clock(prepared), DecisionLog())
    run.start(kept)  # type: ignore[arg-type]
    run.set_paused(True)
    run.set_paused(False)
    kept.sink.on_chunk(RoutedChunk([TokenDelta(0, kept.ids[:3])]))
    assert [[len(delta.token_ids) for delta in chunk.deltas] for chunk in chunks] == [[3], [1, 1, 1]]


async def test_prompt_is_tokenized_once_with_defaults_filled_in() -> None:
    dispatcher = ScriptedDispatcher()
    await collect(dispatcher, TextRequest("def", SamplingParams(), default_max_tokens=16, request_id="mine"))
    await collect(dispatcher, TextRequest("def", SamplingParams(), cache_salt="s", priority=-3))
    await collect(dispatcher, TextRequest([7, 8], SamplingParams(seed=5, top_k=10**9)))
    await collect(
        dispatcher, TextRequest(ChatPrompt([{"role": "user", "content": "hi"}]), GREEDY, add_special_tokens=False)
    )
    first, second, third, chat = dispatcher.requests
    assert list(first.prompt_token_ids) == MODEL.tokenizer.encode("def")
    assert first.prompt_token_ids[0] == MODEL.tokenizer.bos_token_id
    assert first.sampling.max_tokens == 16
    assert second.sampling.max_tokens == 256 - len(second.prompt_token_ids)
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id.startswith("mine-")
    assert first.request_id != second.request_id
    assert (second.cache_salt, second.priority) == ("s", -3)
    assert (list(third.prompt_token_ids), third.sampling.seed, third.sampling.top_k) == ([7, 8], 5, 4096)
    assert MODEL.tokenizer.decode(chat.prompt_token_ids, False).startswith("<|bos|><|im_start|>user\nhi")
    assert chat.prompt_token_ids.count(1) == 1  # one begin token, the template's


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"model": "other"}, NotFoundError, "model"),
        ({"prompt": []}, InvalidRequestError, "prompt"),
        ({"prompt": [4096]}, InvalidRequestError, "prompt"),
        ({"prompt": [1] * 256}, ContextLengthError, "prompt"),
        ({"prompt": "word " * 5000}, ContextLengthError, "prompt"),
        ({"prompt": ChatPrompt([{"role": "user", "content": "word " * 400}]), "prompt_field": "messages"},
         ContextLengthError, "messages"),
        ({"prompt": [1] * 200, "sampling": {"max_tokens": 57}}, ContextLengthError, "max_tokens"),
        ({"sampling": {"max_tokens": 0}, "max_tokens_field": "max_completion_tokens"}, InvalidRequestError,
         "max_completion_tokens"),
        ({"sampling": {"temperature": -1.0}, "field_prefix": "sampling."}, InvalidRequestError, "sampling.temperature"),
        ({"sampling": {"logit_bias": {4096: 1.0}}}, InvalidRequestError, "logit_bias"),
        ({"sampling": {"stop": ("a", "")}}, InvalidRequestError, "stop"),
        ({"sampling": {"stop": ("a",) * 33}}, InvalidRequestError, "stop"),
        ({"sampling": {"stop": ("a" * 5000,)}}, InvalidRequestError, "stop"),
        ({"priority": 2**31}, InvalidRequestError, "priority"),
        ({"cache_salt": "s" * 600}, InvalidRequestError, "cache_salt"),
        ({"request_id": "x\n2026-01-01 INFO router: forged"}, InvalidRequestError, "request_id"),
        ({"request_id": "x\x1b[2K"}, InvalidRequestError, "request_id"),
        ({"request_id": "x\u202e"}, InvalidRequestError, "request_id"),
    ],
)  # fmt: skip
async def test_bad_input_is_named_before_anything_is_taken(
    changes: dict[str, Any], error: type[BatonError], field: str
) -> None:
    dispatcher = ScriptedDispatcher()
    sampling = dataclasses.replace(GREEDY, **changes.pop("sampling", {}))
    request = msgspec.structs.replace(TextRequest("x", sampling), **changes)
    with pytest.raises(error) as caught:
        await pipeline(dispatcher).prepare(request)
    assert type(caught.value) is error
    assert caught.value.field == field
    assert dispatcher.requests == []


async def test_long_texts_are_tokenized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def slowly(model: TextModel, request: TextRequest, info: ModelInfo, limit: int | None) -> TokenIds:
        begun.release()
        assert go_on.acquire(timeout=240)
        return token_ids([1])

    monkeypatch.setattr("baton_router.processor.input_processor._tokenize", slowly)
    monkeypatch.setattr("baton_router.processor.turns._WAIT_S", 0.2)
    text = pipeline(ScriptedDispatcher())
    info = text.model_info()
    first = asyncio.create_task(text.tokenize(TextRequest("x" * 300_000, GREEDY), info))
    assert await asyncio.to_thread(begun.acquire, timeout=240)
    with pytest.raises(UnavailableError):
        await text.tokenize(TextRequest("x" * 300_000, GREEDY), info)
    monkeypatch.setattr("baton_router.processor.turns._WAIT_S", 240.0)
    shorter = asyncio.create_task(text.tokenize(TextRequest("x" * 200_000, GREEDY), info))
    assert await asyncio.to_thread(begun.acquire, timeout=240), "shorter ones don't wait for it"
    go_on.release(2)
    assert await first == await shorter == token_ids([1])
    go_on.release()
    assert await text.tokenize(TextRequest("x" * 300_000, GREEDY), info) == token_ids([1])


@pytest.mark.parametrize("size", [300_000, 100_000])
async def test_tenants_take_turns_with_long_texts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    begun, go_on = list[str](), threading.Semaphore(0)

    def slowly(model: TextModel, request: TextRequest, info: ModelInfo, limit: int | None) -> TokenIds:
        begun.append(request.user)
        assert go_on.acquire(timeout=240)
        return token_ids([1])

    monkeypatch.setattr("baton_router.processor.input_processor._tokenize", slowly)
    text = pipeline(ScriptedDispatcher())
    info = text.model_info()
    await text.text_model(info)  # loaded now, so all of them queue in the order in which they are sent

    def send(user: str) -> asyncio.Task[TokenIds]:
        return asyncio.create_task(text.tokenize(TextRequest("x" * size, GREEDY, user=user), info))

    greedy = [send("greedy") for _ in range(24)]
    async with asyncio.timeout(240):
        while not begun:
            await asyncio.sleep(0.001)
    modest = send("modest")
    for task in (greedy[0], *greedy[11:]):
        task.cancel()  # also of one that runs: its thread keeps its turn until it ends
    await asyncio.sleep(0.05)
    go_on.release(4)
    await asyncio.wait_for(modest, 240)
    assert "modest" in begun[:5]
    go_on.release(100)
    results = await asyncio.gather(*greedy, return_exceptions=True)
    assert sum(not isinstance(x, BaseException) for x in results) == 10
    async with asyncio.timeout(240):
        while (text._large._free, text._threads.turns._free) != (1, 2):
            await asyncio.sleep(0.001)
    assert not text._large._waiting
    assert not text._threads.turns._waiting


async def test_work_whose_caller_has_gone_ends_before_its_next_step() -> None:
    rendered, go_on = threading.Event(), threading.Event()
    encoded: list[Any] = []

    class Noted(TextModel):
        def chat_text(self, *args: Any, **options: Any) -> PromptText:
            rendered.set()
            assert go_on.wait(240)
            return MODEL.chat_text(*args, **options)

        def encode(self, *args: Any) -> TokenIds:
            encoded.append(args)
            return MODEL.encode(*args)

    class Loaded(TextModelCache):
        async def get(self, path: str) -> TextModel:
            return Noted(MODEL.tokenizer, MODEL.chat_template)

    text = InputProcessor(ScriptedDispatcher(), Loaded(), GenerationMetrics(CollectorRegistry()))
    message = {"role": "user", "content": "x" * 10_000}
    task = asyncio.create_task(text.tokenize(TextRequest(ChatPrompt([message]), GREEDY), text.model_info()))
    assert await asyncio.to_thread(rendered.wait, 240)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(240):
        while text._threads.turns._free != 2:
            await asyncio.sleep(0.001)
    assert not encoded


async def test_a_model_without_chat_template() -> None:
    class Bare:
        async def get(self, path: str) -> TextModel:
            return TextModel(MODEL.tokenizer)

        def loaded(self, path: str) -> TextModel | None:
            return None

    request = TextRequest(ChatPrompt([{"role": "user", "content": "x"}]), GREEDY, prompt_field="messages")
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        await InputProcessor(ScriptedDispatcher(), Bare(), GenerationMetrics(CollectorRegistry())).prepare(request)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("given", [True, False, None])
@pytest.mark.parametrize("router", [True, False])
async def test_special_tokens_in_messages(router: bool, given: bool | None) -> None:
    text = pipeline(ScriptedDispatcher(), allow_special_tokens=router)
    messages = [{"role": "user", "content": "<|im_end|>"}]
    allowed = router if given is None else given
    for fill in ("", "x" * 5000):  # at once, and in a thread
        messages[0]["content"] = f"<|im_end|>{fill}"
        request = TextRequest(ChatPrompt(messages), GREEDY, allow_special_tokens=given)
        ids = await text.tokenize(request, text.model_info())
        assert list(ids).count(EOS) == (2 if allowed else 1)
    asked = router_pb2.RouterGenerateRequest(allow_special_tokens=given)
    asked.chat.messages.add(role="user", content="<|im_end|>")
    prepared = await text.prepare(text_request(asked, None))
    assert list(prepared.routed.prompt_token_ids).count(EOS) == (2 if allowed else 1)


@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
@pytest.mark.parametrize(
    ("stop", "include", "kept"), [("return", False, ""), ("return", True, "return"), (") \n", False, None)]
)
async def test_stop_string_ends_the_sequence_and_frees_the_instances(
    per_chunk: int, stop: str, include: bool, kept: str | None
) -> None:
    dispatcher = ScriptedDispatcher(per_chunk=per_chunk, hang_after=None)
    sampling = dataclasses.replace(GREEDY, stop=(stop, "never"), logprobs=1)
    chunks = await collect(dispatcher, TextRequest("x", sampling, include_stop=include))
    text = "".join(texts(chunks))
    if kept is None:
        assert text == ANSWER
        return
    assert text == ANSWER.partition("return")[0] + kept
    end = last(chunks)
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, "return")
    ids = [token_id for chunk in chunks for delta in chunk.deltas for token_id in delta.token_ids]
    values = [item for chunk in chunks for delta in chunk.deltas for item in delta.logprobs]
    assert [item.token_id for item in values] == ids
    assert "return" in MODEL.tokenizer.decode(ids)
    assert "return" not in MODEL.tokenizer.decode(ids[:-1])  # nothing after the token that completed it
    assert dispatcher.open_streams == 0


async def test_stream_is_closed_before_the_last_text_is_delivered() -> None:
    dispatcher = ScriptedDispatcher()
    text = pipeline(dispatcher)
    prepared = await text.prepare(TextRequest("x", dataclasses.replace(GREEDY, stop=("return",))))
    async with aclosing(text.stream(prepared)) as chunks:
        async for chunk in chunks:
            if chunk.deltas[0].finish_reason is not None:
                assert (dispatcher.open_streams, dispatcher.closed_early) == (0, 1)
                return
    pytest.fail("the sequence did not end")


async def test_stop_string_of_one_sequence_leaves_the_others_running() -> None:
    scripts = ["one STOP two", "three four five six seven eight nine"]
    dispatcher = ScriptedDispatcher(script=lambda request, index: encode(scripts[index]))
    chunks = await collect(dispatcher, TextRequest("x", dataclasses.replace(GREEDY, n=2, stop=("STOP",))))
    assert "".join(texts(chunks, 0)) == "one "
    assert "".join(texts(chunks, 1)) == scripts[1]
    assert last(chunks, 0).stop_reason == "STOP"
    assert last(chunks, 1).stop_reason is None
    assert dispatcher.closed_early == 0  # the other one ran to its end


async def test_text_of_the_first_min_tokens_cannot_stop() -> None:
    dispatcher = ScriptedDispatcher(script=lambda request, index: encode("a b a b a b"))
    at = len(encode("a b a"))
    sampling = dataclasses.replace(GREEDY, stop=("b",), min_tokens=at)
    assert "".join(texts(await collect(dispatcher, TextRequest("x", sampling)))) == "a b a "


async def test_stop_token_is_no_text_and_is_named() -> None:
    token = encode(ANSWER)[4]
    before = MODEL.tokenizer.decode(encode(ANSWER)[:4])
    sampling = dataclasses.replace(GREEDY, stop_token_ids=(token,))
    chunks = await collect(ScriptedDispatcher(), TextRequest("x", sampling))
    assert "".join(texts(chunks)) == before
    assert last(chunks).stop_reason == token
    shown = await collect(ScriptedDispatcher(), TextRequest("x", sampling, include_stop=True))
    assert "".join(texts(shown)) == before + MODEL.tokenizer.token_text(token)


async def test_length_ends_with_what_was_held_back() -> None:
    ids = encode("日本")
    dispatcher = ScriptedDispatcher(script=lambda request, index: ids)
    sampling = dataclasses.replace(GREEDY, max_tokens=len(ids) - 1, stop=("本x",))
    chunks = await collect(dispatcher, TextRequest("x", sampling))
    assert "".join(texts(chunks)) == MODEL.tokenizer.decode(ids[:-1])
    assert last(chunks).finish_reason is FinishReason.LENGTH


async def test_offsets_point_into_the_text() -> None:
    chunks = await collect(ScriptedDispatcher(per_chunk=2), TextRequest("x", dataclasses.replace(GREEDY, logprobs=0)))
    offsets = [offset for chunk in chunks for delta in chunk.deltas for offset in delta.offsets]
    ids = [token_id for chunk in chunks for delta in chunk.deltas for token_id in delta.token_ids]
    tokenizer = MODEL.tokenizer
    for at, offset in enumerate(offsets):
        before = tokenizer.decode(ids[:at])
        assert ANSWER[:offset] == before.rstrip("\ufffd")


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.ABORT, UnavailableError), (FinishReason.ERROR, InternalError)]
)
async def test_abort_and_error_never_leak_as_finish_reasons(reason: FinishReason, error: type[BatonError]) -> None:
    class Aborting(ScriptedDispatcher):
        async def stream(self, request: RoutedRequest) -> Any:
            yield RoutedChunk([TokenDelta(0, [5], finish_reason=reason)])

    with pytest.raises(error):
        await collect(Aborting(), TextRequest("x", GREEDY))


async def test_a_stream_that_ends_too_early_is_an_error() -> None:
    class Short(ScriptedDispatcher):
        async def stream(self, request: RoutedRequest) -> Any:
            yield RoutedChunk([TokenDelta(0, [5])])

    with pytest.raises(InternalError, match="ended before"):
        await collect(Short(), TextRequest("x", GREEDY))


async def test_closing_and_cancelling_close_the_dispatchers_stream() -> None:
    dispatcher = ScriptedDispatcher(hang_after=2)
    text = pipeline(dispatcher)
    prepared = await text.prepare(TextRequest("x", GREEDY))
    stream = text.stream(prepared)
    await anext(stream)
    await stream.aclose()
    assert (dispatcher.open_streams, dispatcher.closed_early) == (0, 1)

    async def run() -> None:
        async with aclosing(text.stream(prepared)) as chunks:
            async for _ in chunks:
                pass

    task = asyncio.create_task(run())
    while dispatcher.open_streams == 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (dispatcher.open_streams, dispatcher.closed_early) == (0, 2)


async def test_metrics_count_every_generation() -> None:
    registry = CollectorRegistry()
    metrics = GenerationMetrics(registry)
    request = TextRequest("def", GREEDY)
    await collect(ScriptedDispatcher(), request, metrics=metrics)
    with pytest.raises(QueueFullError):
        await collect(ScriptedDispatcher(fail_after=0, error=QueueFullError("full")), request, metrics=metrics)
    text = generate_latest(registry).decode()
    tokens = len(encode(ANSWER)) + 1
    for line in (
        'baton_request_finished_total{outcome="done"} 1.0',
        'baton_request_finished_total{outcome="queue_full"} 1.0',
        f"baton_request_generated_tokens_total {float(tokens)}",
        "baton_request_ttft_seconds_count 1.0",
        f"baton_request_itl_seconds_count {float(tokens - 1)}",
        "baton_request_e2e_seconds_count 2.0",
        f"baton_request_prompt_tokens_total {float(len(MODEL.tokenizer.encode('def')))}",
    ):
        assert line in text


def test_cached_tokens_are_what_nobody_computed() -> None:
    trace = common_pb2.RequestTrace
    remote = {"path": common_pb2.PREFILL_PATH_REMOTE, "prompt_tokens": 100}
    assert cached_tokens(None) == 0
    assert cached_tokens(trace(path=common_pb2.PREFILL_PATH_LOCAL, prompt_tokens=100, cached_tokens=32)) == 32
    assert cached_tokens(trace(cached_tokens=16, prefill_cached_tokens=64, **remote)) == 64
    assert cached_tokens(trace(cached_tokens=64, prefill_cached_tokens=16, **remote)) == 64
    assert (
        cached_tokens(
            trace(path=common_pb2.PREFILL_PATH_STORE, prompt_tokens=100, cached_tokens=16, transferred_tokens=32)
        )
        == 48
    )


async def test_grpc_generate() -> None:
    dispatcher = ScriptedDispatcher()
    request = router_pb2.RouterGenerateRequest(
        request_id="r1",
        text="def",
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=100, logprobs=2),
        stop=["return"],
        cache_salt="s",
    )
    responses = [item async for item in servicer(pipeline(dispatcher)).Generate(request, Context())]
    assert {response.request_id for response in responses} == {"r1"}
    assert "".join(delta.text for response in responses for delta in response.deltas) == ANSWER.partition("return")[0]
    assert responses[0].decision.decode_instance == "decode-1"
    assert responses[0].trace.kv_bytes == 4096
    end = responses[-1].deltas[0]
    assert (end.finish_reason, end.stop_reason) == (common_pb2.FINISH_REASON_STOP, "return")
    assert len(end.logprobs[0].top_token_ids) == 2
    assert dispatcher.requests[0].cache_salt == "s"


async def test_grpc_bad_input_and_chat_and_route() -> None:
    text = pipeline(ScriptedDispatcher())
    for request, field in (
        (router_pb2.RouterGenerateRequest(), "prompt"),
        (router_pb2.RouterGenerateRequest(text="x", sampling=common_pb2.SamplingParams(min_p=7)), "sampling.min_p"),
        (router_pb2.RouterGenerateRequest(token_ids=router_pb2.TokenIds(ids=[10**6])), "token_ids"),
        (router_pb2.RouterGenerateRequest(chat=router_pb2.ChatMessages()), "messages"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await anext(servicer(text).Generate(request, Context()))
        assert caught.value.field == field
    chat = router_pb2.ChatMessages(messages=[router_pb2.ChatMessage(role="user", content="hi")])
    answer = await servicer(text).Route(router_pb2.RouteRequest(chat=chat), Context())
    assert answer.decision.prefill_instance == "prefill-0"
    models = (await servicer(text).ListModels(router_pb2.ListModelsRequest(), Context())).models
    assert [(model.name, model.max_model_len) for model in models] == [("baton-tiny", 256)]
