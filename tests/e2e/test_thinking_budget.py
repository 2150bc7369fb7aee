"""A budget of reasoning against ``baton up``: kept to through hand-over, whatever the model thinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.support.servers.up import Running, running_up

from baton.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
END = "</think>"
MESSAGES: list[Any] = [{"role": "user", "content": "Is it so?"}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture(scope="module")
def up(model: str) -> Iterator[Running]:
    # A dialect in which every answer begins with reasoning: the demo model would never end it.
    with running_up(
        *("--ratio", "1P1D", "--dtype", "float32", "--model", model),
        *("--router-args", "--reasoning-dialect deepseek_r1", "--decode-args", "--remote-prefill-threshold 1"),
    ) as running:
        yield running


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_reasoning_ends_and_the_answer_follows(up: Running, model: str, budget: int) -> None:
    tokenizer = Tokenizer.load(Path(model))
    extra: dict[str, Any] = {"thinking_token_budget": budget, "return_token_ids": True}
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        for temperature in (0.0, 1.5):
            fields: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_tokens": 80, "response_format": FORM}
            raw = client.chat.completions.with_raw_response.create(
                model="baton-tiny", messages=MESSAGES, extra_body=extra, **fields
            )
            assert raw.headers["x-baton-path"] == "remote"  # the prefill instance sampled the first token
            (choice,) = raw.parse().choices
            assert (choice.message.content, choice.finish_reason) in (('"yes"', "stop"), ('"no"', "stop"))
            ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
            text = tokenizer.decode(ids)
            assert text.count(END) == 1
            heads = [tokenizer.decode(ids[:at]) for at in range(1, len(ids) + 1)]
            used = sum(len(head) <= text.index(END) for head in heads)
            # A model that is never done with thinking has all of it; one token alone is none.
            assert used == (0 if budget == 1 else budget)
            stream = client.chat.completions.create(
                model="baton-tiny", messages=MESSAGES, extra_body=extra, stream=True, **fields
            )
            deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
            assert "".join(delta.content or "" for delta in deltas) == choice.message.content
            thoughts = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
            assert thoughts == (getattr(choice.message, "reasoning", None) or "")


def test_anthropics_budget_is_the_same(up: Running) -> None:
    with anthropic.Anthropic(base_url=up.url, api_key="none", max_retries=0, timeout=240) as client:
        message = client.messages.create(
            model="baton-tiny", messages=MESSAGES, max_tokens=64, extra_body={"temperature": 0},
            thinking={"type": "enabled", "budget_tokens": 9},
            output_config={"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}},
        )  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[-1].text in ('"yes"', '"no"')
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens <= 9


def test_without_a_budget_it_does_not_end(up: Running) -> None:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        answer = client.chat.completions.create(model="baton-tiny", messages=MESSAGES, temperature=0, max_tokens=60)
    (choice,) = answer.choices
    assert (choice.message.content or "", choice.finish_reason) == ("", "length")
