"""The text of one sequence: tokens in, text out, ended by stop strings."""

from __future__ import annotations

from baton.text import IncrementalDetokenizer, StopStringMatcher
from baton.types import FinishReason
from baton_router.core import RoutedDelta
from baton_router.text_request import ChatPrompt, PreparedRequest, TextDelta

_CONTEXT_TOKENS = 8


class SequenceText:
    """Follows one sequence of a request.

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

    def __init__(self, prepared: PreparedRequest) -> None:
        request, routed = prepared.request, prepared.routed
        # A completion's text continues its prompt; an answer begins anew, unless it goes on with a given message.
        prompt = request.prompt
        continues = prompt.continue_final_message if isinstance(prompt, ChatPrompt) else True
        context = routed.prompt_token_ids[-_CONTEXT_TOKENS:] if continues else ()
        self._detokenizer = IncrementalDetokenizer(
            prepared.text_model.tokenizer, request.skip_special_tokens, context=context
        )
        self._include_stop = request.include_stop
        self._matcher = None if prepared.stops is None else StopStringMatcher(prepared.stops, request.include_stop)
        self._min_tokens = routed.sampling.min_tokens
        self._own_stops = frozenset(routed.sampling.stop_token_ids)
        self._with_offsets = routed.sampling.logprobs is not None
        self._count = 0
        self._chars = 0
        self.ended = False

    @property
    def stopped_by_string(self) -> bool:
        """Whether a stop string ended the sequence."""
        return self._matcher is not None and self._matcher.matched is not None

    def push(self, delta: RoutedDelta) -> TextDelta:
        """Take the sequence's new tokens and return what they bring."""
        ids = delta.token_ids
        # The token that ended the sequence is one of its tokens, but, as a stop string, none of its text.
        hidden = delta.stop_token_id is not None and not self._include_stop and ids[-1:] == [delta.stop_token_id]
        shown = len(ids) - 1 if hidden else len(ids)
        out = TextDelta(delta.index, "", ids, delta.logprobs, finish_reason=delta.finish_reason)
        if self._matcher is None and not self._with_offsets:
            out.text = self._detokenizer.push(ids[:shown] if hidden else ids)
            self._count += len(ids)
        else:
            self._push_one_by_one(out, shown)
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
        if not self.stopped_by_string:
            out.text += self._match(self._detokenizer.flush())
        if self._matcher is not None and self._matcher.matched is not None:
            out.finish_reason = FinishReason.STOP
            out.stop_reason = self._matcher.matched
            return
        if self._matcher is not None:
            out.text += self._matcher.flush()
        if stop_token_id in self._own_stops:
            out.stop_reason = stop_token_id
