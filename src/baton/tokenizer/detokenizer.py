"""Token ids to text, piece by piece, without ever taking a character back.

:class:`IncrementalDetokenizer` turns a growing sequence of ids into text. :class:`SequenceText` is what a request needs
of it: the text of one sequence, ended by stop strings, with the offsets that logprobs want.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from baton.tokenizer.tokenizer import Tokenizer
from baton.types import FinishReason, SamplingParams, TokenLogprob


class StopStrings:
    """A set of stop strings, compiled once and shared by the sequences of a request.

    An Aho-Corasick automaton: one step per character, whatever the number and length of the strings. A state is the
    longest end of the text read so far that begins some stop string, so its depth is exactly what must be held back.
    """

    __slots__ = ("_depth", "_fail", "_found", "_next", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        """Compile.

        Args:
            strings: The stop strings; none may be empty.

        Raises:
            ValueError: One is empty.
        """
        if not all(strings):
            raise ValueError("a stop string must not be empty")
        self.strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, 1):
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(depth)
                self._fail.append(0)
                self._found.append(None)
            state = following
        self._found[state] = string

    def _link(self) -> None:
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for char, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                todo.append(following)
            if self._found[state] is None:
                self._found[state] = self._found[self._fail[state]]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def depth(self, state: int) -> int:
        """Return how many of the last characters could begin a stop string."""
        return self._depth[state]

    def match_at(self, state: int) -> str | None:
        """Return the longest stop string that ends at this state."""
        return self._found[state]


class StopStringMatcher:
    """Lets text through until a stop string is complete, and holds back what could begin one.

    The match is the one that is complete first; of several that are complete at the same character, the longest. So
    the result does not depend on how the text was cut into pieces.

    Attributes:
        matched: The stop string that was found, or ``None``.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str] | StopStrings, include: bool = False) -> None:
        """Begin a stream.

        Args:
            stops: The stop strings, compiled or not.
            include: Whether the stop string itself belongs to the text.
        """
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what is certain to come before any stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        stops = self._stops
        state = self._state
        step = stops.step
        match_of_state = stops.match_at
        for at, char in enumerate(text, 1):
            state = step(state, char)
            stop = match_of_state(state)
            if stop is not None:
                return self._match(stop, self._held + text[:at])
        self._state = state
        text = self._held + text
        keep = stops.depth(state)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def _match(self, stop: str, text: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]

    def flush(self) -> str:
        """Return what was held back: the text has ended without a match. Resets the matcher."""
        held = self._held
        self._held = ""
        self._state = 0
        return held


