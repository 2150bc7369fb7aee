"""Chat answers of models that reason or call tools: their text becomes the parts of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.dialects import CallArguments, CallStart, DialectParser, Event, Reasoning, Text
from baton.tokenizer import TextDelta
from baton.types import FinishReason
from baton_router.frontend.openai.answer import Choice, EventStream, WholeAnswer
from baton_router.frontend.openai.endpoint import Formatter
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.processor.text_request import PreparedRequest

TOOL_CALLS = "tool_calls"
"""Why a sequence ended that the model ended with calls."""


def chat_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    """Return what writes the answer to a chat."""
    if prepared[0].parser() is not None:
        return MessageEvents if request.stream else WholeMessage
    return plain_formatter(request, prepared)


def plain_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    """Return what writes an answer that is text alone."""
    return EventStream if request.stream else WholeAnswer


class WholeMessage(WholeAnswer):
    """The formatter of answers in one piece; made as :class:`WholeAnswer`."""

    __slots__ = ()

    def _chat_choice(self, at: int, index: int, choice: Choice) -> dict[str, Any]:
        out = super()._chat_choice(at, index, choice)
        parser = self._prepared[at].parser()
        if parser is None:
            return out
        events = [*parser.feed("".join(choice.texts)), *parser.finish()]
        message = out["message"] = message_of(events, reasoning=self._request.reasoning)
        if TOOL_CALLS in message and choice.finish_reason == FinishReason.STOP:
            out["finish_reason"] = TOOL_CALLS
        return out


def message_of(events: Sequence[Event], *, reasoning: bool) -> dict[str, Any]:
    """Return the message that events make.

    Args:
        events: All of an answer's.
        reasoning: Whether its reasoning is part of it.
    """
    content = []
    thoughts = []
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Text():
                content.append(event.text)
            case Reasoning():
                thoughts.append(event.text)
            case CallStart():
                calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
            case CallArguments():
                calls[event.index]["function"]["arguments"] += event.text
    text = "".join(content)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thoughts and reasoning:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def reasoning_tokens(prepared: PreparedRequest, thoughts: str) -> int:
    """Return how many tokens the text of an answer's reasoning has."""
    return len(prepared.text_model.tokenizer.encode(thoughts, False)) if thoughts else 0


class MessageEvents(EventStream):
    """The formatter of streamed answers; made as :class:`EventStream`.

    A sequence whose rest is plain text is written as :class:`EventStream` writes it.
    """

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._parsers: list[DialectParser | None] = [prepared[0].parser() for _ in range(request.n)]
        self._when_plain = self._is_plain
        self._is_plain = self._is_plain and not any(self._parsers)

    def _piece(self, at: int, delta: TextDelta) -> bytes:
        parser = self._parsers[delta.index]
        if parser is None:
            return super()._piece(at, delta)
        events = parser.feed(delta.text)
        finish: str | None = delta.finish_reason
        if finish is not None:
            events += parser.finish()
            if parser.calls and finish == FinishReason.STOP:
                finish = TOOL_CALLS
        elif parser.plain:
            self._parsers[delta.index] = None
            self._is_plain = self._when_plain and not any(self._parsers)
        changes = [change for event in events if (change := self._change(event)) is not None]
        request = self._request
        if finish is not None:
            changes.append({})
        elif not changes and delta.token_ids and (request.logprobs or request.return_token_ids):
            changes.append({"content": ""})
        pieces = []
        for place, change in enumerate(changes):
            piece: dict[str, Any] = {"index": delta.index, "delta": change, "logprobs": None, "finish_reason": None}
            if place == 0 and request.logprobs:
                piece["logprobs"] = orjson.Fragment(self._logprobs(at, delta))
            if place == len(changes) - 1 and finish is not None:
                piece["finish_reason"] = finish
                piece["stop_reason"] = delta.stop_reason
            if place == 0 and request.return_token_ids:
                piece["token_ids"] = delta.token_ids
            pieces.append(self._head + orjson.dumps(piece) + self._tail)
        return b"".join(pieces)

    def _change(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text():
                return {"content": event.text}
            case Reasoning() if self._request.reasoning:
                return {"reasoning": event.text, "reasoning_content": event.text}
            case CallStart():
                function = {"name": event.name, "arguments": ""}
                return {TOOL_CALLS: [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
            case CallArguments():
                return {TOOL_CALLS: [{"index": event.index, "function": {"arguments": event.text}}]}
        return None
