"""Counting tokens for the ``usage`` of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_router.processor.text_request import PreparedRequest, TextChunk


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
