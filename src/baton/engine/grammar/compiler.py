"""Compiles grammars outside the engine's thread, and keeps those that were used last."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from baton.engine.grammar.base import GrammarBackend, GrammarMatcher, load_backend
from baton.engine.grammar.constraint import Constraint, check_output
from baton.errors import ConfigError, InvalidRequestError
from baton.types import Grammar

log = logging.getLogger(__name__)

MAX_GRAMMARS = 128
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Of the grammars kept, which take a multiple of it."""
MAX_FAMILY_S = 0.25
"""Time in masks beyond what is usual, after which a grammar is kept no more: its lexer has some 10,000 states then, in
about 15 MiB. The next request compiles it anew."""


class GrammarCompiler:
    """Makes constraints. Any thread may.

    A grammar is kept for its owner alone: by the time that another one's request takes nobody learns what it asks for,
    and nobody fills the lexer of another's grammar.

    Args:
        backend: Compiles.
        eos_token_ids: Tokens that end a sequence.
        max_grammars: Kept at most.
        max_text_bytes: Their texts' bytes at most.

    Attributes:
        cache_hits: Grammars found compiled.
        compiled: Grammars compiled.
        refused: Grammars that could not be.
        compile_seconds: Time in compilation.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        eos_token_ids: frozenset[int],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        self.backend = backend
        self._eos = eos_token_ids
        self._max, self._max_bytes, self._bytes = max_grammars, max_text_bytes, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[GrammarMatcher, int]] = OrderedDict()
        self.cache_hits = self.compiled = self.refused = 0
        self.compile_seconds = 0.0

    def find(self, grammar: Grammar, owner: str = "") -> Constraint | None:
        """Return the constraint of a grammar that is compiled, at its beginning; ``None``: it is not.

        Args:
            grammar: The grammar.
            owner: Whose request it is, as the cache salt says.
        """
        key = owner, grammar.digest
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            if _is_spent(found[0]):
                self._drop(key)
                return None
            self._kept.move_to_end(key)
            self.cache_hits += 1
        return Constraint(found[0], grammar, self._eos)

    def constraint(self, grammar: Grammar, output: Sequence[int] = (), owner: str = "") -> Constraint:
        """Return the constraint of a grammar after output tokens; compiles it, in a millisecond as a rule.

        Args:
            grammar: The grammar.
            output: The tokens.
            owner: See :meth:`find`.

        Raises:
            InvalidRequestError: The grammar cannot be compiled or costs too much, or the tokens do not follow it.
        """
        found = self.find(grammar, owner)
        if found is None:
            found = Constraint(self._compile(grammar, owner), grammar, self._eos)
        if output:
            found.restart(output)
        return check_output(found)

    def _compile(self, grammar: Grammar, owner: str) -> GrammarMatcher:
        started = time.perf_counter()
        try:
            matcher = self.backend.compile(grammar)
        except InvalidRequestError:
            self.refused += 1
            raise
        key, size = (owner, grammar.digest), len(grammar.text)
        with self._lock:
            self.compiled += 1
            self.compile_seconds += time.perf_counter() - started
            for old in [old for old, (kept, _) in self._kept.items() if _is_spent(kept)]:
                self._drop(old)
            if key not in self._kept:
                self._kept[key] = matcher, size
                self._bytes += size
            while self._kept and (len(self._kept) > self._max or self._bytes > self._max_bytes):
                self._drop(next(iter(self._kept)))
        return matcher

    def _drop(self, key: tuple[str, str]) -> None:
        _, size = self._kept.pop(key)
        self._bytes -= size

    def __len__(self) -> int:
        """Grammars kept."""
        return len(self._kept)


def _is_spent(matcher: GrammarMatcher) -> bool:
    return matcher.family.spent or matcher.family.seconds > MAX_FAMILY_S


def load_compiler(name: str, model: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarCompiler | None:
    """Return a compiler for a model; ``None``: it has no support for grammars, by configuration or for its tokenizer.

    Args:
        name: ``none``, ``auto``, or that of a backend.
        model: Directory with the tokenizer's files.
        vocab_size: Columns of the logits.
        eos_token_ids: Tokens that end a sequence.

    Raises:
        ConfigError: A backend was named, and cannot work.
    """
    if name == "none":
        return None
    try:
        backend = load_backend(name, model, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    except ConfigError as error:
        if name != "auto":
            raise
        log.warning("no support for grammars: %s", error.message)
        return None
    return GrammarCompiler(backend, eos_token_ids)
