"""Whole answers: collects the chunks of a request's generations and writes the response object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from baton.types import FinishReason, TokenLogprob
from baton_router.frontend.openai.logprobs import LogprobWriter, text_offsets
from baton_router.frontend.openai.openai_request import OpenAIRequest
from baton_router.processor.text_request import PreparedRequest, TextChunk, TextDelta


class Usage:
    """Tokens of one HTTP request, all its prompts together."""

    __slots__ = ("_cached", "_count_output", "_output", "_prompt")

    def __init__(self, prepared: Sequence[PreparedRequest], *, count_output: bool = True) -> None:
        self._prompt = 0
        for item in prepared:
            self._prompt += item.prompt_tokens
        self._cached = [0] * len(prepared)
        self._output = 0
        self._count_output = count_output

    def add(self, at: int, chunk: TextChunk) -> None:
        """Count what a chunk of prompt ``at`` brought."""
        if chunk.trace is not None:
            self._cached[at] = chunk.cached_tokens
        if self._count_output:
            for delta in chunk.deltas:
                self._output += len(delta.token_ids)

    def as_object(self) -> dict[str, Any]:
        """Return the ``usage`` so far."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._output,
            "total_tokens": self._prompt + self._output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


class Echo:
    """The prompt as the beginning of a completion."""

    __slots__ = ("ids", "logprobs", "offsets", "text")

    def __init__(self, prepared: PreparedRequest, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        tokenizer = prepared.text_model.tokenizer
        skip = prepared.request.skip_special_tokens
        self.ids = list(prepared.routed.prompt_token_ids)
        prompt = prepared.request.prompt
        self.text = prompt if isinstance(prompt, str) else tokenizer.decode(self.ids, skip)
        self.logprobs: list[TokenLogprob | None] = prompt_logprobs or []
        self.offsets = text_offsets(tokenizer, self.ids, skip_special_tokens=skip) if self.logprobs else []


class Choice:
    """One sequence of an answer, as it grows."""

    __slots__ = ("finish_reason", "ids", "logprobs", "offsets", "stop_reason", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        """Take what a chunk brought to the sequence."""
        self.texts.append(delta.text)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class WholeAnswer:
    """The formatter of answers in one piece."""

    __slots__ = ("_choices", "_head", "_prepared", "_prompt_logprobs", "_request", "_usage")

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
        self._head = {"id": ident, "created": created, "model": prepared[0].info.name}
        self._choices: list[list[Choice]] = []
        for _ in prepared:
            self._choices.append([Choice()] if request.n == 1 else [Choice() for _ in range(request.n)])
        self._prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(prepared)
        self._usage = Usage(prepared, count_output=not request.score_only)

    def add(self, at: int, chunk: TextChunk) -> bytes:
        """Take a chunk of prompt ``at``; there is nothing to send before the end."""
        self._usage.add(at, chunk)
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs[at] = chunk.prompt_logprobs
        for delta in chunk.deltas:
            self._choices[at][delta.index].add(delta)
        return b""

    @property
    def _writer(self) -> LogprobWriter:  # made where it is wanted, which is rare
        return LogprobWriter(self._prepared[0].text_model.tokenizer, as_ids=self._request.tokens_as_ids)

    def end(self) -> bytes:
        """Return the response object as JSON."""
        request = self._request
        choices = []
        for at in range(len(self._prepared)):
            for index, choice in enumerate(self._choices[at]):
                write = self._chat_choice if request.chat else self._completion_choice
                choices.append(write(at, index, choice))
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion" if request.chat else "text_completion",
            "choices": choices,
            "usage": self._usage.as_object(),
        }
        if request.chat and request.return_token_ids:
            body["prompt_token_ids"] = list(self._prepared[0].routed.prompt_token_ids)
        if request.chat and request.prompt_logprobs:
            body["prompt_logprobs"] = self._writer.prompt(self._prompt_logprobs[0] or [])
        return orjson.dumps(body)

    def _chat_choice(self, at: int, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = {"content": self._writer.chat(choice.logprobs), "refusal": None} if self._request.logprobs else None
        out: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            out["token_ids"] = choice.ids
        return out

    def _completion_choice(self, at: int, index: int, choice: Choice) -> dict[str, Any]:
        request = self._request
        echo = Echo(self._prepared[at], self._prompt_logprobs[at]) if request.echo else None
        if request.score_only:
            choice = Choice()
            choice.finish_reason = FinishReason.LENGTH
        text = "".join(choice.texts)
        out: dict[str, Any] = {
            "index": at * request.n + index,
            "text": echo.text + text if echo else text,
            "logprobs": self.completion_logprobs(choice, echo) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.return_token_ids:
            out["prompt_token_ids"] = list(self._prepared[at].routed.prompt_token_ids)
            out["token_ids"] = choice.ids
        if request.prompt_logprobs:
            out["prompt_logprobs"] = self._writer.prompt(self._prompt_logprobs[at] or [])
        return out

    def completion_logprobs(self, choice: Choice, echo: Echo | None) -> dict[str, Any]:
        """Return a completion's ``logprobs``, with those of the prompt first if it is echoed."""
        ids, items, offsets = choice.ids, list[TokenLogprob | None](choice.logprobs), choice.offsets
        if echo is not None:
            ids = [*echo.ids, *ids]
            items = [*echo.logprobs, *items]
            offsets = [*echo.offsets, *(len(echo.text) + offset for offset in offsets)]
        return self._writer.completion(ids, items, offsets)
