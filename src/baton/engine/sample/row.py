"""What the sampler knows of one sequence, and of the grammar that it is under."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from baton.engine.grammar.constraint import BannedTokens, Constraint, MaskRow
from baton.engine.sample.filters import LEAST_TEMPERATURE
from baton.engine.sample.penalties import LogitEdits, TokenCounts, count_tokens
from baton.types import SamplingParams
from baton_kernels.sampling import MOST_KEPT, RowFilter
from baton_kernels.token_mask import TokenMask

REFUSALS, TRIED_AGAIN = 2, 8
"""After so many tokens in a row that a grammar refused, masks come first, but for every eighth token's."""


class SamplerRow:
    """What the sampler knows of one sequence.

    Attributes:
        params: Its parameters.
        filter: Those of them that the operator takes.
        seed: Seed of this sequence.
        position: Output tokens so far, resumed ones included.
        unfiltered: Whether it draws from all tokens, or from all that its mask has.
        constraint: The grammar that it is under, and where; ``None``: none.
        mask: Tokens that may be chosen next, a bit for each; ``None``: all. Set anew before a step by who constrains
            it.
    """

    __slots__ = (
        "_banned",
        "constraint",
        "counts",
        "edits",
        "filter",
        "mask",
        "params",
        "position",
        "seed",
        "unfiltered",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        stop_ids: Sequence[int],
        prompt: Sequence[int],
        output: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        """Prepare a row.

        Args:
            params: Sampling parameters.
            seed: Seed of this sequence.
            stop_ids: Tokens that end it: banned before ``min_tokens``.
            prompt: Prompt tokens.
            output: Tokens generated before.
            constraint: The grammar that it is under, after ``output``.
        """
        self.params = params
        self.seed = seed
        self.constraint = constraint
        self._banned = (None, None) if constraint is None else _banned_tokens(params, constraint, stop_ids)
        # Under a grammar the mask has the banned tokens, as it knows whether others are left.
        self.edits = LogitEdits(params, () if constraint else stop_ids) if LogitEdits.needed(params) else None
        temperature = 0.0 if params.greedy else max(params.temperature, LEAST_TEMPERATURE)
        self.filter = RowFilter(temperature, max(0, params.top_k), params.top_p, params.min_p)
        self.unfiltered = self.filter.unfiltered
        self.counts: TokenCounts | None = None
        self.mask: TokenMask | None = None
        self._count(prompt, output)

    def restart(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Begin anew with a sequence's tokens."""
        self._count(prompt, output)
        if self.constraint is not None:
            self.constraint.restart(output)

    def _count(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.position = len(output)
        if LogitEdits.counted(self.params):
            self.counts = count_tokens(self.params, prompt, output)

    def append(self, token: int) -> None:
        """Take note of the sequence's next token."""
        self.position += 1
        if self.counts is not None:
            self.counts.add(token)
        if self.constraint is not None:
            self.constraint.append(token)

    def after(self, token: int) -> SamplerRow:
        """Return a row as this one would be after one more token; this one stays as it is."""
        row = self.unguided()
        row.counts = None if self.counts is None else self.counts.copy()
        row.constraint = None if self.constraint is None else self.constraint.fork()
        row.append(token)
        return row

    def later(self, count: int) -> SamplerRow:
        """Return the row of this one's token after ``count`` more, of whichever: without a grammar, nothing counted."""
        row = self.unguided()
        row.position += count
        return row

    def unguided(self) -> SamplerRow:
        """Return a row that draws alike, but for its grammar."""
        row = SamplerRow.__new__(SamplerRow)
        row.params, row.seed, row.edits, row.filter = self.params, self.seed, self.edits, self.filter
        row.unfiltered = self.unfiltered
        row._banned, row.position, row.counts = self._banned, self.position, self.counts
        row.mask = row.constraint = None
        return row

    @property
    def tries_first(self) -> bool:
        """Whether a token is to be chosen before its mask is known: that will probably do.

        It need not: the same token is chosen if the mask is there before.
        """
        constraint, params = self.constraint, self.params
        if constraint is None or params.logprobs is not None:
            return False
        if params.top_k > MOST_KEPT and params.top_p >= 1.0 and params.min_p <= 0.0 and not params.greedy:
            return False
        return constraint.refusals < REFUSALS or self.position % TRIED_AGAIN == 0

    @property
    def error(self) -> str:
        """Why the grammar lets no token be chosen; empty: it does, or there is none."""
        constraint = self.constraint
        return "" if constraint is None or not constraint.error else f"{constraint.grammar}: {constraint.error}"

    def mask_row(self, constraint: Constraint) -> MaskRow:
        """Return what the mask of its next token is computed from."""
        return MaskRow(constraint, self._banned[self.position >= self.params.min_tokens])


def _banned_tokens(
    params: SamplingParams, constraint: Constraint, stop_ids: Sequence[int]
) -> tuple[BannedTokens | None, BannedTokens | None]:
    """Return what is forbidden before ``min_tokens``, and from then on."""
    ends = constraint.eos_token_ids if params.ignore_eos else frozenset()
    early = ends.union(stop_ids) if params.min_tokens else ends
    return _banned(early), _banned(ends)


@functools.lru_cache(maxsize=256)
def _banned(token_ids: frozenset[int]) -> BannedTokens | None:
    """Return what most sequences share, as they end alike."""
    return BannedTokens(token_ids) if token_ids else None
