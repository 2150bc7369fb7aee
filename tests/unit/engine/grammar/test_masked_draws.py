"""A hundred thousand draws under a mask: the free distribution, cut to what is allowed and rescaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.engine import sampler
from baton.engine.grammar.constraint import MaskRow, StepMasks
from baton.engine.sampler import sample
from baton.engine.sampler_row import SamplerRow
from baton.types import SamplingParams
from baton_kernels.token_mask import TokenMask, pack_mask

DRAWS, ROWS = 100_000, 500


def chi_square_limit(cells: int) -> float:
    """The 0.999 quantile of chi-square, by Wilson and Hilferty; seeds are fixed, so a test passes always or never."""
    return float(cells * (1 - 2 / (9 * cells) + 3.09 * math.sqrt(2 / (9 * cells))) ** 3)


@pytest.mark.parametrize(("vocab", "allowed"), [(40, 12), (300, 25)])
@pytest.mark.parametrize("path", ["operators", "torch", "late"])
def test_draws_under_a_mask_are_free_draws_rescaled(
    monkeypatch: pytest.MonkeyPatch, path: str, vocab: int, allowed: int
) -> None:
    if path == "torch":
        monkeypatch.setattr(sampler, "token_sampler", lambda *_, **__: None)
        monkeypatch.setattr(sampler, "cpu_token_mask", lambda: None)
    elif sampler.token_sampler(torch.device("cpu")) is None:
        pytest.skip("no C++ operators for this machine")
    rng = np.random.default_rng(vocab)
    logits, temperature = rng.normal(0, 1.2, vocab).astype(np.float32), 1.3
    mask = np.zeros(vocab, np.bool_)
    mask[rng.permutation(vocab)[:allowed]] = True
    rows = [
        SamplerRow(SamplingParams(temperature=temperature), 0, stop_ids=(), prompt=(), output=()) for _ in range(ROWS)
    ]

    class Late(StepMasks):
        def __init__(self) -> None: ...

        def refused(self, rows: Sequence[MaskRow], token_ids: Sequence[Sequence[int]]) -> list[int]:
            return [i for i, (token,) in enumerate(token_ids) if not mask[token]]

        def late(self, rows: Sequence[MaskRow]) -> list[TokenMask]:
            return [pack_mask(mask)] * len(rows)

    if path == "late":
        for row in rows:
            row.constraint = object()  # type: ignore[assignment]
    counts = np.zeros(vocab, np.int64)
    for start in range(0, DRAWS, ROWS):
        for at, row in enumerate(rows):
            row.seed, row.position = 7 * (start + at) + 1, (start + at) % 5
            row.mask = None if path == "late" else pack_mask(mask)
        found = sample(torch.from_numpy(np.tile(logits, (ROWS, 1))), rows, late=Late() if path == "late" else None)
        counts += np.bincount(found.token_ids, minlength=vocab)
    assert counts.sum() == DRAWS
    assert counts[~mask].sum() == 0
    free = np.exp(logits.astype(np.float64) / temperature)
    expected = DRAWS * free[mask] / free[mask].sum()
    assert expected.min() > 5
    assert ((counts[mask] - expected) ** 2 / expected).sum() < chi_square_limit(allowed - 1)
