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

from baton_kernels.paged_attention import MAX_TREE_TOKENS

MAX_NODES = MAX_TREE_TOKENS - 1
"""Draft tokens of a tree at most: its root is the sequence's last token."""
FIRST_SHARE = 0.6
"""Of what is right where nothing else is known, the part of the first child; of the rest, that of the second, ..."""

Parents = tuple[int, ...]


def depths(parents: SequenceOf[int]) -> list[int]:
    """Return how many tokens of the tree come before each of its tokens."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


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
        parents: Of each token.
        given: What the drafter says of each if those before it are right; ``None``: nothing.
        rate: Where it says nothing, how often one of a token's children is right.
        factor: By how much what it says is too high: 1, or less.
    """
    found = np.empty(len(parents))
    left: dict[int, float] = {}
    for i, parent in enumerate(parents):
        if given is None:
            rest = left.get(parent, rate)
            each, left[parent] = rest * FIRST_SHARE, rest * (1.0 - FIRST_SHARE)
        else:
            each = given[i] * factor
        found[i] = each if parent < 0 else each * found[parent]
    return found


def pick(
    parents: SequenceOf[int], chances: npt.NDArray[np.float64], kept: SequenceOf[int]
) -> tuple[list[int], Parents]:
    """Return some tokens of a tree in depth-first order, the likeliest child first, and their parents in that order.

    So the likeliest path lies in a row, and need not be moved if it is right.

    Args:
        parents: Of each token of the tree.
        chances: That each and those before it are right.
        kept: Ascending; with a token its parent.
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
        tokens: The draft.
        parents: Of each; empty: it is a chain.
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
