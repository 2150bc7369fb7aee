"""The tokenizer and the chat template give what transformers gives, without loading it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidRequestError
from baton.tokenizer import ChatTemplate, TextModel, TextModelCache, Tokenizer

TINY = Path(__file__).parents[3] / "models" / "baton-tiny"
CHAT = [
    {"role": "system", "content": "Be  brief. "},
    {"role": "user", "content": "Write <b>code</b> & a 'poem'\n"},
    {"role": "assistant", "content": "def f():"},
]


@pytest.fixture(scope="module")
def tiny() -> TextModel:
    return TextModel.load(TINY)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(TINY)


def write(directory: Path, name: str, value: object) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("text", ["", "def f(x):\n  return x", "héllo 你好 👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>"])
def test_encode_equals_transformers(tiny: TextModel, reference: Any, text: str) -> None:
    for special in (True, False):
        assert tiny.tokenizer.encode(text, special) == reference.encode(text, add_special_tokens=special)


@given(ids=st.lists(st.integers(0, 4095), max_size=40), skip=st.booleans())
@settings(max_examples=50, deadline=None)
def test_decode_equals_transformers(tiny: TextModel, reference: Any, ids: list[int], skip: bool) -> None:
    assert tiny.tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_special_tokens_and_ends(tiny: TextModel, reference: Any) -> None:
    tokenizer = tiny.tokenizer
    assert tokenizer.eos_token_ids == {2, 4}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 4, 0)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_ids == set(reference.all_special_ids)
    assert tokenizer.token_text(4) == "<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_chat_equals_transformers(tiny: TextModel, reference: Any, generation: bool, count: int) -> None:
    assert tiny.chat_template is not None
    ours = tiny.chat_template.render(CHAT[:count], add_generation_prompt=generation)
    theirs = reference.apply_chat_template(CHAT[:count], tokenize=False, add_generation_prompt=generation)
    assert ours == theirs
    ids = reference.apply_chat_template(CHAT[:count], add_generation_prompt=generation, return_dict=False)
    assert tiny.tokenizer.encode(ours, add_special_tokens=False) == ids


def test_continue_final_message_equals_transformers(tiny: TextModel, reference: Any) -> None:
    assert tiny.chat_template is not None
    ours = tiny.chat_template.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    theirs = reference.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert ours == theirs
    assert ours.endswith("def f():")


TRICKY = """
{%- generation %}G{% endgeneration -%}
{%- set ns = namespace(found=false) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if loop.index0 == 0 and message.role != 'user' %}{{ raise_exception('user must be <first>') }}{% endif %}
{{ message | tojson }}|{{ message.content | tojson(indent=2) }}
    {%- if message.content == 'last' %}{% break %}{% endif %}
{% endfor %}
{{ eos_token }}{{ custom }}{{ strftime_now('%Y') | length }}{% if tools is not none %}tools{% endif %}
"""


def test_helpers_equal_transformers(reference: Any) -> None:
    template = ChatTemplate(TRICKY, {"eos_token": "<|im_end|>"})
    messages = [
        {"role": "user", "content": "<é> & \"q\" 'x'"},
        {"role": "skip", "content": "no"},
        {"role": "user", "content": "last"},
        {"role": "user", "content": "never"},
    ]
    ours = template.render(messages, variables={"custom": "C"})
    theirs = reference.apply_chat_template(
        messages, chat_template=TRICKY, tokenize=False, add_generation_prompt=True, custom="C"
    )
    assert ours == theirs
    assert "never" not in ours
    assert {"custom", "messages"} <= template.variables
    assert "other" not in template.variables


@pytest.mark.parametrize(
    ("messages", "variables", "field", "words"),
    [
        ([{"role": "system", "content": "x"}], {}, "messages", "user must be <first>"),
        ([], {}, "messages", "empty"),
        ([{"role": "user", "content": "x"}], {"messages": []}, "chat_template_kwargs.messages", "messages"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            {},
            "messages[0].content[1]",
            "text parts",
        ),
    ],
)
def test_template_errors_name_the_field(
    messages: list[dict[str, Any]], variables: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        ChatTemplate(TRICKY).render(messages, variables=variables)
    assert caught.value.field == field


def test_template_cannot_leave_the_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages.append(1) }}").render([{"role": "user", "content": "x"}])


def test_template_fails_like_python_with_a_clear_error() -> None:
    with pytest.raises(InvalidRequestError, match="cannot render") as caught:
        ChatTemplate("{{ 1 + messages[0].content }}").render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    messages = [{"role": "user", "content": "x"}]
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(messages) == "D"
    write(tmp_path, "chat_template.jinja", "J{{ bos_token }}")
    loaded = ChatTemplate.load(tmp_path, {"bos_token": "<s>"})
    assert loaded is not None
    assert loaded.render(messages) == "J<s>"
    write(tmp_path, "chat_template.jinja", "{% if %}")
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate.load(tmp_path)


def test_broken_or_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="save_pretrained"):
        Tokenizer.load(tmp_path)
    write(tmp_path, "tokenizer.json", "{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    write(tmp_path, "tokenizer_config.json", "[1]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    assert Tokenizer.load(tmp_path).eos_token_ids == {4}


def test_a_model_may_lie_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    shutil.copy(TINY / "tokenizer.json", tmp_path / "model")
    assert Tokenizer.load("~/model").encode("hello")


def test_hub_name_offline_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no-such-org/no-such-model") as caught:
        Tokenizer.load("no-such-org/no-such-model")
    assert caught.value.field == "model"


async def test_clients_that_leave_while_a_model_is_loaded_start_no_second_load(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, load = [], threading.Event(), TextModel.load

    def slowly(path: str) -> TextModel:
        begun.append(path)
        assert go_on.wait(240)
        return load(path)

    monkeypatch.setattr(TextModel, "load", slowly)
    cache = TextModelCache(str(TINY))
    for _ in range(3):
        waiting = asyncio.create_task(cache.get("m"))
        while not begun:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    go_on.set()
    assert isinstance(await cache.get("m"), TextModel)
    assert begun == [str(TINY)]


async def test_cache_loads_once_and_is_bounded() -> None:
    cache = TextModelCache(str(TINY))
    first = await cache.get("/somewhere/else")
    assert await cache.get("/anywhere") is first
    bounded = TextModelCache(capacity=1)
    one = await bounded.get(str(TINY))
    await bounded.get(str(TINY) + "/")
    assert len(bounded._models) == 1
    assert await bounded.get(str(TINY)) is not one


def test_no_torch_no_transformers() -> None:
    code = (
        "import sys; from baton.tokenizer import TextModel; TextModel.load(sys.argv[1]).tokenizer.encode('x'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(TINY)], check=False, timeout=240).returncode == 0
