"""Conversations with tools: made-up requests whose arguments stand in them, and the calls that they ask for."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

VOWELS, ONSETS, CODAS = (
    "aeiou",
    ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"),
    ("", "n", "r", "s"),
)
REFUSAL = "I cannot do that."
GREETINGS = {"Hello": "Hello!", "Good morning": "Good morning!", "Thank you": "You are welcome.", "Bye": "Bye!"}


@dataclass(frozen=True)
class Tool:
    """A tool that the model knows.

    Attributes:
        name: Its name.
        parameters: Its parameters and what their values are: ``name``, ``words`` or ``number``.
        requests: Ways to ask for it; each holds every parameter once.
    """

    name: str
    parameters: dict[str, str]
    requests: tuple[str, ...]

    def definition(self) -> dict[str, Any]:
        """Return it as a request's ``tools`` have it."""
        types = {"name": "string", "words": "string", "number": "integer"}
        properties = {name: {"type": types[kind]} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}


TOOLS = (
    Tool("get_weather", {"city": "name"}, ("What is the weather in {city}?", "Will it rain in {city}?")),
    Tool("get_time", {"city": "name"}, ("What time is it in {city}?", "Tell me the time in {city}.")),
    Tool(
        "send_mail",
        {"to": "name", "subject": "words"},
        ("Write to {to} about {subject}.", "Mail {to} about {subject}."),
    ),
    Tool("set_timer", {"minutes": "number"}, ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.")),
    Tool("add", {"a": "number", "b": "number"}, ("What is {a} plus {b}?", "Add {a} and {b}.")),
    Tool(
        "play_song", {"title": "words", "artist": "name"}, ("Play {title} by {artist}.", "I want {title} by {artist}.")
    ),
    Tool("book_table", {"name": "name", "people": "number"}, ("Book a table for {people} as {name}.",)),
    Tool("find_person", {"name": "name"}, ("Who is {name}?", "Find {name}.")),
    Tool("create_note", {"text": "words"}, ("Note {text}.", "Remember {text}.")),
    Tool("find_route", {"start": "name", "end": "name"}, ("How do I get from {start} to {end}?",)),
)


def word(rng: random.Random) -> str:
    """Make a word up; it is hardly ever one that was made before."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randint(2, 3)))


def value(rng: random.Random, kind: str) -> str | int:
    """Make a value up for a parameter."""
    if kind == "number":
        return rng.randrange(1, 1000)
    if kind == "words":
        return " ".join(word(rng) for _ in range(rng.randint(1, 2)))
    return word(rng).capitalize()


def request(rng: random.Random, tool: Tool) -> tuple[str, dict[str, str | int]]:
    """Make up what a user says, and the arguments of the call that it asks for."""
    arguments = {name: value(rng, kind) for name, kind in tool.parameters.items()}
    return rng.choice(tool.requests).format(**arguments), arguments


def call_text(name: str, arguments: dict[str, str | int]) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Exchange:
    """A conversation, and what the model is to answer.

    Attributes:
        tools: Those that are offered.
        messages: The conversation up to the answer.
        answer: The answer's text.
        call: Name and arguments of the call that the answer makes; ``None``: it makes none.
    """

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    answer: str
    call: tuple[str, dict[str, str | int]] | None = None


def exchange(rng: random.Random) -> Exchange:
    """Make up a conversation: mostly a request for a call, else its result, a greeting, or what no tool can do."""
    offered = rng.sample(TOOLS, rng.randint(1, 3))
    definitions = [tool.definition() for tool in offered]
    kind = rng.random()
    if kind < 0.05:
        greeting, answer = rng.choice(list(GREETINGS.items()))
        return Exchange(definitions, [{"role": "user", "content": greeting}], answer)
    if kind < 0.12:
        text, _ = request(rng, rng.choice([tool for tool in TOOLS if tool not in offered]))
        return Exchange(definitions, [{"role": "user", "content": text}], REFUSAL)
    tool = rng.choice(offered)
    text, arguments = request(rng, tool)
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if kind > 0.85:
        result = value(rng, rng.choice(("words", "number", "name")))
        function = {"name": tool.name, "arguments": arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": str(result)})
        return Exchange(definitions, messages, f"It says: {result}.")
    return Exchange(definitions, messages, call_text(tool.name, arguments), (tool.name, arguments))
