"""What clients send that has no natural bound: labels of metrics, and texts that are no content."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest
from prometheus_client import CollectorRegistry
from tests.support.scripted import INFO, ScriptedDispatcher

from baton.api.v1 import common_pb2
from baton.errors import InvalidRequestError
from baton.tokenizer import TextModelCache
from baton.types import SamplingParams
from baton_router.dispatch.request import DispatchMetrics
from baton_router.frontend.http.bodies import BodyDecoder, decode_json
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics
from baton_router.processor.text_request import ChatPrompt, TextRequest


def test_names_in_traces_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = DispatchMetrics(registry)
    for at in range(1000):
        trace = common_pb2.RequestTrace(pipe=f"pipe {at}", local_reason=f"reason {at}", kv_bytes=1, transfer_us=1)
        trace.path = at  # type: ignore[assignment]  # open enumerations: any number comes through
        metrics.observe_trace(trace)
    metrics.observe_trace(common_pb2.RequestTrace(pipe="p" * 1000, kv_bytes=1))
    for name in ("prefill_path", "kv_bytes", "transfer_seconds"):
        (family,) = (x for x in registry.collect() if x.name == f"baton_router_{name}")
        series = {tuple(x.labels.values()) for x in family.samples if "le" not in x.labels}
        assert len(series) <= 101
        assert any("other" in labels for labels in series)
    sample = registry.get_sample_value
    assert sample("baton_router_kv_bytes_total", {"pipe": "pipe 0"}) == 1
    assert sample("baton_router_kv_bytes_total", {"pipe": "other"}) == 951
    assert len(metrics._by_path) <= 100


@pytest.mark.parametrize("where", ["content", "role", "name"])
async def test_a_long_text_is_not_tokenized_at_once_wherever_it_stands(where: str) -> None:
    tokenizers = TextModelCache()
    await tokenizers.get(INFO.path)
    pipeline = InputProcessor(ScriptedDispatcher(), tokenizers, GenerationMetrics(CollectorRegistry()))

    def request(chars: int) -> TextRequest:
        message = {"role": "user", "content": "x", "name": "n", where: "x" * chars}
        return TextRequest(prompt=ChatPrompt([message]), sampling=SamplingParams(max_tokens=1))

    assert pipeline.prepare_now(request(10)) is not None
    assert pipeline.prepare_now(request(5000)) is None
    nested: object = []
    for _ in range(1020):
        nested = [nested]
    deep = ChatPrompt([{"role": "user", "content": "x", "name": nested}])
    assert pipeline.prepare_now(TextRequest(prompt=deep, sampling=SamplingParams(max_tokens=1))) is None
    variables = ChatPrompt([{"role": "user", "content": "x"}], variables={"persona": "x" * 5000})
    assert pipeline.prepare_now(TextRequest(prompt=variables, sampling=SamplingParams(max_tokens=1))) is None
    many = ChatPrompt([{"role": "user", "content": ""}] * 300)
    assert pipeline.prepare_now(TextRequest(prompt=many, sampling=SamplingParams(max_tokens=1))) is None


@pytest.mark.parametrize(("depth", "fits"), [(200, True), (201, False), (1000, False)])
def test_a_body_that_could_not_be_written_again_is_refused(depth: int, fits: bool) -> None:
    body = b'{"tools":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if fits:
        assert decode_json(body)
        return
    with pytest.raises(InvalidRequestError, match="nested deeper than 200"):
        decode_json(body)


class _Body(bytearray):
    """A body that weak references may refer to."""


async def test_bodies_that_are_refused_in_a_thread_are_freed_at_once() -> None:
    decoder = BodyDecoder()
    alive = []
    gc.disable()
    try:
        for _ in range(5):
            body = _Body(b"x" * 300_000)
            alive.append(weakref.ref(body))
            with contextlib.suppress(InvalidRequestError):
                await decoder.decode("tenant", body)
            del body
        async with asyncio.timeout(60):
            while any(ref() for ref in alive):  # the thread lets go of the last one after its result
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
