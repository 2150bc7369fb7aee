"""Sampling defaults of a model's ``generation_config.json``: for what requests leave open, and for nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted import INFO, TINY
from tests.support.servers.http_front import CHAT, Served

from baton.api.v1 import common_pb2, router_pb2
from baton.client.request import build_generate
from baton.config.router import RouterConfig
from baton.rpc.convert import sampling_from_pb, sampling_to_pb
from baton.tokenizer import TextModelCache
from baton.tokenizer.generation_config import sampling_defaults
from baton.types import SamplingParams
from baton_router.app import text_models
from baton_router.frontend.grpc.servicer import text_request
from baton_router.processor.input_processor import complete_sampling

CONFIG = {
    "eos_token_id": [4, 2],
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "max_new_tokens": 11,
}
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
THEIRS = (0.25, 7, 0.5, 0.125, 1.5, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("defaults") / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "generation_config.json").write_text(json.dumps(CONFIG))
    return model


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served() as server:
        server.dispatcher.info = dataclasses.replace(server.dispatcher.info, path=str(folder))
        yield server


def sampled(served: Served, path: str, **fields: Any) -> tuple[Any, ...]:
    """Return the sampling parameters that a request's generation has."""
    prompt = {"/v1/completions": {"prompt": "def"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": CHAT})
    answer = served.post(path, {**prompt, **fields})
    assert answer.status_code == 200, answer.text
    sampling = served.dispatcher.requests[-1].sampling
    return tuple(getattr(sampling, name) for name in FIELDS)


def test_they_are_those_of_requests_that_set_none(served: Served) -> None:
    assert sampled(served, "/v1/chat/completions") == THEIRS
    assert sampled(served, "/v1/chat/completions", temperature=None, top_k=None) == THEIRS
    assert sampled(served, "/v1/responses") == THEIRS
    assert sampled(served, "/v1/messages", max_tokens=9) == (*THEIRS[:5], 9)
    assert sampled(served, "/v1/completions") == (*THEIRS[:5], 16)  # OpenAI's default goes first, as a request's value


def test_what_a_request_sets_goes_first(served: Served) -> None:
    own = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 12}
    assert sampled(served, "/v1/chat/completions", **own) == tuple(own.values())
    for name, value in own.items():
        expected = dict(zip(FIELDS, THEIRS, strict=True)) | {name: value}
        assert sampled(served, "/v1/chat/completions", **{name: value}) == tuple(expected.values())


def test_clients_over_grpc_have_them_too(folder: Path) -> None:
    model = asyncio.run(TextModelCache().get(str(folder)))

    def complete(request: router_pb2.RouterGenerateRequest) -> tuple[Any, ...]:
        prepared = text_request(request, None)
        sampling = complete_sampling(prepared, INFO, 3, model.sampling_defaults)
        return tuple(getattr(sampling, name) for name in FIELDS)

    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 12}
    wire = router_pb2.RouterGenerateRequest(text="def")
    assert complete(wire) == complete(build_generate("def", "", {})) == THEIRS
    for name, value in off.items():
        expected = tuple((dict(zip(FIELDS, THEIRS, strict=True)) | {name: value}).values())
        given = common_pb2.SamplingParams(**{name: value})
        assert complete(router_pb2.RouterGenerateRequest(text="def", sampling=given)) == expected
        assert complete(build_generate("def", "", {name: value})) == expected
    explicit = build_generate("def", "", {"sampling": SamplingParams(max_tokens=12), "top_p": 1.0})
    assert complete(explicit) == tuple(off.values())
    # What services send among themselves is complete: it says that a filter is off.
    assert sampling_from_pb(sampling_to_pb(SamplingParams(top_k=-1))).top_k == -1
    again = router_pb2.RouterGenerateRequest(text="def", sampling=sampling_to_pb(SamplingParams(max_tokens=12)))
    assert complete(again) == tuple(off.values())


def test_greedy_stays_greedy(served: Served) -> None:
    sampled(served, "/v1/chat/completions", temperature=0)
    assert served.dispatcher.requests[-1].sampling.greedy


def test_they_can_be_switched_off_and_are_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert asyncio.run(text_models(RouterConfig(generation_config="off")).get(str(folder))).sampling_defaults == {}
    assert "temperature" not in caplog.text
    defaults = asyncio.run(text_models(RouterConfig()).get(str(folder))).sampling_defaults
    assert dict(defaults) == dict(zip(FIELDS, THEIRS, strict=True))
    assert "temperature 0.25" in caplog.text
    caplog.clear()
    assert asyncio.run(TextModelCache().get(str(TINY))).sampling_defaults == {}
    assert not caplog.records


def test_values_that_cannot_be_used_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {
        "temperature": -1,
        "top_p": "x",
        "top_k": True,
        "min_p": 2,
        "repetition_penalty": None,
        "max_new_tokens": 0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps({**wrong, "do_sample": True}))
    assert sampling_defaults(tmp_path) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 5
    (tmp_path / "generation_config.json").write_text("[")
    assert sampling_defaults(tmp_path) == {}
