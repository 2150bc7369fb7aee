"""Sampling state of one sequence, and edits of single logits: bias, banned tokens, and the three penalties.

All of it is sparse: per row a few (token, value) pairs against a vocabulary of up to hundreds of thousands. So the
pairs of all rows are joined, each kind of edit is one gather and one scatter, and a row without edits costs nothing.

For a token with ``n`` occurrences in the output, logit ``x``:

* repetition (tokens of prompt or output): ``x / r`` if ``x > 0``, else ``x * r``
* frequency and presence (tokens of the output): ``x - n * frequency - presence``
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.grammar.constraint import BannedTokens, Constraint, MaskRow
from baton.types import SamplingParams
from baton_kernels.sampling import MOST_KEPT, RowFilter
from baton_kernels.token_mask import TokenMask, Upload, upload_to

Pairs = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class TokenCounts:
    """The distinct tokens of a sequence, each with its number of occurrences in the output.

    Kept up to date token by token, so that a step costs the same at any length.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int], capacity: int = 64) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)
        for token in prompt:
            self._slot(token)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more output token."""
        slot = self._slot(token)  # may replace the arrays
        self._counts[slot] += 1.0

    def copy(self) -> TokenCounts:
        """Return another one with the same counts."""
        other = TokenCounts.__new__(TokenCounts)
        other._slots = self._slots.copy()
        other._ids = self._ids.copy()
        other._counts = self._counts.copy()
        return other

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
        return slot

    @property
    def pairs(self) -> Pairs:
        """Token ids int64 [N] and their output counts float32 [N]."""
        count = len(self._slots)
        return self._ids[:count], self._counts[:count]


class LogitEdits:
    """One sequence's edits; immutable but for the token counts.

    Attributes:
        min_tokens: Output tokens before which :attr:`banned` can't be chosen.
    """

    def __init__(self, params: SamplingParams, stop_ids: Sequence[int]) -> None:
        self.bias: Pairs | None = None
        if params.logit_bias:
            items = sorted(params.logit_bias.items())
            self.bias = (np.array([k for k, _ in items], np.int64), np.array([v for _, v in items], np.float32))
        self.min_tokens = params.min_tokens if stop_ids else 0
        self.banned = np.array(sorted(set(stop_ids)), np.int64)
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters edit logits at all."""
        return bool(params.logit_bias or params.min_tokens or LogitEdits.counted(params))

    @staticmethod
    def counted(params: SamplingParams) -> bool:
        """Whether token counts are needed."""
        return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def count_tokens(params: SamplingParams, prompt: Iterable[int], output: Iterable[int]) -> TokenCounts:
    """Count what the penalties need: the prompt matters to the repetition penalty alone."""
    return TokenCounts(prompt if params.repetition_penalty != 1.0 else (), output)


def apply_edits(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, LogitEdits, TokenCounts | None, int]],
    upload: Upload | None = None,
) -> None:
    """Edit logits in place.

    Args:
        logits: float32 [R, vocab].
        rows: For each row with edits: row, edits, token counts, output tokens so far.
        upload: To the logits' device; default: copies that the host waits for.
    """
    take = upload or upload_to(logits.device)
    bias = [(row, *edits.bias) for row, edits, _, _ in rows if edits.bias is not None]
    if bias:
        at, values = _join(bias, take)
        logits[at] += values
    banned = [
        (row, edits.banned, np.full(len(edits.banned), -np.inf, np.float32))
        for row, edits, _, done in rows
        if done < edits.min_tokens
    ]
    if banned:
        at, values = _join(banned, take)
        logits[at] = values
    counted = [(row, edits, *counts.pairs) for row, edits, counts, _ in rows if counts is not None]
    if counted:
        _penalize(logits, counted, take)


def _penalize(
    logits: torch.Tensor,
    rows: Sequence[tuple[int, LogitEdits, npt.NDArray[np.int64], npt.NDArray[np.float32]]],
    upload: Upload,
) -> None:
    at, counts = _join([(row, ids, n) for row, _, ids, n in rows], upload)
    numbers = np.array([(e.repetition, e.frequency, e.presence) for _, e, _, _ in rows], np.float32)
    (spread,) = upload(np.repeat(numbers.T, [len(ids) for _, _, ids, _ in rows], axis=1))
    repetition, frequency, presence = spread
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * frequency + (counts > 0) * presence
    logits[at] = values


def _join(
    rows: Sequence[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]], upload: Upload
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return ((row indices, token ids), values) of all pairs."""
    at = np.repeat(np.array([row for row, _, _ in rows], np.int64), [len(ids) for _, ids, _ in rows])
    ids = np.concatenate([ids for _, ids, _ in rows])
    values = np.concatenate([values for _, _, values in rows])
    places, tokens, numbers = upload(at, ids, values)
    return (places, tokens), numbers


LEAST_TEMPERATURE = 1e-30
"""Temperatures below it are treated as this one: the row's greatest logit wins."""
REFUSALS = 2
"""After so many refused tokens in a row, masks are computed before tokens are chosen, ..."""
TRIED_AGAIN = 8
"""... except for every eighth token."""


class SamplerRow:
    """Sampling state of one sequence.

    Attributes:
        params: Sampling parameters of the request.
        filter: Temperature, top-k, top-p and min-p, as the sampling operator takes them.
        seed: Seed of this sequence.
        position: Output tokens so far, resumed ones included.
        unfiltered: Whether no filter applies: it draws from all tokens, or all that its mask allows.
        constraint: Grammar of the sequence and its position there; ``None``: none.
        mask: Tokens that may be chosen next, a bit for each; ``None``: all. Set before
            each step.
    """

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
        """Start again from a sequence's tokens."""
        self._count(prompt, output)
        if self.constraint is not None:
            self.constraint.restart(output)

    def _count(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.position = len(output)
        if LogitEdits.counted(self.params):
            self.counts = count_tokens(self.params, prompt, output)

    def append(self, token: int) -> None:
        """Append the sequence's next token."""
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
        row.__dict__.update(self.__dict__)
        row.mask = None
        row.constraint = None
        return row

    @property
    def tries_first(self) -> bool:
        """Whether a token is to be chosen before its mask is known: that will probably do.

        It need not: the same token is chosen if the mask is there before.
        """
        constraint = self.constraint
        params = self.params
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


def mask_rows(rows: Iterable[SamplerRow]) -> list[MaskRow]:
    """Return what the masks of the next tokens of those rows are computed from that are under a grammar."""
    return [row.mask_row(row.constraint) for row in rows if row.constraint is not None]


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
