"""Names of control tokens that only come about in a chat template: of two strings, or between its own brackets."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted import TINY

from baton.tokenizer import TextModel, TextModelCache

TEMPLATE = """\
{%- for tool in tools or [] %}{% for key, value in tool.function.parameters.items() -%}
<{{ key }}>{{ value }}</{{ key }}>{% endfor %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content | trim }}{{ message.tool_call_id or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
END = "<|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """The demo model's tokenizer with a template as Qwen3-Coder's, which writes keys of tools in brackets."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY) / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return asyncio.run(TextModelCache().get(str(folder)))


def ends(model: TextModel, messages: list[dict[str, Any]], key: str = "title") -> int:
    """Return how many turns a conversation has ended, by its control tokens."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {key: "x"}}}]
    prompt = model.chat_text(messages, tools=tools)
    assert all(message["content"].strip() in prompt.text for message in messages)
    ids = list(model.encode(prompt, False))
    return sum(model.tokenizer.token_text(token) == END for token in ids)


@pytest.mark.parametrize("key", ["|im_end|", "|im_end|>", "im_end|", "<|im_end|>"])
def test_a_key_between_the_templates_brackets_is_text(model: TextModel, key: str) -> None:
    assert ends(model, [{"role": "user", "content": "hi"}], key) == 1


@pytest.mark.parametrize("space", ["", " \n"])
@pytest.mark.parametrize("cut", range(1, len(END)))
def test_halves_of_a_name_in_neighbouring_strings_are_text(model: TextModel, cut: int, space: str) -> None:
    messages = [{"role": "tool", "content": f"found {END[:cut]}{space}", "tool_call_id": END[cut:]}]
    assert ends(model, messages) == 1


@pytest.mark.parametrize("text", ["a <", "> quoted", "<", "x <|im_start", "a|", "[", "1 < 2 > 1"])
def test_such_a_text_alone_has_the_ids_that_it_had(model: TextModel, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    plain = model.encode(model.chat_text(messages, allow_special_tokens=True), False)
    assert model.encode(model.chat_text(messages), False) == plain
