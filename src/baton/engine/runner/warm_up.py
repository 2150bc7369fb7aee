"""Steps that need every variant of the kernels that serving will need, to be run before there are requests.

Triton compiles a kernel when it is first launched with constants or tiles of a new kind, for seconds, in which no
sequence gets a token. Tiles depend on the number of tokens, by ranges that tables state; splits on how long and how
many the sequences are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from baton.config import EngineConfig
from baton.engine.runner.input_batch import ForwardBatch
from baton_kernels.paged_attention import TokenTrees
from baton_kernels.sampling import RowFilter

_FEW, _MANY = 4, 16
"""Sizes of trees: attention has tiles of two kinds."""


def warm_up_batches(config: EngineConfig, max_model_len: int, bounds: Iterable[int]) -> Iterator[ForwardBatch]:
    """Return steps over the pool's first block, which must not be in use.

    Args:
        config: Bounds tokens and sequences; says whether there are trees of drafts.
        max_model_len: Tokens of the longest sequence.
        bounds: Numbers of tokens at which kernels get other tiles.
    """
    most = config.max_num_batched_tokens
    block_size = config.block_size
    powers = [1 << exponent for exponent in range(max(most, max_model_len).bit_length())]
    for tokens in sorted({each for each in (*powers, *bounds, most) if each <= most}):
        whole, rest = divmod(tokens, max_model_len)
        counts = [max_model_len] * whole + [rest] * (rest > 0)
        if len(counts) <= config.max_num_seqs:
            yield _batch(counts, counts, block_size)
    for context in (each for each in (*powers, max_model_len) if each <= max_model_len):
        yield _batch([1], [context], block_size)
    sequences = min(config.max_num_seqs, most)
    for context in (1, max_model_len):
        yield _batch([1] * sequences, [context] * sequences, block_size)
    if config.speculative_width > 1:
        for nodes in (_FEW, _MANY):
            for context in {min(most, nodes), max_model_len}:
                yield _batch([min(most, nodes)], [context], block_size, trees=True)


def warm_up_sampling(logits: torch.Tensor, config: EngineConfig) -> None:
    """Choose tokens of logits [R, vocab] by the operators of GPUs, in each way that they are compiled for."""
    from baton_kernels.gpu.rejection import TritonRejectionSampler
    from baton_kernels.gpu.sampling import TritonSampler

    rows, keys = logits[:1], np.ones(1, np.uint64)
    vocab = rows.shape[1]
    sampler = TritonSampler(rows.device)
    every = np.full(-(-vocab // 32), 0xFFFFFFFF, np.uint32)
    for each in (rows, rows.float()):  # penalties are added in float32
        for masks in (None, [every]):
            sampler(each, [RowFilter(1.0, 0, 1.0, 0.0)], keys, masks)
    if config.speculative != "none":
        verify = TritonRejectionSampler(rows.device)
        target = torch.full((1, 2, vocab), 1 / vocab, device=rows.device)
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
        for draft in (None, target[:, :1]):
            verify(target, draft, zeros, zeros[0], np.ones((1, 2), np.uint64))


def _batch(counts: list[int], contexts: list[int], block_size: int, *, trees: bool = False) -> ForwardBatch:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lens = np.array(contexts, np.int32)
    positions = np.concatenate([np.arange(end - new, end) for new, end in zip(counts, contexts, strict=True)])
    tree = None
    if trees:  # chains: each token sees those before it
        masks = [(1 << depth + 1) - 1 for new in counts for depth in range(new)]
        tree = TokenTrees(np.array(masks, np.uint64), lens - np.diff(starts))
    return ForwardBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions.astype(np.int64),
        query_starts=starts,
        context_lens=lens,
        block_tables=np.zeros((len(counts), -(-max(contexts) // block_size)), np.int32),
        logit_rows=starts[1:].astype(np.int64) - 1,
        trees=tree,
    )
