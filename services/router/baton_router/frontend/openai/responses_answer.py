"""The formatters of ``/v1/responses``: an answer's text, reasoning and calls as items, whole or in events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from baton.dialects import CallArguments, CallEnd, CallStart, DialectParser, Event, Reasoning, Text
from baton.errors import BatonError
from baton.types import FinishReason
from baton_router.frontend.http.errors import baton_error_object
from baton_router.frontend.openai.answer import (
    EventStream,
    Formatter,
    WholeAnswer,
    message_of,
    named_events,
    reasoning_tokens,
    usage_object,
)
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.frontend.openai.responses import ResponseSettings
from baton_router.processor.text_request import PreparedRequest, TextChunk


def response_formatter(request: OpenAIRequest, prepared: Sequence[PreparedRequest]) -> Formatter:
    """Return the formatter of a request."""
    return ResponseEvents if request.stream else WholeResponse


class _Items:
    """Builds output items from a parser's events, and makes the stream's events for them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""

    def add_event(self, event: Event) -> list[dict[str, Any]]:
        """Add an event; return the stream's events for it."""
        match event:
            case Text():
                events = self._begin("message")
                self.items[-1]["content"][0]["text"] += event.text
                return [*events, {**self._delta("response.output_text.delta", event.text), "logprobs": []}]
            case Reasoning():
                events = self._begin("reasoning")
                self.items[-1]["content"][0]["text"] += event.text
                return [*events, self._delta("response.reasoning_text.delta", event.text)]
            case CallStart():
                events = self.close()
                self._open = "function_call"
                item = {"id": _ident("fc"), "type": "function_call", "status": "in_progress"}
                self.items.append({**item, "call_id": event.id, "name": event.name, "arguments": ""})
                return [*events, self._item("response.output_item.added")]
            case CallArguments():
                self.items[-1]["arguments"] += event.text
                delta = self._delta("response.function_call_arguments.delta", event.text)
                delta.pop("content_index")
                return [delta]
            case CallEnd():
                return self.close()

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        item: dict[str, Any] = {"id": _ident("msg"), "type": "message", "role": "assistant"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            item = {"id": _ident("rs"), "type": "reasoning", "summary": []}
            part = {"type": kind + "_text", "text": ""}
        self.items.append({**item, "status": "in_progress", "content": []})
        events.append(self._item("response.output_item.added"))
        self.items[-1]["content"].append(part)
        return [*events, self._part("response.content_part.added")]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Return the stream's events for the end of the item that is open."""
        if not self._open:
            return []
        kind = self._open
        self._open = ""
        item = self.items[-1]
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if kind == "function_call":
            names = {"name": item["name"], "arguments": item["arguments"]}
            events = [{"type": "response.function_call_arguments.done", **place, **names}]
        else:
            text = {"content_index": 0, "text": item["content"][0]["text"]}
            done = {"type": "response.reasoning_text.done", **place, **text}
            if kind == "message":
                done = {"type": "response.output_text.done", **place, **text, "logprobs": []}
            events = [done, self._part("response.content_part.done")]
        return [*events, self._item("response.output_item.done")]

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **place, "delta": text}

    def _part(self, kind: str) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **place, "part": dict(item["content"][0])}

    def _item(self, kind: str) -> dict[str, Any]:
        item = self.items[-1]
        copy = {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
        return {"type": kind, "output_index": len(self.items) - 1, "item": copy}


def _ident(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class _Response:
    """One response object while it is generated."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], created: int) -> None:
        self._settings: ResponseSettings = request.settings
        self._prepared = prepared
        self._created = created
        self._parser: DialectParser | None = prepared[0].parser()
        self._events: list[Event] = []
        self._items = _Items()

    def add_text(self, text: str, finish: FinishReason | None) -> list[dict[str, Any]]:
        """Add text; return the stream's events for it."""
        parser = self._parser
        parsed: list[Event] = [Text(text)] if parser is None and text else []
        if parser is not None:
            parsed = parser.feed(text)
            if finish is not None:
                parsed += parser.finish()
        self._events += parsed
        events = [event for item in parsed for event in self._items.add_event(item)]
        if finish is not None:
            events += self._items.close("incomplete" if finish == FinishReason.LENGTH else "completed")
        return events

    def body(self, status: str, tokens: int | None = None, cached: int = 0) -> dict[str, Any]:
        """Return the response object.

        Args:
            status: Status of the response.
            tokens: Number of generated tokens; ``None`` while it is incomplete.
            cached: Number of cached prompt tokens.
        """
        usage = None
        if tokens is not None:
            counts = usage_object(self._prepared, tokens, cached)
            thoughts = "".join(event.text for event in self._events if isinstance(event, Reasoning))
            reasoning = reasoning_tokens(self._prepared[0], thoughts)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": min(reasoning, tokens)},
                "total_tokens": counts["total_tokens"],
            }
        return {
            "id": self._settings.ident,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._prepared[0].info.name,
            "output": list(self._items.items),
            **self._settings.echo,
            "usage": usage,
        }

    def store(self, body: dict[str, Any]) -> bytes:
        """Store the conversation and the response object; return the latter as JSON."""
        message = message_of(self._events, reasoning=True)
        data = orjson.dumps(body)
        stored = {name: item for name, item in message.items() if item is not None and name != "reasoning"}
        self._settings.store_response(stored, data)
        return data


class WholeResponse(WholeAnswer):
    """The formatter of responses in one piece."""

    __slots__ = ("_response",)

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._response = _Response(request, prepared, created)

    def end(self) -> bytes:
        """Return the response object as JSON."""
        choice = self._choices[0][0]
        self._response.add_text("".join(choice.texts), choice.finish_reason or FinishReason.STOP)
        status = "incomplete" if choice.finish_reason == FinishReason.LENGTH else "completed"
        return self._response.store(self._response.body(status, len(choice.ids), sum(self._cached)))


class ResponseEvents(EventStream):
    """The formatter of streamed responses: each event has a change, the last one the whole response."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        super().__init__(request, prepared, ident, created)
        self._is_plain = False  # a token has events of other forms
        self._response = _Response(request, prepared, created)
        self._number = 0
        self._status = "completed"

    def add(self, chunk: TextChunk) -> bytes:
        """Return the events for a chunk."""
        events = []
        if chunk.trace is not None:
            self._cached[0] = chunk.cached_tokens
        if not self._begun[0]:
            self._begun[0] = True
            body = self._response.body("in_progress")
            events = [{"type": f"response.{kind}", "response": body} for kind in ("created", "in_progress")]
        for delta in chunk.deltas:
            self._tokens += len(delta.token_ids)
            if delta.finish_reason == FinishReason.LENGTH:
                self._status = "incomplete"
            events += self._response.add_text(delta.text, delta.finish_reason)
        return self._written(events)

    def end(self) -> bytes:
        """Return the event that ends a stream."""
        body = self._response.body(self._status, self._tokens, sum(self._cached))
        data = self._response.store(body)
        return self._written([{"type": f"response.{self._status}", "response": orjson.Fragment(data)}])

    def error(self, error: BatonError) -> bytes:
        """Return the event that ends a stream with an error."""
        shown = baton_error_object(error)["error"]
        return self._written([{"type": "error", **{name: shown[name] for name in ("code", "message", "param")}}])

    def _written(self, events: list[dict[str, Any]]) -> bytes:
        numbered = [{**event, "sequence_number": self._number + at} for at, event in enumerate(events)]
        self._number += len(numbered)
        return named_events(numbered)
