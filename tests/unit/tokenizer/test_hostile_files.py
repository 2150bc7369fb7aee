"""Files of a model that are nested deeper than Python can read: an error that names the file, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.errors import ConfigError, InvalidRequestError
from baton.tokenizer.chat_template import ChatTemplate
from baton.tokenizer.model_files import read_json
from baton.tokenizer.weight_files import read_header

DEEP = b"[" * 200_000


def test_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(DEEP)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")


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
