"""Keeps the text of messages from becoming control tokens, such as the ``<|im_end|>`` that ends a turn.

Control tokens are the *special* added tokens of a tokenizer, and those others that the chat template writes out
(DeepSeek's ``<|User|>``, Qwen's ``<tool_call>``). The latter stay tokens in messages of the assistant, where clients
give back what the model said, such as its ``<think>``.

A chat template makes one text of its own markers and of the messages'. So names of control tokens in messages are
replaced by random digits before it runs, and so are parts of names at the ends of strings: these would become names
beside other strings, or between brackets of the template (``<`` and ``>`` around a tool's key that is ``|im_end|``).
In its result, the names that are left are the template's: they get private names, and the messages' own come back. A
second tokenizer over the same model, which knows control tokens by their private names alone, makes ids of that text.
So all of a text around a name is tokenized as if the name were any word, as transformers does it with
``split_special_tokens``. Texts without such names never come here.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from baton.errors import InvalidRequestError
from baton.token_ids import TokenIds

_MARKER = re.compile(r"[^\w\s].+[^\w\s]")
"""What an added token looks like that is a marker rather than a word or a run of spaces."""
_ODD = re.compile(r"[^\w\s]")
_ASSISTANT = frozenset({"assistant", "model"})
_INDEX_DIGITS = 8


class _Finder:
    """Finds any of some names in texts."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(names, key=len, reverse=True)  # the longest wins, as in tokenizers
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._beginnings = sorted({name[:2] for name in ordered})
        self._first, self._last = ({name[at] for name in ordered} for at in (0, -1))
        self._heads = {part for name in ordered for end in range(1, len(name)) if _is_odd(part := name[:end])}
        self._tails = {part for name in ordered for begin in range(1, len(name)) if _is_odd(part := name[begin:])}
        self._longest = max(map(len, ordered), default=0)
        self._ordered = ordered

    def finds(self, text: str) -> bool:
        """Whether a name is in a text."""
        # Nearly no text has even the beginning of a name, and to look for that is several times as fast.
        return (
            self._pattern is not None
            and any(beginning in text for beginning in self._beginnings)
            and self._pattern.search(text) is not None
        )

    def touches(self, text: str) -> bool:
        """Whether a name is in a text, or a part of one at its ends."""
        core = text.strip()  # as templates do
        return self.finds(text) or (self._pattern is not None and self.ends(core) != (0, len(core)))

    def ends(self, text: str) -> tuple[int, int]:
        """Return where, in a text, what is no part of a name at its beginning begins, and at its end ends."""
        begin = 0
        end = len(text)
        if end < self._longest and _is_odd(text) and any(text in name for name in self._ordered):
            return end, end
        head = text[: self._longest - 1]
        tail = text[1 - self._longest :] if self._longest > 1 else ""
        if any(char in tail for char in self._first):
            end -= next((size for size in range(len(tail), 0, -1) if tail[-size:] in self._heads), 0)
        if any(char in head for char in self._last):
            begin = next((size for size in range(len(head), 0, -1) if head[:size] in self._tails), 0)
        return (begin, end) if begin <= end else (len(text), len(text))

    def hide(self, text: str, hidden: Hidden) -> str:
        """Return a text without names and without parts of names at its ends."""
        if self._pattern is None:
            return text
        core = text.strip()
        before = text[: len(text) - len(text.lstrip())]
        behind = text[len(text.rstrip()) :] if core else ""
        begin, end = self.ends(core)
        middle = self._pattern.sub(lambda match: hidden.hide(match[0]), core[begin:end])
        return before + hidden.hide(core[:begin]) + middle + hidden.hide(core[end:]) + behind

    def replace(self, text: str, names: Mapping[str, str]) -> str:
        """Return a text with other names."""
        return text if self._pattern is None else self._pattern.sub(lambda match: names[match[0]], text)


class Hidden:
    """What was hidden in one conversation: digits that stand in no text but by intent stand for it."""

    def __init__(self) -> None:
        self._mark = str(10**29 + secrets.randbelow(9 * 10**29))
        self._texts: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """Return what stands for a text; for an empty one nothing."""
        if not text:
            return ""
        return self._texts.setdefault(text, f"{self._mark}{len(self._texts):0{_INDEX_DIGITS}}")

    def show(self, text: str) -> str:
        """Return a text with all that was hidden."""
        texts = list(self._texts)
        return re.sub(f"{self._mark}([0-9]{{{_INDEX_DIGITS}}})", lambda match: texts[int(match[1])], text)


