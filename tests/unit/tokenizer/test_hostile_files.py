"""Files of a model that are nested deeper than Python can read: an error that names the file, and no traceback."""

from __future__ import annotations

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


@pytest.mark.parametrize("source", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'x' * 9999999999999999 }}"])
def test_what_a_chat_template_does(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template cannot render the messages"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
