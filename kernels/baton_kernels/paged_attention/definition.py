"""What paged attention is: the inputs of a backend, its interface, and the result, token by token in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.paged_attention.quantized import read_blocks, write_rows

MAX_TREE_TOKENS = 64
"""Largest number of tokens of a tree, its root included: a mask has a bit for each."""


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """Trees among a batch's tokens: a node sees the tokens before the root, its ancestors and itself.

    A tree is in consecutive slots of its sequence, from the root on, parents before children. All new tokens of a
    sequence are in its tree, or none is; some of the tree may have been computed before.

    Attributes:
        ancestors: uint64 [T], bit j: the token sees slot ``starts + j``, its own slot being the last; 0: the token is
            in no tree.
        starts: int32 [S], the slot of each sequence's root; any number for a sequence without a tree.
    """

    ancestors: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int32]

    def select(self, rows: npt.NDArray[np.int64], sequences: list[int]) -> TokenTrees:
        """Return the trees of some sequences, whose tokens are ``rows``."""
        return TokenTrees(self.ancestors[rows], self.starts[sequences])

    def branch(self, row: int, sequence: int) -> list[int]:
        """Return the slots of a token's ancestors and itself, from the root on; empty: the token is in no tree."""
        bits = int(self.ancestors[row])
        start = int(self.starts[sequence])
        return [start + j for j in range(bits.bit_length()) if bits >> j & 1]


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """Return the ancestors of a tree's tokens, the root's first, as :class:`TokenTrees` has them.

    Args:
        parents: For each token but the root, the index of its parent among these, which precedes it; -1: the root.
    """
    masks = [1]
    for parent in parents:
        masks.append(masks[parent + 1] | 1 << len(masks))
    return masks


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """S sequences with T new tokens in total, flattened; prompt chunks and decodes mix freely.

    Attributes:
        positions: int64 [T], each new token's position in its sequence; for a tree's node the root's position plus its
            depth.
        query_starts: int32 [S + 1], index of each sequence's first new token; the last entry is T.
        context_lens: int32 [S], number of tokens of each sequence, the new ones included.
        block_tables: int32 [S, G * W], ids of each sequence's blocks from its first token on; for several groups of
            layers, which have blocks of their own, one table after the other.
        block_size: Number of tokens per block.
        groups: Number of groups of layers, G.
        trees: Trees of tokens that do not follow each other; ``None``: there are none. The slot of a tree's token,
            where its KV is stored, differs from its position; windows are counted in positions.
    """

    positions: npt.NDArray[np.int64]
    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    block_size: int
    groups: int = 1
    trees: TokenTrees | None = None

    def slots(self) -> npt.NDArray[np.int64]:
        """Return the slot in its sequence of each new token's KV, int64 [T]; new tokens have the last slots."""
        if self.trees is None:
            return self.positions
        counts = np.diff(self.query_starts)
        last = np.repeat(self.context_lens - self.query_starts[1:], counts).astype(np.int64)
        return last + np.arange(len(last))

    def table(self, group: int) -> npt.NDArray[np.int32]:
        """Return the block tables of one group, [S, W], as a view."""
        width = self.block_tables.shape[1] // self.groups
        return self.block_tables[:, group * width : (group + 1) * width]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The sizes and parameters of one attention layer.

    Attributes:
        num_heads: Number of query heads; a multiple of ``kv_heads``.
        kv_heads: Number of KV heads.
        k_dim: Size of a query or key of one head.
        v_dim: Size of a value of one head.
        scale: Factor of the scores.
        window: Number of keys that a query sees, its own included; 0: all before it.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0: they stay.
        sinks: float32 [num_heads], a logit per head that takes part in the softmax and has no value, or ``None``.
        latent: Whether keys are MLA's latents, which all query heads share, and values are the first ``v_dim`` elements
            of the keys (:mod:`baton_kernels.paged_attention.latent`).
        chunk: Number of tokens of a chunk, within which a query sees keys; 0: all before it. Backends need not support
            chunks (:class:`ChunkedAttention`).
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
    """One layer of the KV pool as strided views, whose dtype may differ from that of new keys and values.

    Both views have the same stride from block to block, and are contiguous within a block.

    Attributes:
        k: Keys [blocks, kv_heads, block_size, k_dim].
        v: Values [blocks, kv_heads, block_size, v_dim]; for latents the view ``k[..., :v_dim]``.
        group: Group of layers whose block table has the layer's blocks.
        k_scales: Scales of int8 keys, bfloat16 [blocks, kv_heads, block_size], views of the pool that are contiguous
            within a block; of float8_e4m3fn keys, float32 [kv_heads], from the checkpoint; else ``None``. See
            :mod:`baton_kernels.paged_attention.quantized`.
        v_scales: Scales of values, likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    group: int = 0
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    @property
    def is_latent(self) -> bool:
        """Whether values are a part of the keys."""
        return self.v.data_ptr() == self.k.data_ptr()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding, and RMS norm of each head before it, which the operator applies to queries and keys.

    Attributes:
        cos: Cosines, float32 [positions, rotary / 2], attention scaling included.
        sin: Sines, shaped as ``cos``.
        q_norm: Weight of the queries' norm [k_dim], in the model's dtype, or ``None``.
        k_norm: Weight of the keys' norm, likewise.
        norm_eps: Epsilon of the norms.
        norm_offset: Added to the weights (1 for models that store them as differences from 1).
        pairs: Whether neighbours are turned against each other (GLM 4), instead of the halves of the rotary elements.
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

    ``prepare`` is called once per step, ``run`` once per layer with its result. A backend that supports pools of other
    dtypes than the model's has these in an attribute ``stores``, a set of torch dtypes. A backend that supports trees
    of tokens has a true attribute ``trees``; other backends never get trees.

    Attributes:
        name: Name of the backend, as in ``--attention-backend``.
    """

    name: str

    def prepare(self, batch: RaggedBatch) -> Any:
        """Return the plan of a batch for ``run``; the batch's arrays stay alive and unchanged until the step ends."""

    def run(
        self, plan: Any, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store new keys and values in the pool and return the attention of the queries.

        The inputs' last dimension is contiguous, the others have any stride.

        Args:
            plan: The batch's plan, from :meth:`prepare`.
            spec: Numbers of the layer.
            pool: The layer's KV pool.
            q: Queries [T, num_heads, k_dim].
            k: New keys [T, kv_heads, k_dim].
            v: New values [T, kv_heads, v_dim].

        Returns:
            Contiguous [T, num_heads, v_dim] in q's dtype on q's device.
        """


@runtime_checkable
class RotatingAttention(PagedAttention, Protocol):
    """A backend that also norms and rotates queries and keys, as the fused decoder needs it."""

    def run(
        self, plan: Any, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return self.run_rotated(plan, spec, pool, (q, k, v), None)

    def run_rotated(
        self,
        plan: Any,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """As :meth:`run`, with queries and keys normed and rotated first; queries may be changed in place."""


@runtime_checkable
class CapturedAttention(PagedAttention, Protocol):
    """A backend whose launches for decode steps can be captured: lengths and tables are read on the device."""

    def prepare_decodes(
        self, context_lens: torch.Tensor, tables: torch.Tensor, block_size: int, groups: int, tokens: int = 1
    ) -> Any:
        """Return a plan for sequences of as many new tokens each, whatever their lengths are when it is run.

        A sequence of length 0 is padding: nothing is written for it, and its outputs are finite.

        Args:
            context_lens: int32 [S] on the device, the new tokens included; read in each run.
            tables: Block tables int32 [S, G * W] on the device; read in each run. W blocks are the longest sequence.
            block_size: Number of tokens per block.
            groups: Number of groups of layers, G.
            tokens: Number of new tokens of each sequence: its own, and drafts that follow each other.
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
            seen = _seen_slots(batch, spec, seq, row)
            for head in range(spec.num_heads):
                scores = keys[seen, head // group] @ q[row, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                if spec.sinks is not None:
                    scores = torch.cat([scores, spec.sinks[head : head + 1].double()])
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                out[row, head] = weights @ values[seen, head // group]
    return out


def _seen_slots(batch: RaggedBatch, spec: AttentionSpec, seq: int, row: int) -> list[int]:
    """Return the slots that a new token sees."""
    position = int(batch.positions[row])
    branch = [] if batch.trees is None else batch.trees.branch(row, seq)
    before = branch[0] if branch else position + 1
    where = {slot: slot for slot in range(before)} | {slot: before + depth for depth, slot in enumerate(branch)}
    begin = position + 1 - spec.window if spec.window else 0
    begin = max(begin, position // spec.chunk * spec.chunk) if spec.chunk else begin
    return [slot for slot, at in where.items() if at >= begin]


# Attention within chunks of a sequence (Llama 4), by backends that do not support chunks


def cut_into_chunks(batch: RaggedBatch, chunk: int) -> RaggedBatch:
    """Return a batch with a sequence per chunk in which a sequence has new tokens.

    Args:
        batch: A batch with a single group of layers, whose sequences' new tokens are their last ones.
        chunk: Number of tokens of a chunk; a multiple of the block size.
    """
    blocks = chunk // batch.block_size
    starts = [0]
    lens = []
    tables = []
    for row, context in enumerate(batch.context_lens.tolist()):
        first = context - int(batch.query_starts[row + 1] - batch.query_starts[row])
        for index in range(first // chunk, -(-context // chunk)):
            begin = index * chunk
            end = min((index + 1) * chunk, context)
            starts.append(starts[-1] + end - max(begin, first))
            lens.append(end - begin)
            tables.append(batch.block_tables[row, index * blocks : (index + 1) * blocks])
    width = max(map(len, tables), default=0)
    cut = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        cut[row, : len(table)] = table
    return RaggedBatch(
        positions=batch.positions % chunk,
        query_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array(lens, dtype=np.int32),
        block_tables=cut,
        block_size=batch.block_size,
    )


class ChunkedAttention:
    """A backend for layers with and without chunks, on top of a backend that does not support chunks.

    A layer with chunks is given each chunk as a sequence of its own: its part of the block table, and lengths and
    positions from its first token on. Tokens keep their order.
    """

    def __init__(self, inner: PagedAttention, specs: Iterable[AttentionSpec]) -> None:
        self.name = inner.name
        self.trees = False  # a tree would be cut at a chunk's border
        self.stores = getattr(inner, "stores", frozenset[torch.dtype]())
        self._inner = inner
        self._chunks = {spec.chunk for spec in specs}

    def prepare(self, batch: RaggedBatch) -> dict[int, Any]:
        """Return a plan per length of chunks; 0: whole sequences."""
        return {chunk: self._inner.prepare(cut_into_chunks(batch, chunk) if chunk else batch) for chunk in self._chunks}

    def run(
        self,
        plan: dict[int, Any],
        spec: AttentionSpec,
        pool: LayerPool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return self._inner.run(plan[spec.chunk], spec, pool, q, k, v)
