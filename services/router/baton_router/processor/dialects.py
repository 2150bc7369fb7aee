"""The dialects of the served models for tool calls and reasoning, and the grammars of answers in them."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from baton.dialects import TOOL_DIALECTS
from baton.dialects.builtin import AUTO, Dialects, check_dialect, choose_dialects
from baton.dialects.call_grammar import AnswerGrammar
from baton.dialects.token_anchors import TokenAnchors
from baton.errors import InvalidRequestError
from baton.tokenizer import TextModel, Tokenizer
from baton_router.processor.text_request import TextRequest
from baton_router.types import ModelInfo

DEFAULT_TOOLS = "hermes"
"""Dialect of models whose tool calls are not known: used to read calls, and for ``tool_choice: required``."""


@dataclass(frozen=True, slots=True)
class _Known:
    read: Dialects
    written: Dialects
    """The same without dialects from a tokenizer's files, which only define how to read."""
    anchors: TokenAnchors
    """The same as ``read``, with marks where they consist of tokens."""
    special_tokens: dict[str, int]
    shown: frozenset[int]


class ModelDialects:
    """Finds the dialects of models.

    Args:
        tools: Name of a tool dialect, or ``auto``.
        reasoning: Name of a reasoning dialect, or ``auto``.

    Raises:
        ConfigError: There is no such dialect.
    """

    def __init__(self, tools: str = AUTO, reasoning: str = AUTO) -> None:
        check_dialect(tools, False, "tool_dialect")
        check_dialect(reasoning, True, "reasoning_dialect")
        self._names = tools, reasoning
        self._known: WeakKeyDictionary[Tokenizer, _Known] = WeakKeyDictionary()

    def anchors(self, model: TextModel) -> TokenAnchors:
        """Return a model's dialects, as its answers are read."""
        return self._of(model).anchors

    def shown_tokens(self, model: TextModel) -> frozenset[int]:
        """Return the special tokens that a model's dialects use."""
        return self._of(model).shown

    def answer_grammar(self, request: TextRequest, info: ModelInfo, model: TextModel) -> AnswerGrammar | None:
        """Return the grammar of the whole answer, for a request whose prompt is tokenized.

        ``None`` if the answer has no grammar beside that of ``sampling``.

        Raises:
            InvalidRequestError: A call must be made and cannot be, or reasoning cannot be bounded; names
                ``tool_choice``, ``tools`` or ``thinking_token_budget``.
        """
        use = request.tool_use
        content = request.sampling.grammar
        budget = request.thinking_budget
        if not request.parsed or (content is not None and content.start_token_ids):
            return None
        known = self._of(model)
        tools = known.written.tools
        reasoning = known.written.reasoning
        if known.read.reasoning is None:
            budget = None  # the model does not reason
        if budget is not None and (reasoning is None or not info.grammars):
            what = "it is not known how this model ends it" if info.grammars else "no instance knows grammars"
            name = "thinking_token_budget"
            raise InvalidRequestError(f"{name}: reasoning cannot be ended, as {what}", field=name)
        if use.mode == "none" and ((content is None and budget is None) or reasoning is None):
            return None
        if use.mode != "none":
            field = "tool_choice" if use.mode == "required" else "tools" if use.strict else ""
            if field and (tools is None or not info.grammars):
                what = "it is not known how this model calls tools" if info.grammars else "no instance knows grammars"
                raise InvalidRequestError(f"{field} cannot be kept to: {what}", field=field)
            if not info.grammars or (tools is None and budget is None):
                return None
        reasons = reasoning is not None and reasoning.is_open(request.prompt_end)
        if use.mode == "required":
            content = None  # there is no text
        return AnswerGrammar(Dialects(tools, reasoning), use, reasons, content, known.special_tokens, budget)

    def _of(self, model: TextModel) -> _Known:
        known = self._known.get(model.tokenizer)
        if known is None:
            template = "" if model.chat_template is None else model.chat_template.source
            own = model.config.get("response_template")
            read = choose_dialects(*self._names, chat_template=template, response_template=own)
            written = choose_dialects(*self._names, chat_template=template)
            if read.tools is None and self._names[0] == AUTO:
                read = written = Dialects(TOOL_DIALECTS[DEFAULT_TOOLS], read.reasoning)
            tokenizer = model.tokenizer
            shown = read.shown_tokens({token_id: tokenizer.token_text(token_id) for token_id in tokenizer.special_ids})
            markers = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.marker_ids}
            # Where only the library knows the text of tokens, their places in it are not known.
            tokens = {} if tokenizer.scheme is None else {token_id: name for name, token_id in markers.items()}
            anchors = TokenAnchors(read.tools, read.reasoning, tokens)
            known = self._known[tokenizer] = _Known(read, written, anchors, markers, shown)
        return known
