"""Tools and reasoning with the unmodified ``openai`` package, against ``baton up``.

    baton up &
    python examples/openai_tools.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step. The demo model knows no tools: what it calls, the grammar of the tools has it call.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
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
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "Will it rain in Cologne tomorrow?"}]


class Reminder(BaseModel):
    """A reminder."""

    hour: int
    repeat: bool


def get_weather(city: str, days: int) -> str:
    """Return the weather, as a service would."""
    return f"{city}: rain, then {days - 1} dry days"


def show(step: str, **values: Any) -> None:
    """Print what a step brought."""
    print(json.dumps({"step": step, **values}))


def calls_of(message: Any) -> list[list[str]]:
    """Return names and arguments of a message's calls."""
    return [[call.function.name, call.function.arguments] for call in message.tool_calls or []]


def conversation(client: OpenAI, model: str) -> None:
    """Have the model call a tool, answer the call, and have it go on."""
    first = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        tools=TOOLS[:1],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=96,
        temperature=0,
    )
    message = first.choices[0].message
    show("required", calls=calls_of(message), finish=first.choices[0].finish_reason)
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
    history = [*QUESTION, message, result]
    then = client.chat.completions.create(
        model=model, messages=history, tools=TOOLS, tool_choice="none", max_tokens=16, temperature=0
    )
    show("answer", content=then.choices[0].message.content, finish=then.choices[0].finish_reason)


def named(client: OpenAI, model: str) -> None:
    """Say which tool is to be called."""
    choice: Any = {"type": "function", "function": {"name": "get_time"}}
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=96,
        temperature=0,
    )
    show("named", calls=calls_of(answer.choices[0].message), finish=answer.choices[0].finish_reason)


def streamed(client: OpenAI, model: str) -> None:
    """Read a call while it is written."""
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        tools=TOOLS[:1],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=96,
        temperature=0,
        stream=True,
    )
    names, arguments, deltas, finish = [], "", 0, None
    for chunk in stream:
        (choice,) = chunk.choices
        for delta in choice.delta.tool_calls or []:
            if delta.function and delta.function.name:
                names.append(delta.function.name)
            if delta.function and delta.function.arguments:
                arguments += delta.function.arguments
                deltas += 1
        finish = choice.finish_reason or finish
    show("stream", calls=[[name, arguments] for name in names], deltas=deltas, finish=finish)


def strict(client: OpenAI, model: str) -> None:
    """Have a pydantic model filled in."""
    answer = client.chat.completions.parse(
        model=model,
        messages=QUESTION,
        tools=[pydantic_function_tool(Reminder)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=96,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    parsed = call.function.parsed_arguments
    show("strict", parsed=type(parsed).__name__, finish=answer.choices[0].finish_reason)


def auto(client: OpenAI, model: str) -> None:
    """Leave it to the model."""
    answer = client.chat.completions.create(model=model, messages=QUESTION, tools=TOOLS, max_tokens=16, temperature=0)
    show("auto", content=answer.choices[0].message.content, finish=answer.choices[0].finish_reason)


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args()
    with OpenAI(base_url=given.url, api_key=given.api_key, max_retries=0) as client:
        model = client.models.list().data[0].id
        for step in (conversation, named, streamed, strict, auto):
            step(client, model)


if __name__ == "__main__":
    main()