class ControlTokens:
    """The control tokens of a tokenizer and a chat template. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str = "") -> None:
        """Look for them.

        Args:
            backend: The tokenizer.
            template: Source of the chat template.
        """
        self._backend = backend
        added = backend.get_added_tokens_decoder().items()
        special = [token.content for _, token in added if token.special]
        written = [
            token.content
            for _, token in added
            if not token.special and _MARKER.fullmatch(token.content) and token.content in template
        ]
        self._names = [name for name in (*special, *written) if name]
        self._any = _Finder(self._names)
        self._special = _Finder(filter(None, special))
        # Such as fullwidth letters under NFKC: what becomes a name is not looked for, all texts count as having one.
        self._in_all = _rewrites(backend.normalizer) and any(
            token.normalized for _, token in added if token.content in self._names
        )

    def finds(self, text: str) -> bool:
        """Whether the name of a control token is in a text, as far as that can be seen."""
        return self._in_all or self._any.finds(text)

    def in_conversation(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> bool:
        """Whether the name of a control token, or a part at the ends, is in any string of messages and variables."""
        searches = [(self._finder(part), text) for part in (*messages, variables) for text in _strings(part)]
        if self._in_all or any(finder.finds(text) for finder, text in searches):
            return True
        return any(finder.touches(text) for finder, text in searches) and self._literal.exact

    def _finder(self, part: Mapping[str, Any]) -> _Finder:
        role = part.get("role")
        return self._special if isinstance(role, str) and role in _ASSISTANT else self._any

    def hide(self, value: Any, hidden: Hidden) -> Any:
        """Return a message or variables without names; see :meth:`private`."""
        try:
            return _replace(value, self._finder(value), hidden)
        except RecursionError as error:
            raise InvalidRequestError("a message is nested too deeply", field="messages") from error

    def private(self, rendered: str, hidden: Hidden) -> tuple[str, str]:
        """Take a rendered conversation apart from the names that were hidden in it.

        Returns:
            The text with all names, and the text where only hidden names are spelt and others are private ones.
        """
        private = self._any.replace(rendered, dict(zip(self._names, self._literal.private, strict=True)))
        return hidden.show(rendered), hidden.show(private)

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        """Return the ids of a text in which only private names are control tokens.

        Raises:
            InvalidRequestError: The tokenizer cannot do that, or the text has a lone surrogate.
        """
        return self._literal.encode(text, add_special_tokens)

    @functools.cached_property
    def _literal(self) -> _LiteralTokenizer:
        return _LiteralTokenizer(self._backend, self._names)


class _LiteralTokenizer:
    """A tokenizer over the same model that knows some of the added tokens by private names.

    Attributes:
        private: The names, parallel to those it was made for. A few characters for private use each, which no client
            can guess.
        works: Whether it can be used: the vocabulary has no holes.
        exact: Whether it makes what the backend makes of a text without names, also of characters that are unknown.
    """

    def __init__(self, backend: tokenizers.Tokenizer, names: Sequence[str]) -> None:
        self.private = [_private_name() for _ in names]
        private = dict(zip(names, self.private, strict=True))
        self._tokenizer = tokenizers.Tokenizer(backend.model)  # shares the vocabulary
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(backend, part) is not None:
                setattr(self._tokenizer, part, getattr(backend, part))
        self._ids: dict[int, int] = {}
        """From ids of added tokens, where they differ from the model's."""
        self._spelt: dict[int, str] = {}
        """Control tokens that are words of the model as well."""
        self.works = True
        for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
            name = private.get(token.content)
            own = token.content in private
            added = tokenizers.AddedToken(
                name or token.content,
                single_word=token.single_word and not own,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and not own,
                special=token.special or own,
            )
            (self._tokenizer.add_special_tokens if added.special else self._tokenizer.add_tokens)([added])
            here = self._tokenizer.token_to_id(added.content)
            if here is None:  # without content: such a token is never added
                continue
            word = backend.model.id_to_token(here)
            self.works = self.works and word in (None, added.content)  # else: a vocabulary with holes in it
            if here != token_id:
                self._ids[here] = token_id
            if own and backend.model.id_to_token(token_id) is not None:
                self._spelt[token_id] = token.content

        # Where characters may be unknown, the id for that may be one that is spelt out.
        self.exact = self.works and (not self._spelt or getattr(backend.model, "unk_token", "") is None)

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        if not self.works:
            message = "this model's tokenizer cannot take the name of a control token as text"
            raise InvalidRequestError(message, field="prompt")
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            message = "the text has a lone surrogate, which is no character"
            raise InvalidRequestError(message, field="prompt") from error
        ids = encoding.ids
        if self._spelt and not self._spelt.keys().isdisjoint(ids):
            # The model itself made control tokens of words, as Unigram does; those that were added are marked.
            mask = encoding.special_tokens_mask
            ids = [part for at, token_id in enumerate(ids) for part in (self._parts(token_id, bool(mask[at])))]
        return array("I", [self._ids.get(token_id, token_id) for token_id in ids])

    def _parts(self, token_id: int, added: bool) -> list[int]:
        name = None if added else self._spelt.get(token_id)
        if name is None:
            return [token_id]
        return [part for char in name for part in self._tokenizer.encode(char, add_special_tokens=False).ids]


def _rewrites(normalizer: Any) -> bool:
    if normalizer is None:
        return False
    state = json.loads(normalizer.__getstate__())
    steps = state["normalizers"] if state["type"] == "Sequence" else [state]
    return any(step["type"] not in ("Prepend", "Replace") for step in steps)


def _is_odd(part: str) -> bool:
    """Whether a part of a name is more than words and space: templates compare words with their own, and trim space."""
    return _ODD.search(part) is not None


def _private_name() -> str:
    return "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(6))


def _strings(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)


def _replace(value: Any, finder: _Finder, hidden: Hidden) -> Any:
    if isinstance(value, str):
        return finder.hide(value, hidden) if finder.touches(value) else value
    if isinstance(value, Mapping):
        return {_replace(key, finder, hidden): _replace(item, finder, hidden) for key, item in value.items()}
    return [_replace(item, finder, hidden) for item in value] if isinstance(value, list | tuple) else value
