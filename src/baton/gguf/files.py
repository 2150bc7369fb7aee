"""A GGUF file as a model's folder: the files ``config.json``, ``tokenizer.json`` and so on, made from its metadata."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.gguf.architecture import model_config
from baton.gguf.container import GgufFile, read_gguf, shown
from baton.gguf.text import GgufText

_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class GgufModel:
    """One file's metadata, read once, and the files of a model's folder that are made from it.

    Attributes:
        file: The file's metadata and table of tensors.
    """

    def __init__(self, path: Path) -> None:
        self.file: GgufFile = read_gguf(path)
        self._contents: dict[str, bytes | None] = {}

    def read(self, name: str) -> bytes | None:
        """Return the content of the file ``name``; ``None``: the model's folder has no such file.

        Raises:
            ConfigError: The file cannot be made from the metadata; names the GGUF file and the key.
        """
        if name not in self._contents:
            make = _MAKERS.get(name)
            self._contents[name] = None if make is None else make(self)
        return self._contents[name]

    @functools.cached_property
    def _text(self) -> GgufText | None:
        """The tokenizer and chat template; ``None``: the file has no tokenizer."""
        return GgufText(self.file) if "tokenizer.ggml.model" in self.file.metadata else None

    def _config(self) -> bytes:
        return _json({**model_config(self.file), **self._special_ids()})

    def _generation_config(self) -> bytes | None:
        special_ids = self._special_ids()
        return _json(special_ids) if special_ids else None

    def _special_ids(self) -> dict[str, Any]:
        ends = [] if self._text is None else self._text.end_ids()
        return {"eos_token_id": ends} if ends else {}

    def _tokenizer(self) -> bytes | None:
        if self._text is None:
            return None
        try:
            return self._text.tokenizer().to_str().encode()
        except ConfigError:
            raise
        except Exception as error:  # the library raises plain Exception for anything wrong in a vocabulary
            reason = shown(str(error))
            raise ConfigError(f"{self.file.path}: its tokenizer cannot be built: {reason}", field="model") from error

    def _tokenizer_config(self) -> bytes | None:
        if self._text is None:
            return None
        named = {name: self._text.named_token(short) for name, short in _NAMES.items()}
        return _json({name: token for name, token in named.items() if token is not None})

    def _chat_template(self) -> bytes | None:
        template = None if self._text is None else self._text.chat_template
        return None if template is None else template.encode()


_MAKERS: Mapping[str, Callable[[GgufModel], bytes | None]] = {
    "config.json": GgufModel._config,
    "generation_config.json": GgufModel._generation_config,
    "tokenizer.json": GgufModel._tokenizer,
    "tokenizer_config.json": GgufModel._tokenizer_config,
    "chat_template.jinja": GgufModel._chat_template,
}


def open_gguf(path: Path) -> GgufModel:
    """Return a file's metadata, which is read again only when the file has changed.

    Raises:
        ConfigError: See :func:`~baton.gguf.container.read_gguf`.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", field="model") from error
    return _open(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=2)
def _open(path: Path, state: tuple[int, int, int]) -> GgufModel:
    return GgufModel(path)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
