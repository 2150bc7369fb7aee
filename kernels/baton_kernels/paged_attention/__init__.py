"""Attention of a ragged batch over a paged KV pool, prompt chunks and decodes together.

``definition`` has the interface and the reference, ``torch_backend`` runs anywhere, ``cpu`` is the C++ operator.
"""

from baton_kernels.paged_attention.cpu import CpuPagedAttention
from baton_kernels.paged_attention.definition import (
    MAX_TREE_TOKENS,
    AttentionSpec,
    CapturedAttention,
    ChunkedAttention,
    LayerPool,
    PagedAttention,
    RaggedBatch,
    RotatingAttention,
    Rotation,
    TokenTrees,
    ancestor_masks,
    paged_attention_reference,
)
from baton_kernels.paged_attention.latent import LatentProjections, attend_latent
from baton_kernels.paged_attention.torch_backend import TorchPagedAttention

__all__ = [
    "MAX_TREE_TOKENS",
    "AttentionSpec",
    "CapturedAttention",
    "ChunkedAttention",
    "CpuPagedAttention",
    "LatentProjections",
    "LayerPool",
    "PagedAttention",
    "RaggedBatch",
    "RotatingAttention",
    "Rotation",
    "TokenTrees",
    "TorchPagedAttention",
    "ancestor_masks",
    "attend_latent",
    "paged_attention_reference",
]
