"""Which dialects a model speaks: as its tokenizer says, by its chat template, or as a flag says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.dialects.builtin import REASONING_DIALECTS, REASONING_MARKS, SYNONYMS, TOOL_DIALECTS, TOOL_MARKS
from baton.dialects.response_template import NAME, read_response_template
from baton.dialects.syntax import ReasoningDialect, ToolDialect
from baton.errors import ConfigError

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
D = TypeVar("D", ToolDialect, ReasoningDialect)


@dataclass(frozen=True, slots=True)
class Dialects:
    """How a model writes.

    Attributes:
        tools: Its calls; ``None``: it is not known to make any.
        reasoning: Its reasoning; ``None``: it is not known to set any apart.
    """

    tools: ToolDialect | None = None
    reasoning: ReasoningDialect | None = None

    def shown_tokens(self, special_tokens: Mapping[int, str]) -> frozenset[int]:
        """Return the special tokens whose text is read here, and so must not be left out of it.

        Args:
            special_tokens: Names of a tokenizer's special tokens by their ids.
        """
        anchors = [*(self.tools.anchors if self.tools else ()), *(self.reasoning.anchors if self.reasoning else ())]
        blob = "\n".join(anchors)
        return frozenset(token_id for token_id, name in special_tokens.items() if name.strip() and name.strip() in blob)


def check_dialect(name: str, reasoning: bool, field: str) -> None:
    """Check a dialect's name.

    Raises:
        ConfigError: There is no such dialect.
    """
    known: Mapping[str, Any] = REASONING_DIALECTS if reasoning else TOOL_DIALECTS
    if name not in (AUTO, NONE) and SYNONYMS.get(name, name) not in known:
        names = ", ".join((AUTO, NONE, *known))
        raise ConfigError(f"{field} must be one of {names}, got {name!r}", field=field)


def choose_dialects(
    tools: str = AUTO, reasoning: str = AUTO, *, chat_template: str = "", response_template: Any = None
) -> Dialects:
    """Return a model's dialects.

    Args:
        tools: A name; ``auto``: the tokenizer's own, else what the chat template shows; ``none``: none.
        reasoning: The same for reasoning.
        chat_template: Its source.
        response_template: The tokenizer's own description, if it has one.

    Raises:
        ConfigError: There is no dialect of that name.
    """
    check_dialect(tools, False, "tool_dialect")
    check_dialect(reasoning, True, "reasoning_dialect")
    own: tuple[ToolDialect | None, ReasoningDialect | None] = (None, None)
    if response_template is not None and AUTO in (tools, reasoning):
        try:
            own = read_response_template(response_template)
        except ConfigError as error:
            log.warning("the tokenizer's %s is not used: %s", error.field, error.message)
    found = (
        _choose(tools, own[0], TOOL_DIALECTS, TOOL_MARKS, chat_template),
        _choose(reasoning, own[1], REASONING_DIALECTS, REASONING_MARKS, chat_template),
    )
    if found[0] is not None and found[0].channels is not None and reasoning == AUTO:
        return Dialects(found[0], REASONING_DIALECTS["gpt_oss"])
    return Dialects(*found)


def _choose(
    name: str, own: D | None, known: Mapping[str, D], marks: tuple[tuple[str, str], ...], chat_template: str
) -> D | None:
    if name == NONE:
        return None
    if name != AUTO:
        return known[SYNONYMS.get(name, name)]
    if own is not None:
        return own
    return next((known[dialect] for mark, dialect in marks if mark in chat_template), None)


__all__ = ["AUTO", "NAME", "NONE", "Dialects", "check_dialect", "choose_dialects"]
