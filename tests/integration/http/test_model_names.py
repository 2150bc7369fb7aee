"""Every name of the model is listed and accepted, and answers have the name that was asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.scripted import INFO
from tests.support.servers.http_front import Served

NAMES = ("baton-tiny", "models/baton-tiny", "an-alias")


@pytest.fixture
def named(running: Served) -> Iterator[Served]:
    running.reset()
    running.dispatcher.info = dataclasses.replace(INFO, names=NAMES)
    yield running
    running.dispatcher.info = INFO


def test_they_are_listed(named: Served) -> None:
    assert [each.id for each in named.client.models.list()] == list(NAMES)
    for name in NAMES:
        assert named.client.models.retrieve(name).id == name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
    ],
)
def test_answers_have_the_name_that_was_asked_for(named: Served, path: str, fields: dict[str, Any], name: str) -> None:
    answer = named.http.post(path, json={"model": name, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    streamed = named.http.post(path, json={"model": name, "stream": True, **fields}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    found = [(event.get("response") or event.get("message") or event).get("model") for event in events]
    assert {each for each in found if each is not None} == {name}


def test_another_name_is_told_all(named: Served) -> None:
    answer = named.http.post("/v1/completions", json={"model": "gpt-4", "prompt": "a"})
    assert answer.status_code == 404
    told = "the model 'gpt-4' is not served here; 'baton-tiny', 'models/baton-tiny', 'an-alias' are"
    assert answer.json()["error"]["message"] == told


def test_without_a_name_it_is_the_first(named: Served) -> None:
    assert named.http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == NAMES[0]
