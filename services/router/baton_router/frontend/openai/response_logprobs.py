"""Log probabilities in ``/v1/responses``: those of the tokens that an answer's text consists of, and of no others."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from baton.dialects import DialectParser, Event, Reasoning, Text
from baton.types import TokenLogprob
from baton_router.frontend.openai.answer import parse_delta
from baton_router.processor.text_request import TextDelta

_FIELDS = ("token", "logprob")


class LogprobAligner:
    """Parses an answer token by token and finds the tokens of its text: not of reasoning, calls, or what marks them.

    Args:
        parser: Parser of calls and reasoning; ``None``: all of it is text.
    """

    def __init__(self, parser: DialectParser | None) -> None:
        self._parser = parser
        self._tokens: deque[tuple[int, TokenLogprob]] = deque()
        """Tokens that may belong to text that comes, with the characters before them."""
        self._text = ""
        """Text that is in no event yet."""
        self._chars_before = 0

    def parse_delta(self, delta: TextDelta) -> list[tuple[Event, list[TokenLogprob]]]:
        """Return the events of more text of a sequence, each with the tokens of its text.

        Args:
            delta: The text with its log probabilities and offsets; the last one has a finish reason.
        """
        self._tokens += zip(delta.offsets, delta.logprobs, strict=True)
        begin = self._chars_before + len(self._text)
        end = begin + len(delta.text)
        cuts = {begin}
        for offset, _ in reversed(self._tokens):
            if offset <= begin:
                break
            if offset < end:
                cuts.add(offset)
        found: list[tuple[Event, list[TokenLogprob]]] = []
        for at, stop in itertools.pairwise((*sorted(cuts), end)):
            anchors = [begin + anchor - at for anchor in delta.anchors if at <= begin + anchor < stop]
            text = delta.text[at - begin : stop - begin]
            finish = delta.finish_reason if stop == end else None
            events = parse_delta(self._parser, TextDelta(0, text, [], finish_reason=finish, anchors=anchors))
            self._text += text
            found += zip(events, self._assign(events), strict=True)
        return found

    def _assign(self, events: Sequence[Event]) -> list[list[TokenLogprob]]:
        """Return the tokens of each event; those before them are forgotten."""
        if not events:
            return []
        end = len(self._text) - (0 if self._parser is None else self._parser.num_held)
        places = []
        for event in reversed(events):
            text = event.text if isinstance(event, Text | Reasoning) else ""
            at = self._text.rfind(text, 0, end)
            if at < 0:  # the parser put a line's end between two messages
                text = text.lstrip("\n")
                at = self._text.rfind(text, 0, end)
            if at < 0:
                at, text = end, ""
            places.append((at, at + len(text)))
            end = at
        places.reverse()
        tokens = [
            self._pop_tokens(*place) if isinstance(event, Text) else []
            for event, place in zip(events, places, strict=True)
        ]
        told = places[-1][1]
        self._text = self._text[told:]
        self._chars_before += told
        waiting = self._tokens
        while len(waiting) > 1 and waiting[0][0] < self._chars_before and waiting[1][0] <= self._chars_before:
            waiting.popleft()
        return tokens

    def _pop_tokens(self, begin: int, end: int) -> list[TokenLogprob]:
        """Forget the tokens that begin before ``end``; return those of them that reach behind ``begin``."""
        tokens = self._tokens
        popped = []
        while tokens and tokens[0][0] < self._chars_before + end:
            offset, item = tokens.popleft()
            is_before = offset < self._chars_before + begin
            if not (is_before and tokens and tokens[0][0] <= self._chars_before + begin):
                popped.append(item)
        return popped


def event_logprobs(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log probabilities as events have them: without the tokens' bytes, which only parts of messages have.

    Args:
        entries: The entries as parts have them.
    """
    return [
        {
            **{name: entry[name] for name in _FIELDS},
            "top_logprobs": [{name: top[name] for name in _FIELDS} for top in entry["top_logprobs"]],
        }
        for entry in entries
    ]
