"""Tools against ``baton up``, with the unmodified openai and anthropic SDKs: the scripts of ``examples/``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tests.support.servers.up import Running

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Cologne", "Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
WEATHER: dict[str, Any] = PARAMETERS | {
    "properties": {**PARAMETERS["properties"], "days": {"type": "integer", "minimum": 1, "maximum": 7}}
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def example(name: str, url: str) -> dict[str, Any]:
    """Run an example; return what its steps printed."""
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name, "--url", url], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return {line.pop("step"): line for line in map(json.loads, ran.stdout.splitlines())}


def test_the_example_of_responses_runs(up: Running) -> None:
    steps = example("openai_responses.py", f"{up.url}/v1")
    assert list(steps) == ["call", "answer", "retrieved", "stream", "parsed"]
    for name in ("call", "stream"):
        jsonschema.validate(json.loads(steps[name]["arguments"]), WEATHER)
    assert steps["answer"]["status"] in ("completed", "incomplete")
    assert steps["retrieved"] == {"same": True}
    for kind in ("response.created", "response.function_call_arguments.delta", "response.completed"):
        assert kind in steps["stream"]["events"]
    assert steps["parsed"]["kind"] == "Forecast"


def test_the_example_of_messages_runs(up: Running) -> None:
    steps = example("anthropic_messages.py", up.url)
    assert list(steps) == ["call", "answer", "stream", "parsed"]
    for name in ("call", "stream"):
        jsonschema.validate(steps[name]["input"], WEATHER)
    assert (steps["call"]["name"], steps["call"]["stop"]) == ("get_weather", "tool_use")
    assert steps["answer"]["stop"] in ("end_turn", "max_tokens")
    assert 0 < steps["answer"]["prompt"] <= steps["answer"]["tokens"]  # which has the tools, if the template reads them
    assert steps["stream"]["same"]
    assert steps["stream"]["pieces"] >= 1  # what comes before it is read comes in one
    assert steps["parsed"] == {"kind": "Forecast"}


def test_the_example_of_chats_runs(up: Running) -> None:
    steps = example("openai_tools.py", f"{up.url}/v1")
    assert list(steps) == ["required", "answer", "named", "stream", "strict", "auto"]
    for name in ("required", "stream"):
        ((called, arguments),) = steps[name]["calls"]
        assert called == "get_weather"
        jsonschema.validate(json.loads(arguments), PARAMETERS | {"properties": {"city": {"type": "string"}}})
        assert steps[name]["finish"] == "tool_calls"
    assert [(called, json.loads(arguments)) for called, arguments in steps["named"]["calls"]] == [("get_time", {})]
    assert steps["stream"]["deltas"] >= 1  # what comes before it is read comes in one
    assert steps["strict"] == {"parsed": "Reminder", "finish": "tool_calls"}
    assert steps["answer"]["finish"] in ("stop", "length")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_must_be_called_is_called_whatever_the_model_thinks(up: Running, temperature: float) -> None:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        for seed in range(5):
            fields: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": 128}
            messages: list[Any] = [{"role": "user", "content": f"Weather {seed}?"}]
            answer = client.chat.completions.create(
                model="baton-tiny", messages=messages, tools=TOOLS, tool_choice="required",
                parallel_tool_calls=False, **fields,
            )  # fmt: skip
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls or []
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
            with client.chat.completions.stream(
                model="baton-tiny", messages=messages, tools=TOOLS, tool_choice="required",
                parallel_tool_calls=False, **fields,
            ) as stream:  # fmt: skip
                final = stream.get_final_completion()
            (again,) = final.choices[0].message.tool_calls or []
            assert again.function.arguments == call.function.arguments  # the same seed
