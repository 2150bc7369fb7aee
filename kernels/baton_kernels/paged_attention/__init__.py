"""Attention of a ragged batch over a paged KV pool, prompt chunks and decodes together.

``reference`` defines it, ``torch_backend`` runs anywhere, ``cpu`` is the C++ operator.
"""

from baton_kernels.paged_attention.cpu import CpuPagedAttention
from baton_kernels.paged_attention.reference import paged_attention_reference
from baton_kernels.paged_attention.torch_backend import TorchPagedAttention
from baton_kernels.paged_attention.types import AttentionSpec, LayerPool, PagedAttention, RaggedBatch

__all__ = [
    "AttentionSpec",
    "CpuPagedAttention",
    "LayerPool",
    "PagedAttention",
    "RaggedBatch",
    "TorchPagedAttention",
    "paged_attention_reference",
]
