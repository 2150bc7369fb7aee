"""Tools against ``baton up``, with the unmodified openai SDK: the script of ``examples/``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tests.e2e.test_up import Running, start, stop

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Cologne", "Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def up(model: str) -> Iterator[Running]:
    running = start("--ratio", "1P1D", "--dtype", "float32", "--model", model)
    try:
        if running.process.poll() is not None:
            pytest.fail("".join(running.lines))
        yield running
        stop(running)
    finally:
        running.process.kill()
        running.end()


def test_the_example_runs(up: Running) -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "openai_tools.py", "--url", f"{up.url}/v1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    steps = {line.pop("step"): line for line in map(json.loads, ran.stdout.splitlines())}
    assert list(steps) == ["required", "answer", "named", "stream", "strict", "auto"]
    for name in ("required", "stream"):
        ((called, arguments),) = steps[name]["calls"]
        assert called == "get_weather"
        jsonschema.validate(json.loads(arguments), PARAMETERS | {"properties": {"city": {"type": "string"}}})
        assert steps[name]["finish"] == "tool_calls"
    assert [(called, json.loads(arguments)) for called, arguments in steps["named"]["calls"]] == [("get_time", {})]
    assert steps["stream"]["deltas"] > 1
    assert steps["strict"] == {"parsed": "Reminder", "finish": "tool_calls"}
    assert steps["answer"]["finish"] in ("stop", "length")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_what_must_be_called_is_called_whatever_the_model_thinks(up: Running, temperature: float) -> None:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
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
