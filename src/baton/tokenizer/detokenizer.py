"""Token ids to text, piece by piece, without ever taking a character back."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from baton.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""Tokens a character may be spread over; more are no character that will ever be completed (UTF-8 needs 4 bytes)."""


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens.

    What :meth:`push` returned, put together with what :meth:`flush` returns, is the tokenizer's ``decode`` of all ids,
    whatever the portions they came in. An incomplete character is held back until its last byte is there.
    """

    __slots__ = ("_decoder", "_hidden")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        """Begin a sequence.

        Args:
            tokenizer: Whose ids these are.
            skip_special_tokens: Leave special tokens out of the text.
            context: Ids that come before and whose text is not wanted, when the text continues theirs: the last eight
                are looked at. Without, a tokenizer that drops the space at the start of a text drops it here.
        """
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder: _BytesDecoder | _WindowDecoder
        if tokenizer.scheme is not None:
            strip = tokenizer.scheme.strip_start
            self._decoder = _BytesDecoder(tokenizer, strip if strip and not self._shown(context[-_MAX_HELD:]) else 0)
        else:
            self._decoder = _WindowDecoder(tokenizer, self._shown(context[-_MAX_HELD:]))

    def _shown(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._hidden]

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids and return the text that is complete with them."""
        return self._decoder.push(ids if self._hidden.isdisjoint(ids) else self._shown(ids))

    def flush(self) -> str:
        """Return what was held back: no more ids come. Bytes that are no character become U+FFFD."""
        return self._decoder.flush()


class _BytesDecoder:
    """For tokenizers whose text is the concatenation of their tokens' bytes."""

    __slots__ = ("_held", "_strip", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, strip: int) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._held = b""
        self._strip = strip

    def push(self, ids: Iterable[int]) -> str:
        data = self._held + b"".join(map(self._token_bytes, ids))
        # What an incremental decoder calls: one of those for each sequence costs more than the decoding.
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        if not self._held:
            return ""
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return self._stripped(text) if self._strip else text

    def _stripped(self, text: str) -> str:
        """Drop the spaces at the start of the whole text that the tokenizer put there."""
        spaces = len(text) - len(text.lstrip(" "))
        drop = min(spaces, self._strip)
        self._strip = self._strip - drop if spaces == len(text) else 0
        return text[drop:]


class _WindowDecoder:
    """For any other tokenizer: decodes a window of the last tokens, and again with the new one.

    The window begins one emission before the last one, so that what a decoder does to a text's start (spaces, word
    pieces) is the same in both decodings and cancels out. Costs two decodings of a few tokens per token. A decoder
    that rewrites text further back than that is not followed.
    """

    __slots__ = ("_ids", "_known", "_read", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = context
        self._read = len(context)
        self._known = self._decode(context)

    def push(self, ids: Iterable[int]) -> str:
        pieces = []
        for token_id in ids:
            self._ids.append(token_id)
            text = self._decode(self._ids)
            complete = len(text) > len(self._known) and not text.endswith(_REPLACEMENT)
            if complete or len(self._ids) - self._read > _MAX_HELD:
                pieces.append(self._advance(text))
        return "".join(pieces)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        """Move the window up to the newest tokens and return what ``text`` adds to what was emitted."""
        new = text[len(self._known) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._known = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
