"""OpenAI's Responses with the unmodified ``openai`` package, against ``baton up``.

    baton up &
    python examples/openai_responses.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step. The demo model knows no tools: what it calls, the grammar of the tools has it call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Tells the weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Cologne", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]


class Forecast(BaseModel):
    """What the weather will be."""

    weather: Literal["rain", "sun"]
    sure: bool


def show(step: str, **values: Any) -> None:
    """Print what a step brought."""
    print(json.dumps({"step": step, **values}))


def conversation(client: OpenAI, model: str) -> None:
    """Have the model call a tool, and go on from that response by its id."""
    first = client.responses.create(
        model=model, input="Will it rain in Cologne?", tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=96, temperature=0,
    )  # fmt: skip
    (call,) = (item for item in first.output if item.type == "function_call")
    show("call", name=call.name, arguments=call.arguments, status=first.status)
    days = json.loads(call.arguments)["days"]
    second = client.responses.create(
        model=model, previous_response_id=first.id, max_output_tokens=24, temperature=0,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": f"rain for {days} days"}],
    )  # fmt: skip
    cached = second.usage.input_tokens_details.cached_tokens if second.usage else 0
    show("answer", text=second.output_text, status=second.status, cached=cached)
    again = client.responses.retrieve(second.id)
    client.responses.delete(second.id)
    show("retrieved", same=again.output_text == second.output_text)


def streamed(client: OpenAI, model: str) -> None:
    """Watch a call being written."""
    kinds: list[str] = []
    with client.responses.stream(
        model=model, input="Will it rain in Oslo?", tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=96, temperature=0,
    ) as stream:  # fmt: skip
        for event in stream:
            if event.type not in kinds:
                kinds.append(event.type)
        final = stream.get_final_response()
    (call,) = (item for item in final.output if item.type == "function_call")
    show("stream", events=kinds, arguments=call.arguments)


def parsed(client: OpenAI, model: str) -> None:
    """Have the answer as an object of a class."""
    answer = client.responses.parse(
        model=model, instructions="You are a forecaster.", input="Will it rain?", text_format=Forecast,
        max_output_tokens=64, temperature=0, store=False,
    )  # fmt: skip
    show("parsed", kind=type(answer.output_parsed).__name__, value=answer.output_text)


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="baton-tiny")
    args = parser.parse_args()
    with OpenAI(base_url=args.url, api_key="none", max_retries=0) as client:
        conversation(client, args.model)
        streamed(client, args.model)
        parsed(client, args.model)


if __name__ == "__main__":
    main()
