"""Attention by Triton kernels, for pools in the memory of a GPU (or of a CPU, under Triton's interpreter)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch, Rotation
from baton_kernels.paged_attention.gpu_kernels import attend_kernel, merge_kernel, write_kernel

FEW_TOKENS = 8
"""Sequences with at most so many new tokens (decodes, drafts to verify) share their keys between several programs."""
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256
"""Less is not worth a program of its own."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs that a launch aims at, per multiprocessor of the device."""
_INTERPRETED_PROCESSORS = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sequences of one launch.

    Attributes:
        seqs: int32 [n], the sequence of each tile; ``firsts`` [n] its first token in the batch.
        rows: int32, all tokens of these sequences.
        longest: Tokens of the longest of them.
    """

    seqs: torch.Tensor
    firsts: torch.Tensor
    rows: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A batch on the device.

    Attributes:
        query_starts: int32 [S + 1]; ``context_lens`` [S], ``token_seq`` [T] whose sequence a token is.
        tables: int32 [S, G * W]; ``width``: W.
        counts: New tokens per sequence, on the host; ``contexts`` likewise.
        tiles: By the number of tokens that a tile has and whether it is of the sequences with few of them.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    token_seq: torch.Tensor
    tables: torch.Tensor
    width: int
    block_size: int
    num_tokens: int
    counts: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    tiles: dict[tuple[int, bool], Tiles]


class TritonPagedAttention:
    """See the module's docstring. Not thread-safe: one object per runner.

    Args:
        device: Where queries and pools are.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if cuda else _INTERPRETED_PROCESSORS
        )

    def prepare(self, batch: RaggedBatch) -> TritonPlan:
        """Take a batch to the device."""
        if batch.trees is not None:
            raise ValueError("the Triton kernels know no trees of tokens")
        counts = np.diff(batch.query_starts).astype(np.int64)
        seqs = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        starts, lens, token_seq, tables = self._upload(batch.query_starts, batch.context_lens, seqs, batch.block_tables)
        return TritonPlan(
            query_starts=starts,
            context_lens=lens,
            token_seq=token_seq,
            tables=tables,
            width=batch.block_tables.shape[1] // batch.groups,
            block_size=batch.block_size,
            num_tokens=int(batch.query_starts[-1]),
            counts=counts,
            contexts=batch.context_lens.astype(np.int64),
            tiles={},
        )

    def prepare_decodes(
        self, context_lens: torch.Tensor, tables: torch.Tensor, block_size: int, groups: int
    ) -> TritonPlan:
        """See :meth:`CapturedAttention.prepare_decodes`; launches are those that suit the longest sequences."""
        count, width = len(context_lens), tables.shape[1] // groups
        ones, seqs = np.ones(count, np.int64), np.arange(count, dtype=np.int32)
        starts, token_seq = self._upload(np.arange(count + 1, dtype=np.int32), seqs)
        longest = ones * width * block_size
        return TritonPlan(
            starts, context_lens, token_seq, tables, width, block_size, count, counts=ones, contexts=longest, tiles={}
        )

    def run(
        self, plan: TritonPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`PagedAttention.run`."""
        return self.run_rotated(plan, spec, pool, (q, k, v), None)

    def run_rotated(
        self,
        plan: TritonPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """As :meth:`run`, with queries and keys normed and rotated on their way."""
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in qkv)
        if not plan.num_tokens:
            return q.new_empty(0, spec.num_heads, spec.v_dim)
        q = self._write(plan, spec, pool, (q, k, v), rotation)
        out = q.new_empty(len(q), spec.num_heads, spec.v_dim)
        for few in (True, False):
            self._attend(plan, spec, pool, (q, out), few=few)
        return out

    def _write(
        self,
        plan: TritonPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Store keys and values; returns the queries, rotated ones in memory of their own."""
        q, k, v = qkv
        q_out = q if rotation is None else q.new_empty(len(q), spec.num_heads, spec.k_dim)
        turn = rotation or Rotation(q, q)
        heads = spec.kv_heads + (0 if rotation is None else spec.num_heads)
        write_kernel[plan.num_tokens, heads](
            *(q, k, v, q_out, pool.k, pool.v, turn.cos, turn.sin),
            *(q if turn.q_norm is None else turn.q_norm, q if turn.k_norm is None else turn.k_norm),
            *(plan.query_starts, plan.context_lens, plan.token_seq, plan.tables[:, pool.group * plan.width :]),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(*pool.k.stride()[:3], *pool.v.stride()[:3], plan.tables.stride(0), plan.block_size),
            *(spec.num_heads, spec.kv_heads, spec.k_dim, spec.v_dim),
            *(2 * turn.cos.shape[1] if rotation else 0, turn.norm_eps, turn.norm_offset),
            D=triton.next_power_of_2(spec.k_dim),
            DV=triton.next_power_of_2(spec.v_dim),
            ROTATE=rotation is not None,
            PAIRS=turn.pairs,
            Q_NORM=turn.q_norm is not None,
            K_NORM=turn.k_norm is not None,
            LATENT=pool.is_latent,
            num_warps=1,
        )
        return q_out

    def _attend(
        self,
        plan: TritonPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        tensors: tuple[torch.Tensor, torch.Tensor],
        *,
        few: bool,
    ) -> None:
        """Launch the tiles of the sequences with few new tokens, or of the others."""
        q, out = tensors
        group = spec.num_heads // spec.kv_heads
        main = 1 << (spec.k_dim.bit_length() - 1)
        tile_m = 16 if few else 64
        heads = min(group, tile_m)
        tiles = self._tiles(plan, tile_m // heads, few=few)
        if not len(tiles.seqs):
            return
        columns = spec.kv_heads * -(-group // heads)
        splits = self._splits(tiles, columns, spec.window) if few else 1
        dv = max(16, triton.next_power_of_2(spec.v_dim))
        sums = stats = out
        if splits > 1:
            sums = q.new_empty(splits, plan.num_tokens, spec.num_heads, dv, dtype=torch.float32)
            stats = q.new_empty(splits, plan.num_tokens, spec.num_heads, 2, dtype=torch.float32)
        attend_kernel[len(tiles.seqs), columns, splits](
            *(q, pool.k, pool.v, out, sums, stats, q if spec.sinks is None else spec.sinks),
            *(plan.query_starts, plan.context_lens, plan.tables[:, pool.group * plan.width :]),
            *(tiles.seqs, tiles.firsts, q.stride(0), q.stride(1)),
            *(*pool.k.stride()[:3], *pool.v.stride()[:3], plan.tables.stride(0)),
            *(plan.num_tokens, spec.num_heads, spec.k_dim, spec.v_dim, spec.window, spec.scale, spec.softcap),
            GROUP=group,
            HEADS=heads,
            TOKENS=tile_m // heads,
            SPLITS=splits,
            BLOCK_SIZE=plan.block_size,
            TILE_M=tile_m,
            TILE_N=64 if spec.k_dim <= 256 else 32,
            D=max(16, main),
            REST=1 if spec.k_dim <= max(16, main) else max(16, triton.next_power_of_2(spec.k_dim - main)),
            DV=dv,
            WINDOW=spec.window > 0,
            SOFTCAP=spec.softcap > 0,
            SINKS=spec.sinks is not None,
            num_warps=4,
        )
        if splits > 1:
            merge_kernel[len(tiles.rows), spec.num_heads](
                *(sums, stats, out, tiles.rows, plan.num_tokens, spec.num_heads, spec.v_dim),
                SPLITS=splits,
                PAD=triton.next_power_of_2(splits),
                DV=dv,
                num_warps=1,
            )

    def _splits(self, tiles: Tiles, columns: int, window: int) -> int:
        """Programs per tile: a power of two, so that few kinds of launches occur."""
        keys = min(tiles.longest, window + FEW_TOKENS) if window else tiles.longest
        wanted = PROGRAMS_PER_PROCESSOR * self._processors / (len(tiles.seqs) * columns)
        splits = 1
        while splits < min(wanted, MAX_SPLITS) and splits * KEYS_PER_SPLIT < keys:
            splits *= 2
        return splits

    def _tiles(self, plan: TritonPlan, tokens: int, *, few: bool) -> Tiles:
        """Return the tiles of ``tokens`` tokens each, made once per batch."""
        found = plan.tiles.get((tokens, few))
        if found is None:
            chosen = np.flatnonzero((plan.counts <= FEW_TOKENS) == few)
            each = -(-plan.counts[chosen] // tokens)
            starts = np.cumsum(plan.counts) - plan.counts
            number = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
            seqs = np.repeat(chosen, each)
            rows = np.flatnonzero(np.repeat((plan.counts <= FEW_TOKENS) == few, plan.counts))
            arrays = (seqs, starts[seqs] + number * tokens, rows)
            longest = int(plan.contexts[chosen].max(initial=0))
            on_device = self._upload(*(array.astype(np.int32) for array in arrays))
            found = Tiles(on_device[0], on_device[1], on_device[2], longest)
            plan.tiles[tokens, few] = found
        return found

    def _upload(self, *arrays: npt.NDArray[np.int32]) -> list[torch.Tensor]:
        """Take int32 arrays to the device in one copy."""
        flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        if self._device.type == "cuda":
            flat = flat.pin_memory().to(self._device, non_blocking=True)
        parts = torch.split(flat, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
