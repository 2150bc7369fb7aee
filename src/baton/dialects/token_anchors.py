"""Anchors that are tokens: what a model spells in other tokens is text, so that it can quote a call without making one.

The parser reads text. Before each token that is an anchor, the text has :data:`MARK`, and so have the literals and
patterns of the dialects; the parser drops it from whatever it hands on.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.dialects.syntax import NamedCall, ReasoningDialect, Section, ToolDialect

MARK = "\ufdd0"
"""A code point that Unicode keeps for use within programs; in an answer's text U+FFFD stands for it."""


def marked_text(text: str, places: Sequence[int]) -> str:
    """Return a text with a mark at some places, in order."""
    text = text.replace(MARK, "\ufffd")
    if not places:
        return text
    return MARK.join(text[begin:end] for begin, end in itertools.pairwise((0, *places, len(text))))


def unmarked_text(text: str) -> str:
    return text.replace(MARK, "")


class TokenAnchors:
    """The dialects of a model, with marks where they consist of tokens of its tokenizer.

    Args:
        tools: How the model calls tools.
        reasoning: How it sets its reasoning apart.
        tokens: Texts of the tokenizer's added tokens by their ids.

    Attributes:
        tools: The dialect with marks. A section that begins with a token begins with nothing else.
        reasoning: The same of reasoning.
        ids: The tokens that occur in one of them.
    """

    def __init__(
        self, tools: ToolDialect | None, reasoning: ReasoningDialect | None, tokens: Mapping[int, str]
    ) -> None:
        names = {name for name in tokens.values() if name.strip()}
        escaped = {re.escape(name): name for name in names}
        self._names = {**escaped, **{name: name for name in names}}
        self._in_literal = _alternatives(self._names)
        self._in_pattern = _alternatives(escaped)
        self._used = set[str]()
        self.tools = None if tools is None else _without_other_begins(self._marked(tools))
        self.reasoning: ReasoningDialect | None = self._marked(reasoning)
        self.ids = frozenset(token_id for token_id, name in tokens.items() if name in self._used)
        self._in_prompt = _alternatives(self._used)

    def mark_prompt(self, text: str) -> str:
        """Return the end of a prompt with a mark before each name of a token."""
        return self._in_prompt.sub(rf"{MARK}\g<0>", text)

    def _marked(self, part: Any) -> Any:
        """Return a part of a dialect, or what one consists of, with marks."""
        match part:
            case str():  # a literal, or the source of a pattern
                return self._in_literal.sub(self._mark, part)
            case re.Pattern():
                return re.compile(self._in_pattern.sub(self._mark, part.pattern), part.flags)
            case tuple():
                return tuple(map(self._marked, part))
            case _ if dataclasses.is_dataclass(part) and not isinstance(part, type):
                values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
                return dataclasses.replace(part, **{name: self._marked(value) for name, value in values.items()})
        return part

    def _mark(self, match: re.Match[str]) -> str:
        self._used.add(self._names[match[0]])
        return MARK + match[0]


def _alternatives(names: Iterable[str]) -> re.Pattern[str]:
    """Return what finds the first of some names, the longest of those that begin at the same place."""
    longest_first = sorted(names, key=len, reverse=True)
    if not longest_first:
        return re.compile("(?!)")
    return re.compile(r"(?<!\?P)(?:" + "|".join(map(re.escape, longest_first)) + ")")  # no name of a pattern's group


def _without_other_begins(dialect: ToolDialect) -> ToolDialect:
    """Return a dialect whose sections begin with tokens alone, if one of them begins with a token."""
    if not any(MARK in begin for section in dialect.sections for begin in section.begin):
        return dialect
    sections = (_of_tokens(section) for section in dialect.sections)
    return dataclasses.replace(dialect, sections=tuple(item for item in sections if item.begin or item.bare))


def _of_tokens(section: Section) -> Section:
    # What a message may begin with though it has no anchor, as Llama 3's JSON, is the model's usual way.
    anchored = any(isinstance(call, NamedCall) and call.begin for call in section.calls)
    begin = tuple(item for item in section.begin if MARK in item)
    return dataclasses.replace(section, begin=begin, bare=section.bare and not anchored)
