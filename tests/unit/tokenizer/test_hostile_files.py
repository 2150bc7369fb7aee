"""Files of a model that were made to do harm: an error that names the file, and no traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from baton.cli.model_check import check_engine
from baton.config import EngineConfig
from baton.engine.models.loader import load_model
from baton.errors import ConfigError, InvalidRequestError
from baton.tokenizer import Tokenizer
from baton.tokenizer.chat_template import ChatTemplate
from baton.tokenizer.model_files import read_json
from baton.tokenizer.weight_files import read_header, weight_files

MODEL = Path("models/baton-tiny")
DEEP = b"[" * 200_000


def test_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(DEEP)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ({"text_config": {"vocab_size": 10**12}}, "vocab_size must be at most"),
        ({"sliding_window": -1}, "sliding_window must be at least 0"),
        ({"model_type": ["llama"]}, "model_type must be a string"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be a number"),
    ],
)
def test_a_configuration(tmp_path: Path, changes: dict[str, object], field: str) -> None:
    shutil.copytree(MODEL, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    config = EngineConfig(model=str(tmp_path / "m"), device="cpu", dtype="float32")
    for check in (check_engine, load_model):
        with pytest.raises(ConfigError, match=rf"config\.json: {field}"):
            check(config)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path, name: str) -> None:
    shutil.copytree(MODEL, tmp_path / "m")
    file = tmp_path / "m" / name
    config = EngineConfig(model=str(tmp_path / "m"), device="cpu", dtype="float32")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        make(file)
        for check in (check_engine, load_model, lambda config: Tokenizer.load(config.model)):
            with pytest.raises(ConfigError, match=rf"m/{re.escape(name)}.* no regular file") as caught:
                check(config)
            assert caught.value.field == "model"


@pytest.mark.parametrize("value", [{"a": 1}, "x", [1, "2"], [[1]], 1.5, True])
def test_the_ends_of_texts(tmp_path: Path, value: object) -> None:
    shutil.copytree(MODEL, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    config = EngineConfig(model=str(tmp_path / "m"), device="cpu", dtype="float32")
    for check in (check_engine, load_model):
        with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be a number"):
            check(config)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "../x"])
def test_names_of_weight_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=r"lacks the weight file .* of weight_map in model") as caught:
        weight_files(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_rule_that_takes_too_many_steps(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": split}))
    tokenizer = Tokenizer.load(tmp_path / "m")
    for length in (60, 5000):
        with pytest.raises(InvalidRequestError, match="tokenizer fails on the text"):
            tokenizer.encode("a" * length + "!")
    assert tokenizer.encode("b")


def test_the_header_of_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    with pytest.raises(ConfigError, match=r"model\.safetensors: corrupt safetensors header"):
        read_header(file)


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% break %}"])
def test_chat_templates(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template is not valid"):
        ChatTemplate(source)


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set s = namespace(x='xxxx') %}{% for a in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "{% set s = namespace(x='xxxx') %}{% for a in range(40) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "{% set s = namespace(x=[1]) %}{% for a in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x|tojson }}",
    "{% set s = namespace(x=9) %}{% for a in range(90) %}{% set s.x = s.x * s.x %}{% endfor %}",
    "{{ 10 ** 9999999 }}",
    "{{ 'x' * 3000000000 }}",
    "{{ 'x'|center(3000000000) }}",
    "{{ 'x'.ljust(3000000000) }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ '{:3000000000d}'.format(1) }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "{{ ('y' * 1000000).join(['x'] * 1000000) }}",
    "{{ (['y' * 1000000] * 1000000)|join }}",
    "{{ ('\\n' * 1000000)|indent(1000000) }}",
    "{{ '{0}' * 100000 }}{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "{% set x %}{% for a in range(9999) %}{{ 'x' * 999999 }}{% endfor %}{% endset %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_chat_template_that_would_not_end_or_fills_the_memory(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template is not usable: it does more work"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_long_conversation_is_rendered() -> None:
    source = (
        "{% for m in messages %}{% for n in messages %}{% if loop.last %}{{ m.role ~ ': ' + m.content.split('x')[-1] }}"
        "{{ m.content|replace('y', 'z')|trim|tojson }}{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "y" * 20_000}] * 300
    assert len(ChatTemplate(source).render(messages)) == 300 * (6 + 20_000 + 20_002)


def test_a_list_of_chat_templates(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": [{"name": [1]}, {"name": "default", "template": "x"}]}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.source == "x"


@pytest.mark.parametrize("source", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 1 / 0 }}"])
def test_what_a_chat_template_does(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template cannot render the messages"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
