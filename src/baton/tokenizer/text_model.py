"""A model's text side as one thing, and a cache of it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from baton.tokenizer.chat_template import ChatTemplate
from baton.tokenizer.model_files import model_directory
from baton.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """Tokenizer and chat template of one model.

    Attributes:
        tokenizer: Its tokenizer.
        chat_template: Its chat template, ``None`` for a model that has none.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None

    @classmethod
    def load(cls, path: str | Path) -> TextModel:
        """Load from a model's directory or hub name.

        Raises:
            ConfigError: No such model, or a file of it that cannot be read.
        """
        directory = model_directory(path)
        tokenizer = Tokenizer.load(directory)
        return cls(tokenizer, ChatTemplate.load(directory, tokenizer.special_tokens))


class TextModelCache:
    """Loads text models once, off the event loop. For one event loop."""

    def __init__(self, override: str = "", *, capacity: int = 4) -> None:
        """Begin empty.

        Args:
            override: Load from here, whatever path is asked for: for a router that sees the model's files elsewhere.
            capacity: Models kept; the one not used for longest goes first.
        """
        self._override = override
        self._capacity = capacity
        self._models: OrderedDict[str, TextModel] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, path: str) -> TextModel:
        """Return the text model of a path.

        Raises:
            ConfigError: It cannot be loaded; the next call tries again.
        """
        found = self.loaded(path)
        if found is not None:
            return found
        key = self._override or path
        async with self._lock:
            if key not in self._models:
                self._models[key] = await asyncio.to_thread(TextModel.load, key)
                while len(self._models) > self._capacity:
                    self._models.popitem(last=False)
            return self._models[key]

    def loaded(self, path: str) -> TextModel | None:
        """Return the text model of a path if it is loaded already."""
        key = self._override or path
        found = self._models.get(key)
        if found is not None and len(self._models) > 1:
            self._models.move_to_end(key)
        return found

    @property
    def num_slow(self) -> int:
        """Loaded tokenizers that run on the ``tokenizers`` library because ``fastokens`` cannot do it."""
        return sum(model.tokenizer.encoder == "tokenizers" for model in self._models.values())
