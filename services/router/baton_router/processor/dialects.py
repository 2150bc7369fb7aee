"""Which dialects the served models speak: found out once per model."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from baton.dialects import TOOL_DIALECTS
from baton.dialects.choice import AUTO, Dialects, check_dialect, choose_dialects
from baton.tokenizer import TextModel, Tokenizer

DEFAULT_TOOLS = "hermes"
"""How calls are read, and written under ``tool_choice: required``, of models that are not known to make any."""


class ModelDialects:
    """Knows the dialects of models.

    Args:
        tools: A tool dialect's name, or ``auto``.
        reasoning: A reasoning dialect's name, or ``auto``.

    Raises:
        ConfigError: There is no such dialect.
    """

    def __init__(self, tools: str = AUTO, reasoning: str = AUTO) -> None:
        check_dialect(tools, False, "tool_dialect")
        check_dialect(reasoning, True, "reasoning_dialect")
        self._names = tools, reasoning
        self._known: WeakKeyDictionary[Tokenizer, tuple[Dialects, frozenset[int]]] = WeakKeyDictionary()

    def of(self, model: TextModel) -> Dialects:
        """Return a model's dialects."""
        return self._of(model)[0]

    def shown_tokens(self, model: TextModel) -> frozenset[int]:
        """Return the special tokens that its dialects are written with."""
        return self._of(model)[1]

    def _of(self, model: TextModel) -> tuple[Dialects, frozenset[int]]:
        known = self._known.get(model.tokenizer)
        if known is None:
            template = "" if model.chat_template is None else model.chat_template.source
            own = model.config.get("response_template")
            found = choose_dialects(*self._names, chat_template=template, response_template=own)
            if found.tools is None and self._names[0] == AUTO:
                found = Dialects(TOOL_DIALECTS[DEFAULT_TOOLS], found.reasoning)
            special = {token_id: model.tokenizer.token_text(token_id) for token_id in model.tokenizer.special_ids}
            known = self._known[model.tokenizer] = found, found.shown_tokens(special)
        return known
