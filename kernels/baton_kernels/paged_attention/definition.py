"""What paged attention is: what a backend is given, its interface, and the result, token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.paged_attention.quantized import read_blocks, write_rows

MAX_TREE_TOKENS = 64
"""Of a tree, its root included: a bit for each."""


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """Which of a batch's tokens are nodes of trees: a token sees what is before the root, its ancestors and itself.

    A tree lies in consecutive slots of its sequence, from the root on, parents before children. All new tokens of a
    sequence are in its tree, or none is; some of the tree may have been computed before.

    Attributes:
        ancestors: uint64 [T], bit j: sees slot ``starts + j``, its own the last of them; 0: the token is in no tree.
        starts: int32 [S], the slot of each sequence's root; anything where there is no tree.
    """

    ancestors: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int32]

    def of(self, rows: npt.NDArray[np.int64], sequences: list[int]) -> TokenTrees:
        """Return those of some sequences, whose tokens are ``rows``."""
        return TokenTrees(self.ancestors[rows], self.starts[sequences])

    def branch(self, row: int, sequence: int) -> list[int]:
        """Return the slots of a token's ancestors and itself, from the root on; none: it is in no tree."""
        bits = int(self.ancestors[row])
        start = int(self.starts[sequence])
        return [start + j for j in range(bits.bit_length()) if bits >> j & 1]


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """Return the ancestors of a tree's tokens, the root's first, as :class:`TokenTrees` has them.

    Args:
        parents: Of each token but the root the index of its parent among them, which comes before it; -1: the root.
    """
    masks = [1]
    for parent in parents:
        masks.append(masks[parent + 1] | 1 << len(masks))
    return masks


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """S sequences with T new tokens in all, flattened; prompt chunks and decodes mix freely.

    Attributes:
        positions: int64 [T], each new token's position in its sequence; of a tree's node by depth, the root's and one
            more for each ancestor below it.
        query_starts: int32 [S + 1], where each sequence's new tokens begin; the last entry is T.
        context_lens: int32 [S], tokens of each sequence, the new ones included.
        block_tables: int32 [S, G * W], ids of each sequence's blocks from its first token on; with several groups of
            layers, which have blocks of their own, one table after the other.
        block_size: Tokens per block.
        groups: G.
        trees: Tokens that do not follow each other; ``None``: all do. Of these the slot, where KV goes to, is another
            than the position, and what a window is counted in is positions.
    """

    positions: npt.NDArray[np.int64]
    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    block_size: int
    groups: int = 1
    trees: TokenTrees | None = None

    def slots(self) -> npt.NDArray[np.int64]:
        """Where each new token's KV goes to in its sequence, int64 [T]: new tokens are the last ones."""
        if self.trees is None:
            return self.positions
        counts = np.diff(self.query_starts)
        last = np.repeat(self.context_lens - self.query_starts[1:], counts).astype(np.int64)
        return last + np.arange(len(last))

    def table(self, group: int) -> npt.NDArray[np.int32]:
        """The block tables of one group, [S, W], as a view."""
        width = self.block_tables.shape[1] // self.groups
        return self.block_tables[:, group * width : (group + 1) * width]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The numbers of one attention layer.

    Attributes:
        num_heads: Query heads; a multiple of ``kv_heads``.
        scale: Factor of the scores.
        window: Keys a query sees, itself included; 0: all before it.
        softcap: ``softcap * tanh(score / softcap)`` where above 0.
        sinks: float32 [num_heads], a logit per head that takes part in the softmax and has no value, or ``None``.
        latent: Whether keys are MLA's latents, which belong to all query heads, and values the first ``v_dim`` elements
            of them (:mod:`baton_kernels.paged_attention.latent`).
        chunk: A query sees the keys of its own chunk of so many tokens only; 0: all before it. Backends know nothing of
            it (:mod:`baton_kernels.paged_attention.chunks`).
    """

    num_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    latent: bool = False
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class LayerPool:
    """One layer of the KV pool as strided views: k [blocks, kv_heads, block_size, k_dim], v likewise with v_dim.

    Both have the same stride from block to block, and within a block they are contiguous. The values of a latent are
    the first elements of its keys: v is the view ``k[..., :v_dim]``, and takes no memory of its own. ``group``
    says whose block table leads to the layer's blocks. Their dtype need not be that of what is written.

    int8 has scales beside it, views of the pool too, bfloat16 [blocks, kv_heads, block_size], contiguous in a block.
    float8_e4m3fn has the checkpoint's, float32 [kv_heads]. See :mod:`baton_kernels.paged_attention.quantized`.
    """

    k: torch.Tensor
    v: torch.Tensor
    group: int = 0
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    @property
    def is_latent(self) -> bool:
        """Whether values are part of the keys."""
        return self.v.data_ptr() == self.k.data_ptr()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding, and RMS norm of each head before it, done by the operator on its way.

    Attributes:
        cos: float32 [positions, rotary / 2], attention scaling included; ``sin`` likewise.
        q_norm: Weight [k_dim] in the model's dtype, or ``None``; ``k_norm`` likewise.
        norm_offset: Added to the weight (1 for models that store it as a difference).
        pairs: Whether neighbours are turned against each other (GLM 4), not the two halves of the rotary dims.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    pairs: bool = False


class PagedAttention(Protocol):
    """A backend: writes the new tokens' KV into the pool and attends over it.

    ``prepare`` is called once per step, ``run`` once per layer with what it returned. A backend that takes pools of
    other dtypes than the model's has them in an attribute ``stores``, a set of torch dtypes; one that takes trees of
    tokens has an attribute ``trees`` that is true, others are never given any.
    """

    name: str

    def prepare(self, batch: RaggedBatch) -> Any:
        """Turn a batch into whatever ``run`` needs; the batch's arrays stay alive and unchanged until the step ends."""

    def run(
        self, plan: Any, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] and return attention of q [T, num_heads, k_dim].

        The inputs' last dimension is contiguous, the others have any stride.

        Returns:
            Contiguous [T, num_heads, v_dim] in q's dtype on q's device.
        """


@runtime_checkable
class RotatingAttention(PagedAttention, Protocol):
    """A backend that norms and rotates queries and keys on its way, as the fused decoder needs it."""

    def run_rotated(
        self,
        plan: Any,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation,
    ) -> torch.Tensor:
        """As :meth:`run`, with queries and keys normed and rotated first."""


@runtime_checkable
class CapturedAttention(PagedAttention, Protocol):
    """A backend whose launches for decode steps can be captured: lengths and tables are read on the device."""

    def prepare_decodes(self, context_lens: torch.Tensor, tables: torch.Tensor, block_size: int, groups: int) -> Any:
        """Return a plan for sequences of one new token each, whatever their lengths are when it is run.

        One of length 0 is padding: nothing is written for it, and its outputs are finite.

        Args:
            context_lens: int32 [S] on the device, the new tokens included; read in each run.
            tables: int32 [S, G * W] on the device; read in each run. W blocks are the longest sequence.
            block_size: Tokens per block.
            groups: G.
        """


def paged_attention_reference(
    batch: RaggedBatch, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Write k and v into the pool and return ``softmax(cap(scale * q k^T) | sink) v`` per token, float64.

    Slow on purpose. Arguments as in :meth:`PagedAttention.run`; returns float64 [T, num_heads, v_dim].
    """
    group = spec.num_heads // spec.kv_heads
    slots = batch.slots()
    out = torch.zeros(q.shape[0], spec.num_heads, spec.v_dim, dtype=torch.float64)
    for seq, context in enumerate(batch.context_lens.tolist()):
        first = int(batch.query_starts[seq])
        last = int(batch.query_starts[seq + 1])
        table = batch.table(pool.group)[seq]
        for row in range(first, last):
            slot = int(slots[row])
            block = int(table[slot // batch.block_size])
            offset = slot % batch.block_size
            where = torch.tensor([block]), torch.tensor([offset])
            write_rows(pool.k, pool.k_scales, where, k[row][None])
            write_rows(pool.v, pool.v_scales, where, v[row][None])
        blocks = torch.from_numpy(table[: -(-context // batch.block_size)].astype(np.int64))
        keys, values = (
            read_blocks(cache, scales, blocks).transpose(1, 2).flatten(0, 1)[:context].double()
            for cache, scales in ((pool.k, pool.k_scales), (pool.v, pool.v_scales))
        )
        for row in range(first, last):
            seen = _seen(batch, spec, seq, row)
            for head in range(spec.num_heads):
                scores = keys[seen, head // group] @ q[row, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                if spec.sinks is not None:
                    scores = torch.cat([scores, spec.sinks[head : head + 1].double()])
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                out[row, head] = weights @ values[seen, head // group]
    return out


def _seen(batch: RaggedBatch, spec: AttentionSpec, seq: int, row: int) -> list[int]:
    """Return the slots that a new token sees."""
    position = int(batch.positions[row])
    branch = [] if batch.trees is None else batch.trees.branch(row, seq)
    before = branch[0] if branch else position + 1
    where = {slot: slot for slot in range(before)} | {slot: before + depth for depth, slot in enumerate(branch)}
    begin = position + 1 - spec.window if spec.window else 0
    begin = max(begin, position // spec.chunk * spec.chunk) if spec.chunk else begin
    return [slot for slot, at in where.items() if at >= begin]
