"""Plain chunks take short branches through the router: they must write what chunks in general do."""

from __future__ import annotations

import functools
from contextlib import aclosing
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.support.scripted import ANSWER, MODEL, ScriptedDispatcher, encode
from tests.unit.router.frontend.test_openai_pipeline import GREEDY, pipeline

from baton.tokenizer import SequenceText, TextDelta, TokenDelta
from baton_router.dispatch.interface import RoutedChunk
from baton_router.frontend.openai.answer import EventStream, WholeAnswer
from baton_router.frontend.openai.openai_request import parse_chat, parse_completion
from baton_router.processor.output_processor import GenerationMetrics, OutputProcessor
from baton_router.processor.text_request import TextChunk, TextRequest

completion = functools.partial(parse_completion, max_prompts=8, max_sequences=64)
STREAM: dict[str, Any] = {"model": "baton-tiny", "max_tokens": 50, "stream": True}
BODIES: list[dict[str, Any]] = [
    {"prompt": "x"},
    {"prompt": ["x", "y"], "n": 2},
    {"prompt": "x", "logprobs": 1},
    {"prompt": "x", "return_token_ids": True},
    {"prompt": "x", "stream_options": {"include_usage": True}},
    {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"messages": [{"role": "user", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("formatter", [EventStream, WholeAnswer])
@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_plain_text_is_written_as_a_chunk_with_it_is(
    body: dict[str, Any], formatter: type[EventStream] | type[WholeAnswer]
) -> None:
    request = (parse_chat if "messages" in body else completion)({**STREAM, **body})
    text = pipeline(ScriptedDispatcher())
    prepared = [await text.prepare(item) for item in request.requests]
    short, long = (formatter(request, prepared, "id", 1700000000) for _ in range(2))
    pieces = ["", "a", 'a "quote"\n', "\u00e9\U0001f600", ""]
    for at in range(len(prepared)):
        for index in range(request.n):
            first = TextChunk([TextDelta(index, "first", [5])], prompt_index=at)
            assert short.add(first) == long.add(first)
            for token_id, piece in enumerate(pieces):
                delta = TextDelta(index, piece, [token_id])
                plain = TextChunk([delta], prompt_index=at, plain=True)
                assert short.add(plain) == long.add(TextChunk([delta], prompt_index=at))
    assert short.end() == long.end()


@pytest.mark.parametrize("options", [{}, {"stop": ("never",)}, {"logprobs": 1}, {"n": 2}], ids=str)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("together", [1, 3])
async def test_plain_tokens_say_and_count_what_a_chunk_with_them_does(
    options: dict[str, Any], per_token: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate() -> tuple[list[TextDelta], float | None, float | None]:
        registry = CollectorRegistry()
        text = pipeline(ScriptedDispatcher(per_chunk=together), metrics=GenerationMetrics(registry))
        prepared = await text.prepare(TextRequest("x", GREEDY.replace(**options), per_token=per_token))
        async with aclosing(text.stream(prepared)) as chunks:
            deltas = [delta async for chunk in chunks for delta in chunk.deltas]
        names = ("generated_tokens_total", "itl_seconds_count")
        generated, gaps = (registry.get_sample_value(f"baton_request_{name}") for name in names)
        return deltas, generated, gaps

    short, plain = await generate(), list[int]()
    on_chunk = OutputProcessor.on_chunk

    def on_any_chunk(self: OutputProcessor, chunk: RoutedChunk) -> None:
        if chunk.plain:
            plain.extend(chunk.deltas[0].token_ids)
            chunk.plain = False
        on_chunk(self, chunk)

    monkeypatch.setattr(OutputProcessor, "on_chunk", on_any_chunk)
    assert await generate() == short
    assert bool(plain) == ("logprobs" not in options and "n" not in options), "what the dispatcher calls plain"


def test_a_known_tokens_text_does_not_depend_on_what_was_decoded_before() -> None:
    tokenizer = MODEL.tokenizer
    ids = encode(ANSWER + " \u00e9\U0001f600 a a")
    fresh = SequenceText(tokenizer, (), GREEDY)
    assert "".join(fresh.push(TokenDelta(0, [x])).text for x in ids) == tokenizer.decode(ids)
    again = SequenceText(tokenizer, (), GREEDY)
    assert "".join(again.push_plain([x]) for x in ids) == tokenizer.decode(ids)
