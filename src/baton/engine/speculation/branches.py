"""Trees from drafters that score the whole vocabulary: the likeliest tokens of each place, the best of them go on.

Level by level: of each token that goes on the ``width`` likeliest next ones, and of all these the ``width`` that are
the likeliest with all before them (Li et al., "EAGLE-2", EMNLP 2024). A sequence that draws is drawn for with its own
random numbers: the likeliest tokens are those that come first in the sampler's race, not those of the greatest
probability.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sample.filters import filtered_probs
from baton.engine.sample.penalties import apply_edits
from baton.engine.sample.row import SamplerRow
from baton.engine.sample.sampler import CHUNK, TOKENS, row_draws
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal
from baton.engine.speculation.tree import MAX_NODES
from baton_kernels.random_numbers import exponentials

Candidates = list[tuple[int, float]]
"""Tokens with the chance that each is the next one, the likeliest first."""


class Branches:
    """The tree that is being drafted for a sequence.

    Args:
        sequence: Whose.
        row: The sampler's row for its next token.
        depth: How many tokens may come one after the other.
        width: How many tokens a level has.

    Attributes:
        tokens: Of the tree.
        parents: Of each token.
        level: Those whose next tokens are wanted; -1: the sequence's last one.
    """

    def __init__(self, sequence: Sequence, row: SamplerRow, depth: int, width: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.level: list[int] = [-1]
        self._chances: list[float] = []
        self._products = {-1: 1.0}
        self._rows = {-1: row}
        self._sequence, self._left, self._width = sequence, depth, width

    @property
    def rows(self) -> list[SamplerRow]:
        """The sampler's rows of ``level``."""
        return [self._rows[node] for node in self.level]

    def grow(self, found: SequenceOf[Candidates]) -> bool:
        """Add a level; returns whether there may be one more.

        Args:
            found: For each token of ``level`` what may come next.
        """
        options = [
            (self._products[node] * chance, chance, node, token)
            for node, candidates in zip(self.level, found, strict=True)
            for token, chance in candidates
        ]
        options.sort(key=lambda option: -option[0])
        self._left -= 1
        self.level = []
        for product, chance, node, token in options[: min(self._width, MAX_NODES - len(self.tokens))]:
            index = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
            self._chances.append(chance)
            if self._left and not self._sequence.ends_with(token):
                self._products[index] = product
                self._rows[index] = self._rows[node].after(token)
                self.level.append(index)
        return bool(self.level) and len(self.tokens) < MAX_NODES

    def proposal(self) -> Proposal:
        """Return the tree."""
        return Proposal(self.tokens, self._chances, parents=self.parents)


def likeliest(logits: torch.Tensor, rows: SequenceOf[SamplerRow], width: int) -> list[Candidates]:
    """Return for each row at most ``width`` tokens; none where its logits are not finite.

    Args:
        logits: [R, vocab] in any float dtype; may be changed.
        rows: R rows; masks are not looked at.
        width: From 1 on.
    """
    logits = logits.float()
    edited = [(i, row.edits, row.counts, row.position) for i, row in enumerate(rows) if row.edits is not None]
    if edited:
        apply_edits(logits, edited)
    width = min(width, logits.shape[-1])
    top = torch.topk(logits, width, dim=-1)
    chances = (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
    fine = top.values[:, 0].isfinite().tolist()
    found = [
        [(t, c) for t, c in zip(tokens, each, strict=True) if c > 0.0] if good else []
        for tokens, each, good in zip(top.indices.tolist(), chances.tolist(), fine, strict=True)
    ]
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy and fine[i]]
    if drawn:
        own = [rows[i] for i in drawn]
        probs = filtered_probs(logits[drawn], [row.params for row in own])
        for i, each in zip(drawn, _first_in_race(probs, row_draws(own).keys(), width), strict=True):
            found[i] = each
    return found


def _first_in_race(probs: torch.Tensor, keys: npt.NDArray[np.uint64], width: int) -> list[Candidates]:
    """Return per row the tokens that come first in the sampler's two races, of chunks and within a chunk.

    What the target's probabilities are nobody knows here; they are taken to be like these, so that who comes first here
    is the likelier to come first there the farther it is ahead: in proportion to the inverse of its time.
    """
    count, vocab = probs.shape
    probs = torch.nn.functional.pad(probs, (0, -vocab % CHUNK))
    chunked = probs.view(count, -1, CHUNK)
    sums = chunked.sum(dim=-1).cpu().numpy()
    speeds = sums / exponentials(keys, np.arange(sums.shape[1], dtype=np.uint64))
    chunks = np.argsort(-speeds, axis=-1)[:, :width]
    shares = np.take_along_axis(speeds / speeds.sum(axis=-1, keepdims=True), chunks, axis=-1)
    own_rows, device = torch.arange(count, device=probs.device)[:, None], probs.device
    inside = chunked[own_rows, torch.from_numpy(chunks).to(device)].cpu().numpy()
    ids = chunks[..., None] * CHUNK + np.arange(CHUNK)
    times = exponentials(keys, ids.reshape(count, -1).astype(np.uint64) + TOKENS).reshape(inside.shape)
    own = inside / times
    chances = (own / np.maximum(own.sum(axis=-1, keepdims=True), 1e-300) * shares[..., None]).reshape(count, -1)
    # The token that would be drawn has the greatest chance, also where one of another chunk seemed to have more.
    rows, drawn, top = np.arange(count), own[:, 0].argmax(axis=-1), chances.argmax(axis=-1)
    chances[rows, drawn], chances[rows, top] = chances[rows, top], chances[rows, drawn]
    best = np.argsort(-chances, axis=-1, kind="stable")[:, :width]
    return [
        [(int(ids[row].flat[at]), float(chances[row, at])) for at in places if chances[row, at] > 0.0]
        for row, places in enumerate(best)
    ]
