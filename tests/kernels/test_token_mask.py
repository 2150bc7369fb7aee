"""The operator that forbids tokens against its definition in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_kernels.cpu import load_library, runnable_variants
from baton_kernels.cpu.variants import Variant
from baton_kernels.token_mask import CpuTokenMask, mask_tokens, pack_mask, unpack_mask


@pytest.mark.parametrize("variant", runnable_variants(), ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 500, 4099])
def test_the_operator_forbids_what_its_definition_forbids(
    variant: Variant, dtype: torch.dtype, vocab: int, threads: int
) -> None:
    rng = np.random.default_rng(vocab)
    shares = (0.0, 0.01, 0.5, 0.99, 1.0)
    masks = [pack_mask(rng.random(vocab) < share) for share in shares]
    logits = torch.randn(9, vocab + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = [7, 0, 3, 8, 2]
    expected, found = logits.clone(), logits.clone()
    mask_tokens(expected[:, :vocab], rows, masks)
    CpuTokenMask(load_library(variant))(found[:, :vocab], rows, masks)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, vocab:], logits[:, vocab:])
    for row, mask in zip(rows, masks, strict=True):
        assert np.array_equal(found[row, :vocab].isfinite().numpy(), unpack_mask(mask, vocab))


@pytest.mark.parametrize("vocab", [1, 31, 32, 100])
def test_masks_are_packed_and_unpacked(vocab: int) -> None:
    allowed = np.random.default_rng(0).random(vocab) < 0.5
    assert np.array_equal(unpack_mask(pack_mask(allowed), vocab), allowed)
