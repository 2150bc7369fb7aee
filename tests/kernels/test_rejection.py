"""Rejection sampling of drafts: without loss by chi-square of a million draws; the kernel gives the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kernels import rejection
from baton_kernels.rejection import rejection_sample

pytest.importorskip("triton")
from baton_kernels.gpu.rejection import TritonRejectionSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, K, DRAWS, AT_ONCE = 5, 2, 1_000_000, 50_000
CHI_SQUARE_LIMIT = 60.0
"""With 24 degrees of freedom: once in 14,000 tries."""


def statistic(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against expected ones; what cannot happen must not have."""
    possible = expected > 0
    assert not counts[~possible].any()
    return float(((counts - expected) ** 2 / np.where(possible, expected, 1.0)).sum())


def draws(seed: int, *, drawn: bool) -> float:
    """Draw tokens by drafts and chi-square the first two against the target's distributions."""
    rng = np.random.default_rng(seed)
    first, draft_first = rng.dirichlet(np.ones(VOCAB)), rng.dirichlet(np.ones(VOCAB))
    first[1] = 0.0
    first /= first.sum()
    following, draft_following = rng.dirichlet(np.ones(VOCAB), VOCAB), rng.dirichlet(np.ones(VOCAB), VOCAB)
    pairs = np.zeros((VOCAB, VOCAB))
    for _ in range(DRAWS // AT_ONCE):
        tokens = pairs_of(rng, first, following, (draft_first, draft_following) if drawn else None)
        np.add.at(pairs, (tokens[:, 0], tokens[:, 1]), 1)
    return statistic(pairs, DRAWS * first[:, None] * following)


def pairs_of(
    rng: np.random.Generator,
    first: np.ndarray,
    following: np.ndarray,
    drafted: tuple[np.ndarray, np.ndarray] | None,
) -> np.ndarray:
    """Draw the first two tokens, of the target's distributions and the drafter's (``None``: it says what it says)."""
    drafts = np.zeros((AT_ONCE, K), np.int64)
    drafts[:, 0] = 2 if drafted is None else rng.choice(VOCAB, AT_ONCE, p=drafted[0])
    for token in range(VOCAB):
        mine = drafts[:, 0] == token
        drafts[mine, 1] = 0 if drafted is None else rng.choice(VOCAB, int(mine.sum()), p=drafted[1][token])
    target = np.stack([np.broadcast_to(first, (AT_ONCE, VOCAB)), following[drafts[:, 0]]], 1).astype(np.float32)
    draft = None if drafted is None else np.broadcast_to(drafted[0].astype(np.float32), (AT_ONCE, 1, VOCAB))
    keys = rng.integers(0, 2**63, (AT_ONCE, K), dtype=np.uint64)
    tokens, _ = rejection_sample(target, draft, drafts[:, :1], np.full(AT_ONCE, 1), keys)
    # Behind a draft that was refused the target has to be asked again: with what it would say there.
    again = tokens[:, 1] < 0
    behind = following[tokens[again, 0]][:, None].astype(np.float32)
    tokens[again, 1] = rejection_sample(
        behind, None, np.zeros((len(behind), 0), np.int64), np.zeros(len(behind), np.int64), keys[again, 1:]
    )[0][:, 0]
    return tokens


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "given"])
def test_tokens_follow_the_targets_distribution(drawn: bool) -> None:
    assert draws(3, drawn=drawn) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize(
    "wrong",
    [lambda keys, numbers: np.zeros((1, 1)), lambda keys, numbers: np.ones((1, 1))],
    ids=["always kept", "kept where the target is surer"],
)
def test_another_rule_of_acceptance_is_noticed(
    wrong: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "uniforms", wrong)
    assert draws(3, drawn=True) > 3 * CHI_SQUARE_LIMIT


def test_greedy_rows_keep_drafts_while_they_are_the_targets_tokens() -> None:
    target = np.eye(VOCAB, dtype=np.float32)[[[1, 2, 3], [1, 2, 3], [4, 2, 3], [1, 2, 3]]]
    drafts = np.array([[1, 2], [1, 4], [0, 2], [1, 2]])
    keys = np.arange(12, dtype=np.uint64).reshape(4, 3)
    tokens, accepted = rejection_sample(target, None, drafts, np.array([2, 2, 2, 1]), keys)
    assert tokens.tolist() == [[1, 2, 3], [1, 2, -1], [4, -1, -1], [1, 2, -1]]
    assert accepted.tolist() == [2, 1, 0, 1]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    vocab=st.sampled_from([1, 7, 300, 5000]),
    drawn=st.booleans(),
)
def test_the_kernel_gives_the_definitions_tokens(seed: int, rows: int, width: int, vocab: int, drawn: bool) -> None:
    rng = np.random.default_rng(seed)
    target = rng.random((rows, width, vocab), np.float32) ** 8 * (rng.random((rows, width, vocab)) < 0.9)
    target[..., 0] += 0.1
    draft = rng.random((rows, width - 1, vocab), np.float32) ** 8 + 1e-6
    draft /= draft.sum(-1, keepdims=True)
    # Drafts that are often what the target wants.
    drafts = np.where(rng.random((rows, width - 1)) < 0.7, target[:, : width - 1].argmax(-1), 0)
    counts = rng.integers(0, width, rows)
    keys = rng.integers(0, 2**64, (rows, width), dtype=np.uint64)
    want = rejection_sample(target, draft if drawn else None, drafts, counts, keys)
    tensors = [None if each is None else torch.from_numpy(each).to(DEVICE) for each in (target, draft, drafts, counts)]
    got = TritonRejectionSampler(DEVICE)(tensors[0], tensors[1] if drawn else None, *tensors[2:], keys)  # type: ignore[arg-type]
    assert [each.tolist() for each in got] == [each.tolist() for each in want]
