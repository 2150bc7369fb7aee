"""Anthropic's Messages with the unmodified ``anthropic`` package, against ``baton up``.

    baton up &
    python examples/anthropic_messages.py --url http://127.0.0.1:8000

Prints a line of JSON per step. The demo model knows no tools: what it calls, the grammar of the tools has it call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

from anthropic import Anthropic
from pydantic import BaseModel

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Tells the weather of the next days.",
        "input_schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Cologne", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
QUESTION: list[Any] = [{"role": "user", "content": "Will it rain in Cologne tomorrow?"}]


class Forecast(BaseModel):
    """What the weather will be."""

    weather: Literal["rain", "sun"]
    sure: bool


def show(step: str, **values: Any) -> None:
    """Print what a step brought."""
    print(json.dumps({"step": step, **values}))


def conversation(client: Anthropic, model: str) -> None:
    """Have the model call a tool, answer the call, and have it go on."""
    fields: dict[str, Any] = {"model": model, "system": "You are a forecaster.", "tools": TOOLS}
    first = client.messages.create(
        **fields, messages=QUESTION, max_tokens=96,
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    )  # fmt: skip
    (call,) = (block for block in first.content if block.type == "tool_use")
    show("call", name=call.name, input=call.input, stop=first.stop_reason)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": f"rain for {call.input['days']} days"}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    tokens = client.messages.count_tokens(**fields, messages=messages).input_tokens
    second = client.messages.create(**fields, messages=messages, max_tokens=24, tool_choice={"type": "none"})
    usage = second.usage
    prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    show(
        "answer", blocks=[block.type for block in second.content], stop=second.stop_reason, tokens=tokens, prompt=prompt
    )


def streamed(client: Anthropic, model: str) -> None:
    """Watch a call being written."""
    pieces: list[str] = []
    with client.messages.stream(
        model=model, messages=QUESTION, tools=TOOLS[:1], max_tokens=96,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:  # fmt: skip
        for event in stream:
            if event.type == "input_json":
                pieces.append(event.partial_json)
        final = stream.get_final_message()
    (call,) = (block for block in final.content if block.type == "tool_use")
    show("stream", pieces=len(pieces), input=call.input, same=json.loads("".join(pieces)) == call.input)


def parsed(client: Anthropic, model: str) -> None:
    """Have the answer as an object of a class."""
    answer = client.messages.parse(model=model, messages=QUESTION, max_tokens=64, output_format=Forecast)
    show("parsed", kind=type(answer.parsed_output).__name__)


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="baton-tiny")
    args = parser.parse_args()
    with Anthropic(base_url=args.url, api_key="none", max_retries=0) as client:
        conversation(client, args.model)
        streamed(client, args.model)
        parsed(client, args.model)


if __name__ == "__main__":
    main()
