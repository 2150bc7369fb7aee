"""Tokens to events in one step: what nearly all tokens of nearly all streams take.

A token that brings nothing but its text passes six layers. Between two tokens of a stream the kernel and the other
streams use the processor's caches, so what a layer touches comes from memory: most of a token's time is waiting for
that. Here its event is made from what one object has, and what can be counted later is counted for many at once.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import orjson

from baton.tokenizer import Tokenizer
from baton_router.processor.output_processor import GenerationClock

_SETTLED = 16
"""Tokens after which they are counted: those of a block."""
_JSON: WeakKeyDictionary[Tokenizer, dict[int, bytes]] = WeakKeyDictionary()
"""Texts of tokens, as far as they were met."""


class FastEvents:
    """Makes the events of a stream of one sequence, each a chunk of HTTP; a ``baton.rpc.multiplex.FastPath``.

    Args:
        before: What stands before a token's text.
        after: What stands behind it.
        write: Sends chunks.
        tokenizer: The model's.
        token_ids: Each token is added.
        clock: Times tokens, and has the first one's time.
        counted: Called with how many tokens came since it was called before, now and then and by :meth:`leave`.
    """

    __slots__ = (
        *("_after", "_before", "_clock", "_counted", "_ids", "_itl", "_json", "_last", "_settled", "_size"),
        *("_tokenizer", "_unsent", "_write"),
    )

    def __init__(
        self,
        before: bytes,
        after: bytes,
        write: Callable[[bytes], None],
        tokenizer: Tokenizer,
        token_ids: list[int],
        clock: GenerationClock,
        counted: Callable[[int], None],
    ) -> None:
        self._before, self._after, self._size = before, after, len(before) + len(after)
        self._write, self._tokenizer, self._counted = write, tokenizer, counted
        self._unsent = b""
        self._ids, self._settled = token_ids, len(token_ids)
        self._clock, self._itl, self._last = clock, clock.itl, clock.last(0)
        self._json = _JSON.setdefault(tokenizer, {})

    def push(self, token_id: int, now: float) -> bool:
        """Take a token, if its text is known and whole."""
        text = self._json.get(token_id)
        if text is None:
            known = self._tokenizer.whole_texts.get(token_id)
            if known is None or token_id in self._tokenizer.special_ids:
                return False
            text = self._json[token_id] = orjson.dumps(known)
        ids = self._ids
        ids.append(token_id)
        self._itl.observe(now - self._last)
        self._last = now
        if len(ids) - self._settled >= _SETTLED:
            self._settle()
        self._unsent += b"%x\r\n%b%b%b\r\n" % (self._size + len(text), self._before, text, self._after)
        return True

    def send(self) -> None:
        """Send the events that are made."""
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self._write(unsent)

    def leave(self) -> None:
        """Send and count all that came: something else has come."""
        self.send()
        self._settle()

    def _settle(self) -> None:
        if count := len(self._ids) - self._settled:
            self._settled += count
            self._clock.timed(0, count, self._last)
            self._counted(count)