_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""Most tokens that one character is spread over; UTF-8 needs 4 bytes, so more will never complete one."""


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens.

    What :meth:`push` returned, put together with what :meth:`flush` returns, is the tokenizer's ``decode`` of all ids,
    whatever the portions they came in. An incomplete character is held back until its last byte is there.
    """

    __slots__ = ("_held", "_hidden", "_strip", "_texts", "_token_bytes", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a sequence.

        Args:
            tokenizer: Tokenizer of the ids.
            skip_special_tokens: Leave special tokens out of the text.
            context: Ids that come before and whose text is not wanted, when the text continues theirs: the last eight
                are looked at. Without, a tokenizer that drops the space at the start of a text drops it here.
            shown: Special tokens that are not left out.
        """
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._token_bytes = tokenizer.token_bytes
        self._held = b""
        self._strip = 0
        self._texts = tokenizer.whole_texts
        self._window: _WindowDecoder | None = None
        """Decodes where a text is not the concatenation of its tokens' bytes."""
        if tokenizer.scheme is None:
            self._window = _WindowDecoder(tokenizer, self._shown(context[-_MAX_HELD:]))
        elif tokenizer.scheme.strip_start and not self._shown(context[-_MAX_HELD:]):
            self._strip = tokenizer.scheme.strip_start

    def _shown(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._hidden]

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids and return the text that is complete with them."""
        if not self._hidden.isdisjoint(ids):
            ids = self._shown(ids)
        if self._window is not None:
            return self._window.push(ids)
        if len(ids) == 1 and not self._held and not self._strip and (known := self._texts.get(ids[0])) is not None:
            return known
        data = self._held + b"".join(map(self._token_bytes, ids))
        # What an incremental decoder calls: one of those for each sequence costs more than the decoding.
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        if len(ids) == 1 and 0 < used == len(data) == len(self._token_bytes(ids[0])):
            self._texts[ids[0]] = text
        return self._stripped(text) if self._strip else text

    @property
    def between_texts(self) -> bool:
        """Whether the next token's text, if it is whole characters, is :attr:`Tokenizer.whole_texts`' as it stands."""
        return self._window is None and not self._held and not self._strip

    def flush(self) -> str:
        """Return what was held back: no more ids come. Bytes that are no character become U+FFFD."""
        if self._window is not None:
            return self._window.flush()
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


class TokenDelta(msgspec.Struct):
    """New tokens of a sequence, as an instance sends them.

    Attributes:
        index: Index of the sequence within the request.
        logprobs: Parallel to ``token_ids``, if asked for.
        finish_reason: Why it ended, if it did.
        stop_token_id: The token that ended it, if one did.
    """

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class TextDelta(msgspec.Struct):
    """What one message brought to one sequence.

    Attributes:
        text: New text; empty while a character or a possible stop string is incomplete.
        token_ids: New tokens, a stop token included; none after the token that completed a stop string.
        logprobs: Parallel to ``token_ids``, if asked for.
        offsets: Parallel to ``token_ids``, if ``logprobs`` were asked for: characters of the sequence before the token.
        finish_reason: Stop or length when the sequence ended.
        stop_reason: The stop string or the stop token (asked for by id) that ended it.
        anchors: Places in ``text`` where tokens begin that are anchors of the model's dialects.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    offsets: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    anchors: Sequence[int] = ()


class SequenceText:
    """Turns the tokens of one sequence into text.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The prompt's tokens, if the text continues the prompt's; empty if it starts a new text.
        sampling: The request's sampling parameters.
        stops: Stop strings of the request; ``None``: none.
        skip_special_tokens: Whether special tokens have no text.
        include_stop: Whether the stop string or token that ended the sequence belongs to its text.
        shown: Special tokens that have text all the same.
        anchors: Tokens whose places in the text are told.

    Attributes:
        ended: Whether the sequence has ended; it takes no more tokens then.
        push_plain: Takes tokens behind which the sequence goes on, none of them an anchor, and returns their text; only
            for sequences without stop strings and log probabilities.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stops: StopStrings | None = None,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        shown: frozenset[int] = frozenset(),
        anchors: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt, shown)
        self._tokenizer = tokenizer
        self._anchors = anchors
        self._places: list[int] = []
        """Where anchors begin whose text was not returned yet, counted as :attr:`_chars`."""
        self._returned = 0
        """Characters that were returned, of those that are counted in :attr:`_chars`."""
        self.push_plain = self._detokenizer.push
        self._include_stop = include_stop
        self._matcher = None if stops is None else StopStringMatcher(stops, include_stop)
        self._min_tokens = sampling.min_tokens
        self._own_stops = sampling.stop_token_ids
        self._with_offsets = sampling.logprobs is not None
        self._count = 0
        self._chars = 0
        self.ended = False

    @property
    def between_texts(self) -> bool:
        return not self.ended and self._detokenizer.between_texts

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
        if self._matcher is None and not self._with_offsets and self._anchors.isdisjoint(ids):
            out.text = self._detokenizer.push(ids[:-1] if hidden else ids)
            self._chars += len(out.text)
        else:
            self._push_one_by_one(out, len(ids) - hidden)
        if out.finish_reason is not None:
            self._end(out, delta.stop_token_id)
        self._returned += len(out.text)
        if self._places:
            begin = self._returned - len(out.text)
            out.anchors = [at - begin for at in self._places if at < self._returned]
            self._places = [at for at in self._places if at >= self._returned]
        return out

    def _push_one_by_one(self, out: TextDelta, shown: int) -> None:
        """Detokenize token by token, so that each token's place is known and nothing after a stop string is kept."""
        pieces = []
        for at, token_id in enumerate(out.token_ids):
            self._count += 1
            if self._with_offsets:
                out.offsets.append(self._chars)
            text = self._detokenizer.push((token_id,)) if at < shown else ""
            if text and token_id in self._anchors:
                # In front of it may be U+FFFD, of a character that was not complete.
                self._places.append(self._chars + len(text) - len(self._tokenizer.token_text(token_id)))
            pieces.append(self._match(text))
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
            out.text += self._match(self._detokenizer.flush())
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
