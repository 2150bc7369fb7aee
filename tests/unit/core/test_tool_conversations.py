"""The conversations that the model which calls tools is trained from say what Baton says of the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from scripts.demo_model.card import render_tool_card
from scripts.demo_model.induction import start_with_induction
from scripts.demo_model.tool_conversations import ConversationMaker, Exchange
from scripts.demo_model.tool_training import CALL_TOKENS, MAX_CONTEXT, SHAPE, ToolRows, make_tokenizer
from scripts.demo_model.training import build_model

from baton.dialects import CallArguments, CallStart, DialectParser
from baton.dialects.builtin import choose_dialects

SEEDS = range(60)
MODEL = Path(__file__).resolve().parents[3] / "models" / "baton-tiny-tools"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(480, 0, conversations=400)


@pytest.fixture(scope="module")
def conversations() -> list[Exchange]:
    return [ConversationMaker(seed).exchange() for seed in SEEDS]


def test_every_argument_stands_in_the_request(conversations: list[Exchange]) -> None:
    calls = [(one, one.call) for one in conversations if one.call is not None]
    assert len(calls) > len(SEEDS) // 2
    for one, (name, arguments) in calls:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in one.tools}
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


def test_the_model_begins_with_a_circuit_that_copies(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer, 3, SHAPE, MAX_CONTEXT)
    tokens = torch.stack([torch.randperm(400)[:20] + 60 for _ in range(16)])
    rows = torch.cat([torch.full((16, 1), tokenizer.bos_token_id), tokens, tokens], 1)
    with torch.no_grad():
        before, _ = copied(model, rows), start_with_induction(model)
        after = copied(model, rows)
    assert before < 0.05
    assert after > 0.5


def copied(model: Any, rows: torch.Tensor) -> float:
    """Return the share of tokens of the second half that the model says after what came before."""
    likeliest = model(input_ids=rows, use_cache=False).logits[:, 21:-1].argmax(-1)
    return float((likeliest == rows[:, 22:]).float().mean())


def test_the_model_that_comes_along_is_small_and_its_card_says_what_its_log_says() -> None:
    log = json.loads((MODEL / "training_log.json").read_text("utf-8"))
    assert (MODEL / "README.md").read_text("utf-8") == render_tool_card(log)
    assert log["results"]["calls_right"] >= 0.8 * log["results"]["calls_total"]
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 8 << 20


def test_words_that_are_held_out_are_in_no_training() -> None:
    trained, held_out = (
        {maker.word() for _ in range(2000)} for maker in (ConversationMaker(0), ConversationMaker(0, held_out=True))
    )
    assert trained
    assert held_out
    assert not trained & held_out


def test_only_answers_count(tokenizer: Any) -> None:
    rows = ToolRows(tokenizer, 3)
    for progress in (0.0, 0.5):  # mostly repeated tokens, mostly conversations
        inputs, targets = rows.batch(16, progress)
        assert inputs.shape == targets.shape
        counted = targets >= 0
        assert (counted.sum(1) > 0).all()
        inner = counted[:, :-1] & counted[:, 1:]  # the last token of an answer is no input
        assert (inputs[:, 1:][inner] == targets[:, :-1][inner]).all()
