"""Grammars by llguidance: compiled in milliseconds, masks in some ten microseconds, without the interpreter's lock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from baton.engine.grammar.base import MatcherFamily
from baton.errors import ConfigError, InvalidRequestError
from baton.grammar.validation import LIMITS, plain_error
from baton.tokenizer.model_files import read_file
from baton.types import Grammar

_PLAIN = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    "[a-z]+",
    *(f"{_PLAIN}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40)),
    f"{_PLAIN}+",
]
"""Tokens that are looked at together: where a grammar allows all that match one of these, as in strings that have room
left, none of them is looked at alone. The library's own have 10 and 30 only: with these, masks along the documents of
``benchmarks/grammar.py`` take a third less."""


class Markers:
    """Tokens that grammars name by their ids alone: special ones, and added ones such as ``<tool_call>``.

    Where text is forced, the library tokenizes it as the tokenizer does, which takes text that is written like a marker
    for the marker. The grammar wants the text, so that it is spelled with ordinary tokens there.

    Args:
        tokenizer: llguidance's tokenizer.
        added: Text of the tokenizer's added tokens by their ids.
        ends: Tokens that end a sequence.

    Attributes:
        ends: The same.
    """

    __slots__ = ("_added", "_bits", "_tokenizer", "_words", "ends")

    def __init__(self, tokenizer: LLTokenizer, added: Mapping[int, bytes], ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._added = added
        self.ends = ends
        words = dict[int, int]()
        for token in ends.union(filter(tokenizer.is_special_token, range(tokenizer.vocab_size))):
            words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
        self._words = np.array(list(words), np.intp)
        self._bits = np.array(list(words.values()), np.uint32)

    def correct(self, matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.uint32]) -> None:
        """Replace markers that stand for forced text in masks by the first token of its spelling.

        Args:
            matchers: R matchers.
            masks: [R, words] their masks, written.
        """
        marked = masks[:, self._words] & self._bits
        rows, places = marked.nonzero()
        for row, at in dict(zip(rows.tolist(), places.tolist(), strict=True)).items():
            word = int(marked[row, at])
            marker = 32 * int(self._words[at]) + (word & -word).bit_length() - 1
            matcher = matchers[row]
            if matcher.allows(marker) or matcher.error:
                continue
            masks[row] = 0  # the mask was that of forced text: it has no other token
            for token in matcher.spelled(marker):
                masks[row, token >> 5] = 1 << (token & 31)

    def spell(self, text: bytes, marker: int, inner: LLMatcher) -> list[int]:
        """Return the first ordinary token of forced text that begins with a marker's; none if there is none."""
        name = self._added.get(marker, b"")
        for size in range(max(text.find(name), 0) + len(name) - 1, 0, -1):  # a part that does not spell it
            first = self._tokenizer.tokenize_bytes(text[:size])[:1]
            if inner.validate_tokens(first):
                return first
        return []


class GuidanceMatcher:
    """A :class:`~baton.engine.grammar.base.GrammarMatcher`.

    Args:
        inner: llguidance's matcher.
        markers: Tokens that are no text.
        origin: Matcher at the beginning of the grammar; default: ``inner`` is there.
        taken: Tokens consumed since then.
        family: Family of the matcher that it is forked from; default: a new one.
    """

    __slots__ = ("_markers", "_origin", "_taken", "family", "inner")

    def __init__(
        self,
        inner: LLMatcher,
        markers: Markers,
        origin: LLMatcher | None = None,
        taken: Sequence[int] = (),
        family: MatcherFamily | None = None,
    ) -> None:
        self.inner = inner
        self._markers = markers
        self.family = family or MatcherFamily()
        self._origin = inner.deep_copy() if origin is None else origin
        self._taken = list(taken)

    @property
    def error(self) -> str:
        if not self.inner.is_error():
            return ""
        message = self.inner.get_error()
        # Forks have one lexer, whose states are counted together: who comes after finds it full.
        self.family.spent = self.family.spent or "lexer error" in message
        return plain_error(message) or "no token may follow"

    @property
    def complete(self) -> bool:
        return self.inner.is_stopped() and not self.inner.is_error()

    def consume(self, token_ids: Sequence[int]) -> bool:
        taken = self.inner.consume_tokens(list(token_ids))
        if taken:
            self._taken += token_ids
        return taken

    def try_consume(self, token_id: int) -> bool:
        taken = self.inner.try_consume_tokens([token_id]) == 1
        if taken:
            self._taken.append(token_id)
        return taken

    def allows(self, token_id: int) -> bool:
        if token_id in self._markers.ends:  # the library's own answer is about one of them
            return self.inner.is_accepting()
        return self.inner.validate_tokens([token_id]) == 1

    def forced_tokens(self) -> list[int]:
        forced = self.inner.compute_ff_tokens()
        if not forced:
            return forced
        return forced[: self.inner.validate_tokens(forced)] or self.spelled(forced[0])

    def spelled(self, marker: int) -> list[int]:
        """Return the first ordinary token of forced text that is written like a marker; none if there is none."""
        return self._markers.spell(self.inner.compute_ff_bytes(), marker, self.inner)

    def roll_back(self, count: int) -> None:
        del self._taken[max(0, len(self._taken) - count) :]
        if not self.inner.rollback(count):  # it cannot where something has a bound in tokens, as reasoning may
            self.inner = self._origin.deep_copy()
            self.inner.consume_tokens(self._taken)

    def fork(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.inner.deep_copy(), self._markers, self._origin, self._taken, self.family)


class GuidanceBackend:
    """A :class:`~baton.engine.grammar.base.GrammarBackend`.

    Args:
        model: Directory with ``tokenizer.json``, or a GGUF file.
        vocab_size: Columns of the logits.
        eos_token_ids: Tokens that end a sequence.

    Raises:
        ConfigError: There is no ``tokenizer.json``, or it cannot be used.
    """

    def __init__(self, model: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        content = read_file(model / "tokenizer.json")
        if content is None:
            raise ConfigError(f"{model} has no tokenizer.json, which grammars need", field="grammar_backend")
        if not eos_token_ids:
            raise ConfigError("the model has no token that ends a sequence; grammars need one", field="grammar_backend")
        try:
            self._tokenizer = LLTokenizer(
                content.decode(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids), slices=SLICES
            )
        except Exception as error:  # whatever a tokenizer of an unknown kind leads to
            raise ConfigError(f"grammars cannot use this tokenizer: {error}", field="grammar_backend") from error
        self._executor = LLExecutor()
        added = {token["id"]: token["content"].encode() for token in json.loads(content).get("added_tokens") or ()}
        self._markers = Markers(self._tokenizer, added, eos_token_ids)

    def compile(self, grammar: Grammar) -> GuidanceMatcher:
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # forks find what it computed
        if matcher.is_error():
            raise InvalidRequestError(f"grammar: {plain_error(matcher.get_error())}", field="grammar")
        return GuidanceMatcher(matcher, self._markers)

    def fill_mask(self, matcher: GuidanceMatcher, mask: npt.NDArray[np.uint32]) -> None:
        matcher.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._markers.correct((matcher,), mask[np.newaxis])

    def fill_masks(self, matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.uint32]) -> None:
        count, words = masks.shape
        rows = [(matcher.inner, at) for at, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * words, count)
        self._markers.correct(matchers, masks)
