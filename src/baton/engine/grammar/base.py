"""What the engine needs of whatever knows grammars, and how an implementation is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from baton.plugins import PluginGroup
from baton.types import Grammar

GRAMMAR_BACKENDS = PluginGroup(
    "grammar_backend", "baton.grammars", {"llguidance": "baton.engine.grammar.guidance:GuidanceBackend"}
)
"""Callables that :func:`load_backend` calls: a new built-in one is a file and a line here."""


@dataclass(slots=True)
class MatcherFamily:
    """What all matchers share that were forked from one: states that were found, in memory and against a limit.

    Attributes:
        seconds: Time that their masks took beyond what is usual; it went into such states.
        spent: One of them has reached a limit.
    """

    seconds: float = 0.0
    spent: bool = False


class GrammarMatcher(Protocol):
    """Where one sequence is in its grammar. Its state follows from the grammar and the tokens alone.

    Attributes:
        family: What it shares with the matcher it was forked from, and with all others that were.
        error: Why it follows the grammar no more (a limit was reached, a token was forbidden); empty: it does.
        complete: Whether nothing can follow but the end.
    """

    @property
    def family(self) -> MatcherFamily:
        """See the attributes."""

    @property
    def error(self) -> str:
        """See the attributes."""

    @property
    def complete(self) -> bool:
        """See the attributes."""

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Go on with tokens; ``False``: one of them is forbidden, and :attr:`error` says so from now on."""

    def try_consume(self, token_id: int) -> bool:
        """Go on with a token if it may come next, else stay; returns whether it may."""

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next."""

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow, whatever is sampled; often none."""

    def roll_back(self, count: int) -> None:
        """Take back the last ``count`` tokens."""

    def fork(self) -> Self:
        """Return another one in the same state."""


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer; any thread may."""

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the beginning of a grammar, with what its first mask needs computed.

        Raises:
            InvalidRequestError: The grammar is wrong, or costs too much; names the field ``grammar``.
        """

    def fill_mask(self, matcher: Any, mask: npt.NDArray[np.uint32]) -> None:
        """Compute one row as :meth:`fill_masks` does, in the calling thread."""

    def fill_masks(self, matchers: Sequence[Any], masks: npt.NDArray[np.uint32]) -> None:
        """Compute the masks of many rows, without the interpreter's lock.

        Args:
            matchers: Of :meth:`compile`, or forks of those; R of them.
            masks: [R, ceil(vocab / 32)], written: bit ``t % 32`` of word ``t // 32`` is 1 where token ``t`` may be
                next; those that end a sequence may be where the grammar is satisfied. A row whose matcher has an
                error afterwards means nothing.
        """


def load_backend(name: str, model: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
    """Return a backend for a model.

    Args:
        name: ``auto``, or that of a backend.
        model: Directory with the tokenizer's files.
        vocab_size: Columns of the logits.
        eos_token_ids: Tokens that end a sequence.

    Raises:
        ConfigError: There is no such backend, or it cannot work with this tokenizer.
    """
    make = GRAMMAR_BACKENDS.load("llguidance" if name == "auto" else name, other_names=["auto"])
    backend: GrammarBackend = make(model, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return backend
