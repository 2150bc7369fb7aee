"""The grammar backend protocols: what the engine needs for guided decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from baton.plugins import PluginGroup
from baton.types import Grammar

GRAMMAR_BACKENDS = PluginGroup(
    "grammar_backend", "baton.grammars", {"llguidance": "baton.engine.grammar.guidance:GuidanceBackend"}
)
"""Callables (model directory, ``vocab_size``, ``eos_token_ids``) that return a :class:`GrammarBackend`.

A new built-in one is a file and a line here."""


@dataclass(slots=True)
class MatcherFamily:
    """Shared by all forks of one matcher: its states take memory and count towards one limit.

    Attributes:
        seconds: Time that masks took beyond the usual; it went into new states.
        spent: Whether one of the matchers has reached a limit.
    """

    seconds: float = 0.0
    spent: bool = False


class GrammarMatcher(Protocol):
    """Position of one sequence in its grammar. The state depends on the grammar and the tokens alone.

    Attributes:
        family: State shared with all forks of the same matcher.
        error: Why it does not follow the grammar any more (a limit was reached, a token was forbidden); empty: it does.
        complete: Whether only the end can follow.
    """

    @property
    def family(self) -> MatcherFamily: ...

    @property
    def error(self) -> str: ...

    @property
    def complete(self) -> bool: ...

    def consume(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens; ``False``: one of them is forbidden, and :attr:`error` is set from then on."""

    def try_consume(self, token_id: int) -> bool:
        """Advance by a token if the grammar allows it next; return whether it does."""

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next."""

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow, whatever is sampled; often none."""

    def roll_back(self, count: int) -> None:
        """Remove the last ``count`` tokens."""

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
            matchers: R matchers that :meth:`compile` returned, or forks of those.
            masks: [R, ceil(vocab / 32)], written: bit ``t % 32`` of word ``t // 32`` is 1 where token ``t`` may be
                next; those that end a sequence may be where the grammar is satisfied. A row whose matcher has an
                error afterwards means nothing.
        """
