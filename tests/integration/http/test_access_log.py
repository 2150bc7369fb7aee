"""The access log: a line per request, by whichever way it came, and none unless it is turned on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.support.grpc_calls import Context, servicer
from tests.support.scripted import ScriptedDispatcher
from tests.support.servers.http_front import KEYS, Served

from baton.api.v1 import router_pb2
from baton.tokenizer import TextModelCache
from baton_router.accounts import Accounts
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics

BODY = {"model": "baton-tiny", "prompt": "def", "max_tokens": 2}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.name == "baton.access"]


def test_http_requests_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with Served(access_log=True, accounts=Accounts.of_keys(*KEYS)) as api:
        good = api.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
        api.http.post("/v1/completions", json=BODY, headers={"authorization": "Bearer wrong", "x-request-id": "no"})
        models = api.http.get("/v1/models/any-name")
    assert good.status_code == 200
    found = lines(caplog)
    known = [[line[key] for key in ("method", "path", "status", "request_id", "peer")] for line in found]
    assert known == [
        ["POST", "/v1/completions", 200, "mine", "127.0.0.1"],
        ["POST", "/v1/completions", 401, "no", "127.0.0.1"],
        ["GET", "/v1/models/{id}", models.status_code, models.headers["x-request-id"], "127.0.0.1"],
    ]
    assert [bool(line["account"]) for line in found] == [True, False, True]
    assert all(line["seconds"] > 0 for line in found)
    (first, *_) = (record.getMessage() for record in caplog.records if record.name == "baton.access")
    assert re.match(r'127\.0\.0\.1 "POST /v1/completions" 200 \d+\.\d+ s ', first)
    assert not any(key in record.getMessage() for record in caplog.records for key in (*KEYS, "def"))


def test_there_are_none_unless_they_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    with Served() as api:
        assert api.http.post("/v1/completions", json=BODY).status_code == 200
        api.http.get("/v1/models")
    assert not lines(caplog)


async def test_grpc_calls_have_one_too_and_their_metadata_names_the_parent(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = ScriptedDispatcher()
    pipeline = InputProcessor(dispatcher, TextModelCache(), GenerationMetrics(CollectorRegistry()))
    front = servicer(pipeline, access_log=True)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = router_pb2.RouterGenerateRequest(text="def", request_id="r1")
    request.sampling.max_tokens = 2
    async for _ in front.Generate(request, Context(traceparent=parent)):
        pass
    assert str(dispatcher.requests[0].span.parent) == parent
    (line,) = lines(caplog)
    assert [line[key] for key in ("method", "path", "status", "request_id")] == ["grpc", "Generate", "ok", "r1"]
