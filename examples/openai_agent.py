"""An agent with the unmodified ``openai`` package: the model decides what to call, and nothing forces it.

    baton up --model models/baton-tiny-tools &
    python examples/openai_agent.py --url http://127.0.0.1:8000/v1

Prints a line of JSON per step: what was asked, what the model called, what it made of the answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI

QUESTIONS = ("Will it rain in Bonaro?", "What is 17 plus 25?", "Use lookup with key Taborin.", "Good morning")


def get_weather(city: str) -> str:
    """Return the weather, as a service would."""
    return "rain" if "o" in city else "sun"


def add(a: int, b: int) -> str:
    """Return a sum."""
    return str(a + b)


def lookup(key: str) -> str:
    """Return what is kept under a key."""
    return key[::-1].lower()


def tool(function: Callable[..., str], **kinds: str) -> dict[str, Any]:
    """Return a function as a request's ``tools`` have it; ``kinds``: its parameters' types."""
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    parameters = {**schema, "required": list(kinds)}
    named = {"name": function.__name__, "description": (function.__doc__ or ""), "parameters": parameters}
    return {"type": "function", "function": named}


FUNCTIONS: dict[str, Callable[..., str]] = {each.__name__: each for each in (get_weather, add, lookup)}
TOOLS: list[Any] = [
    tool(get_weather, city="string"),
    tool(add, a="integer", b="integer"),
    tool(lookup, key="string"),
]


def answer(client: OpenAI, model: str, question: str) -> dict[str, Any]:
    """Ask, do what is called, and go on until the model has no more calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    called: list[list[str]] = []
    for _ in range(3):
        fields: dict[str, Any] = {"model": model, "messages": messages, "tools": TOOLS, "tool_choice": "auto"}
        message = client.chat.completions.create(**fields, temperature=0, max_tokens=96).choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            called.append([call.function.name, call.function.arguments])
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"asked": question, "called": called, "said": message.content}


def main() -> None:
    """Ask all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args()
    with OpenAI(base_url=given.url, api_key=given.api_key, max_retries=0) as client:
        model = client.models.list().data[0].id
        for question in QUESTIONS:
            print(json.dumps(answer(client, model, question)))


if __name__ == "__main__":
    main()
