"""Kernels are compiled for what a model and a device are, and not for the numbers of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.support.gpu_compiler import CARDS, recorded_variants
from tests.support.kernel_launches import SHAPES, layer_pool, ragged_batch

from baton_kernels.gpu import is_interpreted
from baton_kernels.gpu.sampling import TritonSampler
from baton_kernels.paged_attention.gpu import TritonPagedAttention
from baton_kernels.sampling import RowFilter

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="kernels run on a GPU here")
CPU = torch.device("cpu")
STEPS, EARLY = 600, 12
MOST = 10
"""Variants of one kernel."""


def test_mixed_batches_need_few_variants_and_all_of_them_early() -> None:
    random = np.random.default_rng(1)
    spec = SHAPES["qwen2-small"]
    all_q, all_k = (torch.zeros(2048, heads, spec.k_dim, dtype=torch.bfloat16) for heads in (spec.num_heads, 2))
    attention, pool = TritonPagedAttention(CPU), layer_pool(spec, torch.bfloat16)
    sampler = TritonSampler(CPU)
    last_new: dict[str, int] = {}
    with recorded_variants(CARDS[90], run=False) as variants:
        for step in range(STEPS):
            counts = [1] * int(2 ** random.uniform(0, 5.4)) + random.integers(1, 500, random.integers(0, 4)).tolist()
            width = int(random.integers(32, 300))
            contexts = [count + int(random.integers(0, 16 * width - count)) for count in counts]
            before = {name: len(each) for name, each in variants.items()}
            plan = attention.prepare(ragged_batch(counts, contexts, width=width))
            q, k = all_q[: sum(counts)], all_k[: sum(counts)]
            attention.run_rotated(plan, spec, pool, (q, k, k), None)
            rows = len(counts)
            filters = [RowFilter(0.7, 0, 1.0, 0.0)] * rows
            sampler(torch.zeros(rows, 4096, dtype=torch.bfloat16), filters, np.ones(rows, np.uint64))
            for name, each in variants.items():
                if len(each) > before.get(name, 0):
                    last_new[name] = step
    found = {name: len(each) for name, each in variants.items()}
    assert {"attend_kernel", "write_kernel", "merge_kernel", "_sample_kernel"} == found.keys()
    assert max(found.values()) <= MOST, found
    assert max(last_new.values()) <= EARLY, (found, last_new)
