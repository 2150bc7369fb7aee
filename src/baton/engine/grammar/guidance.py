"""Grammars by llguidance: compiled in milliseconds, masks in some ten microseconds, without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
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


class GuidanceMatcher:
    """A :class:`~baton.engine.grammar.base.GrammarMatcher`.

    Args:
        inner: llguidance's matcher.
        ends: Tokens that end a sequence.
        origin: Matcher at the beginning of the grammar; default: ``inner`` is there.
        taken: Tokens consumed since then.
        family: Family of the matcher that it is forked from; default: a new one.
    """

    __slots__ = ("_ends", "_origin", "_taken", "family", "inner")

    def __init__(
        self,
        inner: LLMatcher,
        ends: frozenset[int],
        origin: LLMatcher | None = None,
        taken: Sequence[int] = (),
        family: MatcherFamily | None = None,
    ) -> None:
        self.inner = inner
        self._ends = ends
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
        if token_id in self._ends:  # the library's own answer is about one of them
            return self.inner.is_accepting()
        return self.inner.validate_tokens([token_id]) == 1

    def forced_tokens(self) -> list[int]:
        forced = self.inner.compute_ff_tokens()
        # A literal may be written like an added token, which the grammar does not know by its text: it is spelled then.
        return forced[: self.inner.validate_tokens(forced)] if forced else forced

    def roll_back(self, count: int) -> None:
        del self._taken[max(0, len(self._taken) - count) :]
        if not self.inner.rollback(count):  # it cannot where something has a bound in tokens, as reasoning may
            self.inner = self._origin.deep_copy()
            self.inner.consume_tokens(self._taken)

    def fork(self) -> GuidanceMatcher:
        return GuidanceMatcher(self.inner.deep_copy(), self._ends, self._origin, self._taken, self.family)


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
        self._ends = eos_token_ids

    def compile(self, grammar: Grammar) -> GuidanceMatcher:
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # forks find what it computed
        if matcher.is_error():
            raise InvalidRequestError(f"grammar: {plain_error(matcher.get_error())}", field="grammar")
        return GuidanceMatcher(matcher, self._ends)

    def fill_mask(self, matcher: GuidanceMatcher, mask: npt.NDArray[np.uint32]) -> None:
        matcher.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def fill_masks(self, matchers: Sequence[GuidanceMatcher], masks: npt.NDArray[np.uint32]) -> None:
        count, words = masks.shape
        rows = [(matcher.inner, at) for at, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * words, count)
