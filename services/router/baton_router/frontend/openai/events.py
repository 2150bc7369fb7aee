"""Answers as server-sent events: one ``data:`` line of JSON per piece of text.

Everything that does not change from piece to piece is encoded once; per piece there is the text's own encoding and a
concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.errors import BatonError
from baton.types import FinishReason, TokenLogprob
from baton_router.frontend.http.errors import baton_error_object
from baton_router.frontend.openai.answer import Echo, Usage
from baton_router.frontend.openai.logprobs import LogprobWriter
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta

DONE = b"data: [DONE]\n\n"
_NULL = b"null"


class EventStream:
    """The formatter of streamed answers."""

    def __init__(self, request: OpenAIRequest, prepared: Sequence[PreparedRequest], ident: str, created: int) -> None:
        """Begin.

        Args:
            request: What was asked for.
            prepared: One per prompt.
            ident: The answer's id.
            created: Seconds since 1970.
        """
        self._request = request
        self._prepared = prepared
        self._writer = LogprobWriter(prepared[0].text_model.tokenizer, as_ids=request.tokens_as_ids)
        self._usage = Usage(prepared, count_output=not request.score_only)
        head = {
            "id": ident,
            "object": "chat.completion.chunk" if request.chat else "text_completion",
            "created": created,
            "model": prepared[0].info.name,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._before_text = b',"delta":{"content":' if request.chat else b',"text":'
        self._after_text = b'},"logprobs":' if request.chat else b',"logprobs":'
        # With include_usage every event has the field: null up to the last one.
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._begun = [False] * len(prepared)
        self._echo_chars = [0] * len(prepared)

    def add(self, at: int, chunk: TextChunk) -> bytes:
        """Return the events for a chunk of prompt ``at``; empty if there is nothing to say yet."""
        request = self._request
        self._usage.add(at, chunk)
        if request.continuous_usage:
            self._tail = b'],"usage":' + orjson.dumps(self._usage.as_object()) + b"}\n\n"
        events = []
        if not self._begun[at]:
            self._begun[at] = True
            events += self._begin(at, chunk.prompt_logprobs)
        by_token = request.logprobs or request.return_token_ids
        for delta in chunk.deltas:
            if request.score_only:
                if delta.finish_reason is not None:
                    events.append(self._piece(at, TextDelta(delta.index, "", [], finish_reason=FinishReason.LENGTH)))
            elif delta.text or delta.finish_reason or (delta.token_ids and by_token):
                events.append(self._piece(at, delta))
        return b"".join(events)

    def end(self) -> bytes:
        """Return the events that end a stream."""
        if not self._request.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(self._usage.as_object()) + b"}\n\n" + DONE

    def error(self, error: BatonError) -> bytes:
        """Return the event that ends a stream which cannot go on."""
        return b"data: " + orjson.dumps(baton_error_object(error)) + b"\n\n"

    def _begin(self, at: int, prompt_logprobs: list[TokenLogprob | None] | None) -> list[bytes]:
        """Return what comes before the text: the role of a chat message, or the echoed prompt."""
        request = self._request
        first: dict[str, Any] = {}
        if request.return_token_ids:
            first["prompt_token_ids"] = list(self._prepared[at].routed.prompt_token_ids)
        if request.chat:
            first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None, **first}
        elif request.echo:
            echo = Echo(self._prepared[at], prompt_logprobs)
            self._echo_chars[at] = len(echo.text)
            logprobs = self._writer.completion(echo.ids, echo.logprobs, echo.offsets) if request.logprobs else None
            first = {"text": echo.text, "logprobs": logprobs, "finish_reason": None, **first}
        elif first:
            first = {"text": "", "logprobs": None, "finish_reason": None, **first}
        else:
            return []
        indices = range(at * request.n, (at + 1) * request.n)
        return [self._head + orjson.dumps({"index": index, **first}) + self._tail for index in indices]

    def _piece(self, at: int, delta: TextDelta) -> bytes:
        request = self._request
        finish = delta.finish_reason
        parts = [
            self._head,
            b'{"index":%d' % (at * request.n + delta.index),
            self._before_text,
            orjson.dumps(delta.text),
            self._after_text,
            self._logprobs(at, delta) if request.logprobs else _NULL,
            b',"finish_reason":',
            _NULL if finish is None else b'"%s"' % finish.encode(),
        ]
        if finish is not None:
            parts += (b',"stop_reason":', orjson.dumps(delta.stop_reason))
        if request.return_token_ids:
            parts += (b',"token_ids":', orjson.dumps(delta.token_ids))
        parts += (b"}", self._tail)
        return b"".join(parts)

    def _logprobs(self, at: int, delta: TextDelta) -> bytes:
        if self._request.chat:
            return orjson.dumps({"content": self._writer.chat(delta.logprobs), "refusal": None})
        offsets = [self._echo_chars[at] + offset for offset in delta.offsets]
        return orjson.dumps(self._writer.completion(delta.token_ids, delta.logprobs, offsets))
