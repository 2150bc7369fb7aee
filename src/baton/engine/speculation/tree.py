"""Trees of draft tokens: several ways in which a sequence may go on, verified in one step.

A tree is a list of tokens with the index of each one's parent, which comes before it; -1 stands for the sequence's last
token. A chain is the tree in which each token's parent is the one before it. A tree's tokens lie in consecutive slots
behind the sequence's last one, whatever their depth; the KV of those that are accepted is moved together
afterwards (Miao et al., "SpecInfer", ASPLOS 2024; Cai et al., "Medusa", ICML 2024, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.sampler import CHUNK, TOKENS, filtered_probs, row_draws
from baton.engine.sampler_row import SamplerRow, apply_edits
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal
from baton_kernels.paged_attention import MAX_TREE_TOKENS
from baton_kernels.random_numbers import exponentials

MAX_NODES = MAX_TREE_TOKENS - 1
"""Draft tokens of a tree at most: its root is the sequence's last token."""
FIRST_SHARE = 0.6
"""Of what is right where nothing else is known, the part of the first child; of the rest, that of the second, ..."""

Parents = tuple[int, ...]


def depths(parents: SequenceOf[int]) -> list[int]:
    """Return how many tokens of the tree come before each of its tokens."""
    depth_of: list[int] = []
    for parent in parents:
        depth_of.append(0 if parent < 0 else depth_of[parent] + 1)
    return depth_of


def is_chain(parents: SequenceOf[int]) -> bool:
    """Whether each token's parent is the one before it."""
    return all(parent == i - 1 for i, parent in enumerate(parents))


def first_path(parents: SequenceOf[int]) -> list[int]:
    """Return the tokens that lie on the way to a leaf through first children."""
    path: list[int] = []
    for i, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(i)
    return path


def chances_of(
    parents: SequenceOf[int], given: SequenceOf[float] | None, rate: float, factor: float
) -> npt.NDArray[np.float64]:
    """Return how likely each token of a tree and all before it are right.

    Args:
        parents: Index of each token's parent.
        given: The drafter's probability of each token if those before it are right; ``None``: none.
        rate: Without ``given``, the probability that one of a token's children is right.
        factor: Correction of ``given``, at most 1.
    """
    chances = np.empty(len(parents))
    left: dict[int, float] = {}
    for i, parent in enumerate(parents):
        if given is None:
            rest = left.get(parent, rate)
            each = rest * FIRST_SHARE
            left[parent] = rest * (1.0 - FIRST_SHARE)
        else:
            each = given[i] * factor
        chances[i] = each if parent < 0 else each * chances[parent]
    return chances


def pick(
    parents: SequenceOf[int], chances: npt.NDArray[np.float64], kept: SequenceOf[int]
) -> tuple[list[int], Parents]:
    """Return some tokens of a tree in depth-first order, the likeliest child first, and their parents in that order.

    So the likeliest path lies in a row, and need not be moved if it is right.

    Args:
        parents: Index of each token's parent.
        chances: Probability that each token and those before it are right.
        kept: Tokens to return, ascending; the parent of each is among them.
    """
    children: dict[int, list[int]] = {}
    for node in kept:
        children.setdefault(parents[node], []).append(node)
    for siblings in children.values():
        siblings.sort(key=lambda node: float(chances[node]))
    order: list[int] = []
    place = {-1: -1}
    waiting = list(children.get(-1, ()))
    while waiting:
        node = waiting.pop()
        place[node] = len(order)
        order.append(node)
        waiting += children.get(node, ())
    return order, tuple(place[parents[node]] for node in order)


def right_path(tokens: SequenceOf[int], parents: Parents, sampled: SequenceOf[int]) -> list[int]:
    """Return the draft tokens that are what was sampled, from the first one on.

    Args:
        tokens: Draft tokens.
        parents: Index of each token's parent; empty: the draft is a chain.
        sampled: One token more: those chosen after the sequence's last token and after each of the draft's.
    """
    path: list[int] = []
    if not parents:
        while len(path) < len(tokens) and sampled[len(path)] == tokens[len(path)]:
            path.append(len(path))
        return path
    node = -1
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        # A child comes behind its parent, so that one pass finds the whole path.
        if parent == node and token == sampled[node + 1]:
            node = i
            path.append(i)
    return path


Candidates = list[tuple[int, float]]
"""Tokens with the chance that each is the next one, the likeliest first."""


