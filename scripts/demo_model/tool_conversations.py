"""Conversations with tools: made-up requests whose arguments stand in them, and the calls that they ask for."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from typing import Any

ONSETS, VOWELS, CODAS = tuple("bdfgklmnprstvz"), tuple("aeiou"), ("", "", "n", "r", "s")
RARE_ONSETS = ("c", "h", "j", "w", "ch", "sh", "br", "st", "tr")
RARE_VOWELS = ("ai", "ee", "ie", "ou", "y")
RARE_CODAS = ("l", "m", "x", "ck", "gne", "nd", "th")
RARE = 0.08
"""Share of the parts of words that are rare ones: real names have some."""
HELD_OUT_WORDS = 8
"""One in so many words is kept from training."""
MADE_UP = 0.25
"""Share of the conversations in which a tool is offered, or asked for, that nobody ever heard of."""
REFUSAL = "I cannot do that."
GREETINGS = {"Hello": "Hello!", "Good morning": "Good morning!", "Thank you": "You are welcome.", "Bye": "Bye!"}


@dataclass(frozen=True)
class Tool:
    """A tool, and how one asks for it.

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


class ConversationMaker:
    """Makes conversations up.

    Args:
        seed: Of all that it makes.
        held_out: Whether its words are those that are kept from training; else they are the others.
    """

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self.rng, self._held_out = random.Random(seed), held_out

    def word(self) -> str:
        """Make a word up."""
        while True:
            syllables = self.rng.randint(2, 3)
            parts = [self._syllable(last=at == syllables - 1) for at in range(syllables)]
            found = "".join(parts)
            if (zlib.crc32(found.encode()) % HELD_OUT_WORDS == 0) == self._held_out:
                return found

    def _syllable(self, *, last: bool) -> str:
        onset, vowel = self._part(ONSETS, RARE_ONSETS), self._part(VOWELS, RARE_VOWELS)
        return onset + vowel + (self._part(CODAS, RARE_CODAS) if last or self.rng.random() < 2 * RARE else "")

    def _part(self, usual: tuple[str, ...], rare: tuple[str, ...]) -> str:
        return self.rng.choice(rare if self.rng.random() < RARE else usual)

    def value(self, kind: str) -> str | int:
        """Make a value up for a parameter."""
        if kind == "number":
            return self.rng.randrange(1, 100) if self.rng.random() < 0.8 else self.rng.randrange(100, 1000)
        if kind == "words":
            return " ".join(self.word() for _ in range(self.rng.randint(1, 2)))
        return self.word().capitalize()

    def tool(self) -> Tool:
        """Make a tool up, whose request names it and its parameters."""
        name = "_".join(self.word() for _ in range(self.rng.randint(1, 2)))
        parameters = {self.word(): self.rng.choice(("name", "number")) for _ in range(self.rng.randint(1, 2))}
        asked = " and ".join(f"{parameter} {{{parameter}}}" for parameter in parameters)
        return Tool(name, parameters, (f"Use {name} with {asked}.", f"Call {name} with {asked}."))

    def request(self, tool: Tool) -> tuple[str, dict[str, str | int]]:
        """Make up what a user says, and the arguments of the call that it asks for."""
        arguments = {name: self.value(kind) for name, kind in tool.parameters.items()}
        return self.rng.choice(tool.requests).format(**arguments), arguments

    def exchange(self) -> Exchange:
        """Make up a conversation: mostly a request for a call, else its result, a greeting, or what no tool can do."""
        rng = self.rng
        offered = rng.sample(TOOLS, rng.randint(1, 3))
        if rng.random() < MADE_UP:
            offered[rng.randrange(len(offered))] = self.tool()
        definitions = [tool.definition() for tool in offered]
        kind = rng.random()
        if kind < 0.05:
            greeting, answer = rng.choice(list(GREETINGS.items()))
            return Exchange(definitions, [{"role": "user", "content": greeting}], answer)
        if kind < 0.12:
            text, _ = self.request(rng.choice([tool for tool in TOOLS if tool not in offered]))
            return Exchange(definitions, [{"role": "user", "content": text}], REFUSAL)
        tool = rng.choice(offered)
        text, arguments = self.request(tool)
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        if kind > 0.88:
            result = self.value(rng.choice(("words", "number", "name")))
            function = {"name": tool.name, "arguments": arguments}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            )
            messages.append({"role": "tool", "content": str(result)})
            return Exchange(definitions, messages, f"It says: {result}.")
        return Exchange(definitions, messages, call_text(tool.name, arguments), (tool.name, arguments))
