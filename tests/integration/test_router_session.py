"""A session's name on its way from HTTP header, HTTP field and gRPC to the policy that keeps it in one place."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tests.scripted import ScriptedDispatcher

from baton.api.v1 import router_pb2
from baton.client.request import build_generate
from baton.text import TextModelCache
from baton_router import grpc_generate
from baton_router.generation_metrics import GenerationMetrics
from baton_router.http import HttpOptions, create_app
from baton_router.text_pipeline import TextPipeline


@pytest.fixture
def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher()


@pytest.fixture
def pipeline(dispatcher: ScriptedDispatcher) -> TextPipeline:
    return TextPipeline(dispatcher, TextModelCache(), GenerationMetrics(CollectorRegistry()))


async def test_header_and_field_name_the_session(dispatcher: ScriptedDispatcher, pipeline: TextPipeline) -> None:
    app = create_app(pipeline, dispatcher, registry=CollectorRegistry(), options=HttpOptions())
    body = {"model": "baton-tiny", "prompt": "def", "max_tokens": 2}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for extra, headers in (({}, {}), ({"session_id": "a"}, {}), ({"session_id": "a"}, {"x-baton-session": "b"})):
            answer = await client.post("/v1/completions", json={**body, **extra}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert "x-baton-ignored-fields" not in answer.headers
        long = await client.post("/v1/completions", json={**body, "session_id": "x" * 600})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "session_id")
    assert [request.session for request in dispatcher.requests] == ["", "a", "b"]


async def test_a_grpc_request_names_the_session(dispatcher: ScriptedDispatcher, pipeline: TextPipeline) -> None:
    request = build_generate("def", "", {"session_id": "c", "max_tokens": 2})
    responses = [response async for response in grpc_generate.generate(pipeline, request, None)]
    assert dispatcher.requests[0].session == "c"
    decision = responses[0].decision
    assert {term.name: term.value for term in decision.terms} == {"match": 1.0}
    answer = await grpc_generate.route(pipeline, router_pb2.RouteRequest(text="def", session_id="c"), None)
    assert answer.decision.decode_instance == "decode-1"
