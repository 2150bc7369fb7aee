"""Log probabilities in the dialects of chat and of plain completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from baton.tokenizer import IncrementalDetokenizer, Tokenizer
from baton.types import TokenLogprob

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON doesn't have."""


class LogprobWriter:
    """Writes log probabilities for one request."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """Begin.

        Args:
            tokenizer: Gives tokens their text.
            as_ids: Spell tokens as ``token_id:17``.
        """
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, items: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Return the entries of a chat answer's ``logprobs.content``."""
        return [
            {
                **self._chat_token(item.token_id, item.logprob),
                "top_logprobs": [self._chat_token(token_id, value) for token_id, value in item.top],
            }
            for item in items
        ]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(data)}

    def completion(
        self, ids: Sequence[int], items: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Return a completion's ``logprobs``.

        Args:
            ids: The tokens.
            items: Parallel to ``ids``; ``None`` where there is none (a prompt's first token).
            offsets: Parallel to ``ids``: where each token begins in the text.
        """
        return {
            "tokens": [self._completion_token(token_id) for token_id in ids],
            "token_logprobs": [None if item is None else max(item.logprob, _LOWEST) for item in items],
            "top_logprobs": [None if item is None else self._top(item) for item in items],
            "text_offset": list(offsets),
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Return the most probable tokens, and the chosen one if it is not among them."""
        top = {self._completion_token(token_id): max(value, _LOWEST) for token_id, value in item.top}
        top.setdefault(self._completion_token(item.token_id), max(item.logprob, _LOWEST))
        return top

    def _completion_token(self, token_id: int) -> str:
        """Return a token as this dialect spells it: bytes that are no text are written out, so that keys differ."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def prompt(self, items: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """Return a prompt's log probabilities in the extended format: by token id, with rank and text."""
        return [None if item is None else self._prompt_token(item) for item in items]

    def _prompt_token(self, item: TokenLogprob) -> dict[str, Any]:
        ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(item.top, 1)]
        entries = {item.token_id: (item.logprob, item.rank)}
        for token_id, value, rank in ranked:
            entries.setdefault(token_id, (value, rank))
        return {
            str(token_id): {
                "logprob": max(value, _LOWEST),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, (value, rank) in entries.items()
        }


def text_offsets(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool) -> list[int]:
    """Return, for each token, how many characters of the text come before it."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    offsets = []
    chars = 0
    for token_id in ids:
        offsets.append(chars)
        chars += len(detokenizer.push((token_id,)))
    return offsets
