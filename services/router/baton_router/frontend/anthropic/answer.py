"""The formatters of ``/v1/messages``: write an answer as content blocks, whole or in events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.dialects import CallArguments, CallEnd, CallStart, DialectParser, Event, Reasoning, Text
from baton.errors import BatonError
from baton.tokenizer import TextDelta
from baton.types import FinishReason
from baton_router.frontend.anthropic.errors import error_event
from baton_router.frontend.anthropic.thread import Thread
from baton_router.frontend.openai.answer import (
    EventStream,
    Formatter,
    WholeAnswer,
    named_events,
    parse_delta,
    reasoning_tokens,
)
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.processor.text_request import PreparedRequest, TextChunk


def message_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    return MessageStream if request.stream else WholeAnthropicMessage


class _Message:
    """One message object while it is generated.

    Args:
        request: The HTTP request.
        prepared: The prepared prompt.
        ident: Identifier of the message.
    """

    def __init__(self, request: OpenAIRequest, prepared: PreparedRequest, ident: str) -> None:
        self._prepared = prepared
        self._thread: Thread | None = request.settings
        self._ident = ident if self._thread is None else self._thread.ident
        self._reasoning = request.reasoning
        self._parser: DialectParser | None = prepared.parser()
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        self._thoughts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def add_delta(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add text; return the stream's events for it."""
        finish = delta.finish_reason
        parsed = parse_delta(self._parser, delta)
        events = [event for item in parsed for event in self._event(item)]
        if finish is not None:
            events += self._close()
            self._finish(finish, delta.stop_reason)
        return events

    def _finish(self, finish: FinishReason, stop: str | int | None) -> None:
        if finish == FinishReason.LENGTH:
            self._stop_reason = "max_tokens"
        elif isinstance(stop, str):
            self._stop_reason = "stop_sequence"
            self._stop_sequence = stop
        else:
            self._stop_reason = "tool_use" if self._parser is not None and self._parser.calls else "end_turn"

    def _event(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Text():
                events = self._begin("text", {"text": ""})
                self._blocks[-1]["text"] += event.text
                return [*events, self._delta("text_delta", text=event.text)]
            case Reasoning():
                self._thoughts.append(event.text)
                if not self._reasoning:
                    return []
                events = self._begin("thinking", {"thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += event.text
                return [*events, self._delta("thinking_delta", thinking=event.text)]
            case CallStart():
                events = self._close()
                events += self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
                self._blocks[-1]["input"] = ""
                return events
            case CallArguments():
                self._blocks[-1]["input"] += event.text
                return [self._delta("input_json_delta", partial_json=event.text)]
            case CallEnd():
                return self._close()

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        block = {"type": kind, **fields}
        self._blocks.append(dict(block))
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        return [*events, start]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def usage(self, tokens: int, cached: int) -> dict[str, Any]:
        """Return the usage so far."""
        usage: dict[str, Any] = {
            "input_tokens": self._prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
        }
        if self._stop_reason is not None:
            thoughts = reasoning_tokens(self._prepared, "".join(self._thoughts))
            usage["output_tokens_details"] = {"thinking_tokens": min(thoughts, tokens)}
        return usage

    @property
    def stop_fields(self) -> dict[str, Any]:
        """Fields with the reason why the message ended."""
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def content(self) -> list[dict[str, Any]]:
        return [
            {**block, "input": object_of(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]

    def store(self) -> None:
        """Store the conversation with this message, if it is of a thread."""
        if self._thread is not None:
            self._thread.store_answer(self.content())

    def body(self, tokens: int, cached: int) -> dict[str, Any]:
        return {
            "id": self._ident,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.info.name,
            "content": self.content(),
            **self.stop_fields,
            "usage": self.usage(tokens, cached),
        }


class WholeAnthropicMessage(WholeAnswer):
    """The formatter of messages in one piece."""

    __slots__ = ("_message",)

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._message = _Message(request, prepared[0], ident)

    def end(self) -> bytes:
        choice = self._choices[0][0]
        self._message.add_delta(choice.whole())
        self._message.store()
        return orjson.dumps(self._message.body(len(choice.ids), self._cached[0]))


class MessageStream(EventStream):
    """The formatter of streamed messages."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._is_plain = False  # a token has events of other forms
        self._message = _Message(request, prepared[0], ident)

    def add(self, chunk: TextChunk) -> bytes:
        events: list[dict[str, Any]] = []
        if chunk.trace is not None:
            self._cached[0] = chunk.cached_tokens
        if not self._begun[0]:
            self._begun[0] = True
            events = [{"type": "message_start", "message": self._message.body(0, self._cached[0])}, {"type": "ping"}]
        for delta in chunk.deltas:
            self._tokens += len(delta.token_ids)
            events += self._message.add_delta(delta)
        return named_events(events)

    def end(self) -> bytes:
        self._message.store()
        usage = self._message.usage(self._tokens, self._cached[0])
        delta = {"type": "message_delta", "delta": self._message.stop_fields, "usage": usage}
        return named_events([delta, {"type": "message_stop"}])

    def error(self, error: BatonError) -> bytes:
        return named_events([error_event(error)])


def object_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; of truncated arguments, the complete values.

    Arguments that are not an object are returned as ``INVALID_JSON``, as Anthropic suggests for results.
    """
    for candidate in (text or "{}", _completed(text)):
        try:
            value = orjson.loads(candidate)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict):
            return value
    return {"INVALID_JSON": text}


def _completed(text: str) -> str:
    """Return truncated JSON, closed after its last complete value."""
    closers: list[str] = []
    end = 0
    quoted = False
    escaped = False
    for position, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            end = position + 1
        elif char in "}]" and closers:
            closers.pop()
            end = position + 1
        elif char == "," and closers:
            end = position
    return text[:end] + "".join(reversed(closers))