class Branches:
    """The tree that is being drafted for a sequence.

    Args:
        sequence: Sequence to draft for.
        row: The sampler's row for its next token.
        depth: How many tokens may come one after the other.
        width: How many tokens a level has.

    Attributes:
        tokens: Tokens of the tree.
        parents: Index of each token's parent.
        level: Indices of the tokens whose children come next; -1: the sequence's last token.
    """

    def __init__(self, sequence: Sequence, row: SamplerRow, depth: int, width: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.level: list[int] = [-1]
        self._chances: list[float] = []
        self._products = {-1: 1.0}
        self._rows = {-1: row}
        self._sequence = sequence
        self._left = depth
        self._width = width

    @property
    def rows(self) -> list[SamplerRow]:
        """The sampler's rows of ``level``."""
        return [self._rows[node] for node in self.level]

    def grow(self, candidates: SequenceOf[Candidates]) -> bool:
        """Add a level; returns whether there may be one more.

        Args:
            candidates: Possible next tokens for each token of ``level``.
        """
        options = [
            (self._products[node] * chance, chance, node, token)
            for node, next_tokens in zip(self.level, candidates, strict=True)
            for token, chance in next_tokens
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
        return Proposal(self.tokens, self._chances, parents=self.parents)


def grow_trees(trees: SequenceOf[Branches], logits: torch.Tensor, width: int) -> list[bool]:
    """Add a level to each tree; return whether each may have one more.

    Args:
        trees: Trees with levels of n tokens in all.
        logits: [n, vocab], behind the tokens of the trees' levels, tree by tree; may be changed.
        width: How many tokens a level has.
    """
    candidates = iter(likeliest(logits, [row for tree in trees for row in tree.rows], width))
    return [tree.grow([next(candidates) for _ in tree.level]) for tree in trees]


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
    candidates = [
        [(t, c) for t, c in zip(tokens, each, strict=True) if c > 0.0] if good else []
        for tokens, each, good in zip(top.indices.tolist(), chances.tolist(), fine, strict=True)
    ]
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy and fine[i]]
    if drawn:
        own = [rows[i] for i in drawn]
        probs = filtered_probs(logits[drawn], [row.params for row in own])
        for i, each in zip(drawn, _first_in_race(probs, row_draws(own).keys(), width), strict=True):
            candidates[i] = each
    return candidates


def _first_in_race(probs: torch.Tensor, keys: npt.NDArray[np.uint64], width: int) -> list[Candidates]:
    """Return per row the tokens that come first in the sampler's two races, of chunks and within a chunk.

    The target's probabilities are unknown here and taken to be like these. A token that is first here is the likelier
    to be first there the farther it is ahead: in proportion to the inverse of its time.
    """
    count, vocab = probs.shape
    probs = torch.nn.functional.pad(probs, (0, -vocab % CHUNK))
    chunked = probs.view(count, -1, CHUNK)
    sums = chunked.sum(dim=-1).cpu().numpy()
    speeds = sums / exponentials(keys, np.arange(sums.shape[1], dtype=np.uint64))
    chunks = np.argsort(-speeds, axis=-1)[:, :width]
    shares = np.take_along_axis(speeds / speeds.sum(axis=-1, keepdims=True), chunks, axis=-1)
    own_rows = torch.arange(count, device=probs.device)[:, None]
    device = probs.device
    inside = chunked[own_rows, torch.from_numpy(chunks).to(device)].cpu().numpy()
    ids = chunks[..., None] * CHUNK + np.arange(CHUNK)
    times = exponentials(keys, ids.reshape(count, -1).astype(np.uint64) + TOKENS).reshape(inside.shape)
    own = inside / times
    chances = (own / np.maximum(own.sum(axis=-1, keepdims=True), 1e-300) * shares[..., None]).reshape(count, -1)
    # The token that would be drawn has the greatest chance, also where one of another chunk seemed to have more.
    rows = np.arange(count)
    drawn = own[:, 0].argmax(axis=-1)
    top = chances.argmax(axis=-1)
    chances[rows, drawn], chances[rows, top] = chances[rows, top], chances[rows, drawn]
    best = np.argsort(-chances, axis=-1, kind="stable")[:, :width]
    return [
        [(int(ids[row].flat[at]), float(chances[row, at])) for at in places if chances[row, at] > 0.0]
        for row, places in enumerate(best)
    ]
