"""The conversations that the model which calls tools is trained from say what Baton says of the same messages."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from scripts.demo_model.tool_conversations import TOOLS, Exchange, exchange
from scripts.demo_model.tool_training import CALL_TOKENS, ToolRows, make_tokenizer

from baton.dialects import CallArguments, CallStart, DialectParser
from baton.dialects.choice import choose_dialects

SEEDS = range(60)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(480, 0, conversations=400)


@pytest.fixture(scope="module")
def conversations() -> list[Exchange]:
    return [exchange(random.Random(seed)) for seed in SEEDS]


def test_every_argument_stands_in_the_request(conversations: list[Exchange]) -> None:
    schemas = {tool.name: tool.definition()["function"]["parameters"] for tool in TOOLS}
    calls = [(one, one.call) for one in conversations if one.call is not None]
    assert len(calls) > len(SEEDS) // 2
    for one, (name, arguments) in calls:
        assert name in {tool["function"]["name"] for tool in one.tools}
        jsonschema.validate(arguments, schemas[name])
        assert all(str(value) in one.messages[0]["content"] for value in arguments.values())


def test_answers_are_calls_in_a_dialect_that_is_found_by_the_template(
    conversations: list[Exchange], tokenizer: Any
) -> None:
    dialects = choose_dialects(chat_template=tokenizer.chat_template)
    assert dialects.tools is not None
    for one in conversations:
        parser = DialectParser(dialects.tools, None, schemas={})
        events = [*parser.feed(one.answer), *parser.finish()]
        names = [event.name for event in events if isinstance(event, CallStart)]
        arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert (names, json.loads(arguments or "null")) == (
            ([one.call[0]], one.call[1]) if one.call is not None else ([], None)
        )


def test_what_is_copied_has_the_same_tokens_wherever_it_stands(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for word in ("Cologne", "Taborin", "zu", "825"):
        assert ids(word) == ids(f" {word}?")[1:-1] == ids(f'"{word}"')[1:-1]
    for token in CALL_TOKENS:
        assert tokenizer.decode(ids(token), skip_special_tokens=True) == token
        assert len(ids(token)) == 1


def test_only_answers_count(conversations: list[Exchange], tokenizer: Any) -> None:
    inputs, targets = ToolRows(tokenizer, 3).batch(16)
    assert inputs.shape == targets.shape
    counted = targets >= 0
    assert (counted.sum(1) > 0).all()
    inner = counted[:, :-1] & counted[:, 1:]  # the last token of an answer is no input
    assert (inputs[:, 1:][inner] == targets[:, :-1][inner]).all()
