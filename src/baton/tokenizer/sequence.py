"""The text of one sequence: tokens in, text out, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from baton.tokenizer.detokenizer import IncrementalDetokenizer
from baton.tokenizer.stop_strings import StopStringMatcher, StopStrings
from baton.tokenizer.tokenizer import Tokenizer
from baton.types import FinishReason, SamplingParams, TokenLogprob


class TokenDelta(Protocol):
    """New tokens of a sequence, as an instance sends them."""

    @property
    def index(self) -> int:
        """Which sequence."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Parallel to them, if asked for."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended, if it did."""

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended it, if one did."""


class TextDelta(msgspec.Struct):
    """What one message brought to one sequence.

    Attributes:
        text: New text; empty while a character or a possible stop string is incomplete.
        token_ids: New tokens, a stop token included; none after the token that completed a stop string.
        logprobs: Parallel to ``token_ids``, if asked for.
        offsets: Parallel to ``token_ids``, if ``logprobs`` were asked for: characters of the sequence before the token.
        finish_reason: Stop or length when the sequence ended.
        stop_reason: The stop string or the stop token (asked for by id) that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    offsets: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class SequenceText:
    """Follows one sequence of a request.

    Args:
        tokenizer: The model's.
        prompt: The prompt's tokens, if the text goes on with the prompt's; none if it begins anew.
        sampling: The request's.
        stops: Its stop strings.
        skip_special_tokens: Whether special tokens have no text.
        include_stop: Whether the stop string or token that ended the sequence belongs to its text.

    Attributes:
        ended: Whether the sequence has ended; it takes no more tokens then.
    """

    __slots__ = (
        "_chars",
        "_count",
        "_detokenizer",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_own_stops",
        "_with_offsets",
        "ended",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stops: StopStrings | None = None,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt)
        self._include_stop = include_stop
        self._matcher = None if stops is None else StopStringMatcher(stops, include_stop)
        self._min_tokens = sampling.min_tokens
        self._own_stops = sampling.stop_token_ids
        self._with_offsets = sampling.logprobs is not None
        self._count = 0
        self._chars = 0
        self.ended = False

    @property
    def stopped_by_string(self) -> bool:
        """Whether a stop string ended the sequence."""
        return self._matcher is not None and self._matcher.matched is not None

    def push(self, delta: TokenDelta) -> TextDelta:
        """Take the sequence's new tokens and return what they bring."""
        ids = delta.token_ids
        # The token that ended the sequence is one of its tokens, but, as a stop string, none of its text.
        hidden = delta.stop_token_id is not None and not self._include_stop and ids[-1:] == [delta.stop_token_id]
        out = TextDelta(delta.index, "", ids, delta.logprobs, [], delta.finish_reason)
        if self._matcher is None and not self._with_offsets:
            out.text = self._detokenizer.push(ids[:-1] if hidden else ids)
        else:
            self._push_one_by_one(out, len(ids) - hidden)
        if out.finish_reason is not None:
            self._end(out, delta.stop_token_id)
        return out

    def _push_one_by_one(self, out: TextDelta, shown: int) -> None:
        """Detokenize token by token, so that each token's place is known and nothing after a stop string is kept."""
        pieces = []
        for at, token_id in enumerate(out.token_ids):
            self._count += 1
            if self._with_offsets:
                out.offsets.append(self._chars)
            pieces.append(self._match(self._detokenizer.push((token_id,)) if at < shown else ""))
            if self.stopped_by_string:
                out.token_ids = out.token_ids[: at + 1]
                out.logprobs = out.logprobs[: at + 1]
                out.finish_reason = FinishReason.STOP
                break
        out.text = "".join(pieces)

    def _match(self, text: str) -> str:
        self._chars += len(text)
        # Text of the first min_tokens tokens cannot end the sequence.
        if self._matcher is None or self._count <= self._min_tokens:
            return text
        return self._matcher.push(text)

    def _end(self, out: TextDelta, stop_token_id: int | None) -> None:
        self.ended = True
        matcher = self._matcher
        if matcher is None:
            out.text += self._detokenizer.flush()
        else:
            if matcher.matched is None:
                out.text += self._match(self._detokenizer.flush())
            if matcher.matched is not None:
                out.finish_reason = FinishReason.STOP
                out.stop_reason = matcher.matched
                return
            out.text += matcher.flush()
        if stop_token_id in self._own_stops:
            out.stop_reason = stop_token_id
