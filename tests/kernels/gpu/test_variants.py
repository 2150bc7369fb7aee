"""Kernels are compiled for what a model and a device are, and not for the numbers of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from tests.support.gpu_compiler import CARDS, recorded_variants
from tests.support.kernel_launches import SHAPES, layer_pool, ragged_batch

from baton.config import EngineConfig
from baton.engine.runner.warm_up import warm_up_batches
from baton_kernels.gpu import is_interpreted
from baton_kernels.gpu.sampling import TritonSampler
from baton_kernels.paged_attention.definition import RaggedBatch
from baton_kernels.paged_attention.gpu import TritonPagedAttention
from baton_kernels.sampling import RowFilter

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="kernels run on a GPU here")
CPU = torch.device("cpu")
STEPS, LONGEST = 600, 4800
MOST = 10
"""Variants of one kernel."""


def test_mixed_batches_need_few_variants_all_of_which_are_compiled_at_load() -> None:
    random = np.random.default_rng(1)
    spec = SHAPES["qwen2-small"]
    all_q, all_k = (torch.zeros(8192, heads, spec.k_dim, dtype=torch.bfloat16) for heads in (spec.num_heads, 2))
    attention, pool = TritonPagedAttention(CPU), layer_pool(spec, torch.bfloat16)
    sampler = TritonSampler(CPU)

    def run(batch: RaggedBatch) -> None:
        q, k = (each[: int(batch.query_starts[-1])] for each in (all_q, all_k))
        attention.run_rotated(attention.prepare(batch), spec, pool, (q, k, k), None)
        rows = len(batch.context_lens)
        filters = [RowFilter(0.7, 0, 1.0, 0.0)] * rows
        sampler(torch.zeros(rows, 4096, dtype=torch.bfloat16), filters, np.ones(rows, np.uint64))

    with recorded_variants(CARDS[90], run=False) as variants:
        for batch in warm_up_batches(EngineConfig(model="any", max_num_seqs=64), LONGEST, ()):
            run(RaggedBatch(batch.positions, batch.query_starts, batch.context_lens, batch.block_tables, 16))
        loaded = {name: len(each) for name, each in variants.items()}
        for _ in range(STEPS):
            counts = [1] * int(2 ** random.uniform(0, 5.4)) + random.integers(1, 500, random.integers(0, 4)).tolist()
            width = int(random.integers(32, LONGEST // 16))
            contexts = [count + int(random.integers(0, 16 * width - count)) for count in counts]
            run(ragged_batch(counts, contexts, width=width))
    assert {"attend_kernel", "write_kernel", "merge_kernel", "_sample_kernel"} == loaded.keys()
    assert max(loaded.values()) <= MOST, loaded
    assert {name: len(each) for name, each in variants.items()} == loaded
