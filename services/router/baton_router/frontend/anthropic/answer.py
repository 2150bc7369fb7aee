"""The formatters of ``/v1/messages``: an answer's text, reasoning and calls as content blocks, whole or in events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.dialects import CallArguments, CallEnd, CallStart, DialectParser, Event, Reasoning, Text
from baton.errors import BatonError
from baton.tokenizer import TextDelta
from baton.types import FinishReason
from baton_router.frontend.anthropic.errors import error_event
from baton_router.frontend.openai.answer import EventStream, WholeAnswer, named_events
from baton_router.frontend.openai.endpoint import Formatter
from baton_router.frontend.openai.message_parts import reasoning_tokens
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.processor.text_request import PreparedRequest, TextChunk


def message_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    """Return what writes the answer to a request."""
    return MessageStream if request.stream else WholeAnthropicMessage


class _Message:
    """One message: its blocks, and what is said of it.

    Args:
        request: What was asked for.
        prepared: The one prompt's.
        ident: The message's id.
    """

    def __init__(self, request: OpenAIRequest, prepared: PreparedRequest, ident: str) -> None:
        self._prepared = prepared
        self._ident = ident
        self._reasoning = request.reasoning
        self._parser: DialectParser | None = prepared.parser()
        self._blocks: list[dict[str, Any]] = []
        self._open = ""
        self._thoughts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def take(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Take more text; return the stream's events for it."""
        parser = self._parser
        finish = delta.finish_reason
        found: list[Event] = [Text(delta.text)] if parser is None and delta.text else []
        if parser is not None:
            found = parser.feed(delta.text)
            if finish is not None:
                found += parser.finish()
        told = [event for item in found for event in self._event(item)]
        if finish is not None:
            told += self._close()
            self._finish(finish, delta.stop_reason)
        return told

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
                told = self._begin("text", {"text": ""})
                self._blocks[-1]["text"] += event.text
                return [*told, self._delta("text_delta", text=event.text)]
            case Reasoning():
                self._thoughts.append(event.text)
                if not self._reasoning:
                    return []
                told = self._begin("thinking", {"thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += event.text
                return [*told, self._delta("thinking_delta", thinking=event.text)]
            case CallStart():
                told = self._close()
                told += self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
                self._blocks[-1]["input"] = ""
                return told
            case CallArguments():
                self._blocks[-1]["input"] += event.text
                return [self._delta("input_json_delta", partial_json=event.text)]
            case CallEnd():
                return self._close()

    def _begin(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        told = self._close()
        self._open = kind
        block = {"type": kind, **fields}
        self._blocks.append(dict(block))
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        return [*told, start]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def usage(self, tokens: int, cached: int) -> dict[str, Any]:
        """Return its usage so far."""
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
    def end(self) -> dict[str, Any]:
        """Why it ended."""
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def body(self, tokens: int, cached: int) -> dict[str, Any]:
        """Return the message object."""
        blocks = [
            {**block, "input": object_of(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]
        return {
            "id": self._ident,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.info.name,
            "content": blocks,
            **self.end,
            "usage": self.usage(tokens, cached),
        }


class WholeAnthropicMessage(WholeAnswer):
    """The formatter of messages in one piece."""

    __slots__ = ("_message",)

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._message = _Message(request, prepared[0], ident)

    def end(self) -> bytes:
        """Return the message object as JSON."""
        choice = self._choices[0][0]
        finish = choice.finish_reason or FinishReason.STOP
        self._message.take(
            TextDelta(0, "".join(choice.texts), [], finish_reason=finish, stop_reason=choice.stop_reason)
        )
        return orjson.dumps(self._message.body(len(choice.ids), self._cached[0]))


class MessageStream(EventStream):
    """The formatter of streamed messages."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._is_plain = False  # a token has events of other forms
        self._message = _Message(request, prepared[0], ident)

    def add(self, chunk: TextChunk) -> bytes:
        """Return the events for a chunk."""
        told: list[dict[str, Any]] = []
        if chunk.trace is not None:
            self._cached[0] = chunk.cached_tokens
        if not self._begun[0]:
            self._begun[0] = True
            told = [{"type": "message_start", "message": self._message.body(0, self._cached[0])}, {"type": "ping"}]
        for delta in chunk.deltas:
            self._tokens += len(delta.token_ids)
            told += self._message.take(delta)
        return named_events(told)

    def end(self) -> bytes:
        """Return the events that end a stream."""
        usage = self._message.usage(self._tokens, self._cached[0])
        delta = {"type": "message_delta", "delta": self._message.end, "usage": usage}
        return named_events([delta, {"type": "message_stop"}])

    def error(self, error: BatonError) -> bytes:
        """Return the event that ends a stream which cannot go on."""
        return named_events([error_event(error)])


def object_of(text: str) -> dict[str, Any]:
    """Return the object that a call's arguments are; of such as were cut, what is complete of them.

    What is no object, where the model wrote such, is returned as Anthropic suggests for results: under a name that says
    so.
    """
    for candidate in (text or "{}", _completed(text)):
        try:
            found = orjson.loads(candidate)
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return {"INVALID_JSON": text}


def _completed(text: str) -> str:
    """Return the JSON that a cut text begins with, closed behind the last value that is whole."""
    closers: list[str] = []
    end = 0
    quoted = False
    escaped = False
    for at, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            end = at + 1
        elif char in "}]" and closers:
            closers.pop()
            end = at + 1
        elif char == "," and closers:
            end = at
    return text[:end] + "".join(reversed(closers))
