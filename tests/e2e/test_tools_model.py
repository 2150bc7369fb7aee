"""The model that calls tools, through a router, a prefill and a decode instance: calls that nobody forced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripts.demo_model.tool_conversations import ConversationMaker, Exchange
from tests.support.servers.up import Running, running_up

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MODEL, EXAMPLE = ROOT / "models" / "baton-tiny-tools", ROOT / "examples" / "openai_agent.py"
CALLS, OTHERS, SEED = 24, 6, 20
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running_up(
        "--ratio", "1P1D", "--dtype", "float32", "--model", str(MODEL),
        "--router-args", "--remote-prefill-threshold 16",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def api(up: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


def exchanges(count: int, *, calls: bool) -> list[Exchange]:
    """Make conversations up, of words that are kept from training, whose answer is a call, or is none."""
    maker = ConversationMaker(SEED, held_out=True)
    found: list[Exchange] = []
    while len(found) < count:
        one = maker.exchange()
        if (one.call is not None) == calls:
            found.append(one)
    return found


def asked(one: Exchange, **more: Any) -> dict[str, Any]:
    """Return the fields of a request for what a conversation's answer is."""
    messages = json.loads(json.dumps(one.messages))
    for message in messages:  # the interface wants arguments as text, and ids
        for call in message.get("tool_calls", []):
            call["id"] = "call_1"
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if message["role"] == "tool":
            message["tool_call_id"] = "call_1"
    fields = {"model": MODEL.name, "messages": messages, "tools": one.tools, "temperature": 0, "max_tokens": 96}
    return {**fields, "tool_choice": "auto", **more}


def test_the_model_calls_what_it_is_asked_to(api: openai.OpenAI) -> None:
    right = 0
    for one in exchanges(CALLS, calls=True):
        raw = api.chat.completions.with_raw_response.create(**asked(one))
        assert raw.headers["x-baton-path"] == "remote"  # the call's first token is the prefill instance's
        (choice,) = raw.parse().choices
        found = choice.message.tool_calls or []
        if choice.finish_reason == "tool_calls":  # else it is text, or was cut
            right += [(call.function.name, json.loads(call.function.arguments)) for call in found] == [one.call]
    assert right >= 0.8 * CALLS  # the card's share is of a thousand


def test_what_asks_for_no_call_gets_text(api: openai.OpenAI) -> None:
    right = 0
    for one in exchanges(OTHERS, calls=False):
        (choice,) = api.chat.completions.create(**asked(one)).choices
        right += not choice.message.tool_calls and choice.message.content == one.answer
    assert right >= 0.8 * OTHERS


def test_a_call_streams_as_it_is_written_and_its_result_is_told(api: openai.OpenAI) -> None:
    """A whole turn of an agent, nothing of which is forced."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Bonaro?"}]
    fields: dict[str, Any] = {"model": MODEL.name, "tools": [WEATHER], "temperature": 0, "max_tokens": 96}
    for _ in range(50):  # what a busy router reads in one turn it sends on in one piece
        with api.chat.completions.stream(messages=messages, **fields) as stream:
            names = [event.name for event in stream if event.type == "tool_calls.function.arguments.delta"]
            message = stream.get_final_completion().choices[0].message
        (call,) = message.tool_calls or []
        assert set(names) == {"get_weather"}
        if len(names) > 1:
            break
    assert len(names) > 1
    assert json.loads(call.function.arguments) == {"city": "Bonaro"}
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "rainy"}]
    (choice,) = api.chat.completions.create(messages=messages, **fields).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It says: rainy."


def test_the_example_of_an_agent_runs(up: Running) -> None:
    command = [sys.executable, str(EXAMPLE), "--url", f"{up.url}/v1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    steps = [json.loads(line) for line in ran.stdout.splitlines()]
    called = [[(name, json.loads(arguments)) for name, arguments in step["called"]] for step in steps]
    assert called == [
        [("get_weather", {"city": "Bonaro"})], [("add", {"a": 17, "b": 25})], [("lookup", {"key": "Taborin"})], []
    ]  # fmt: skip
    assert [step["said"] for step in steps] == ["It says: rain.", "It says: 42.", "It says: nirobat.", "Good morning!"]


@pytest.mark.parametrize("choice", ["none", "required"])
def test_the_clients_choice_goes_before_the_models(api: openai.OpenAI, choice: str) -> None:
    (one,) = exchanges(1, calls=True)
    (answer,) = api.chat.completions.create(**asked(one, tool_choice=choice)).choices
    assert bool(answer.message.tool_calls) == (choice == "required")
