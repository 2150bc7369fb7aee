"""Attention by Triton kernels, for pools in the memory of a GPU (or of a CPU, under Triton's interpreter).

A plan says which launches a step makes. :meth:`TritonPagedAttention.prepare` makes one for a batch,
:meth:`TritonPagedAttention.prepare_decodes` one whose launches depend on shapes alone, for CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton

from baton_kernels.gpu import converts_fp8
from baton_kernels.gpu.tuning import Tuning, processors, tuning_for
from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch, Rotation
from baton_kernels.paged_attention.gpu_kernels import attend_kernel, merge_kernel, write_kernel

FEW_TOKENS = 8
"""Sequences with at most so many new tokens (decodes, drafts to verify) share their keys between several programs."""
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256
"""Less is not worth a program of its own."""
_STORAGES = {torch.int8: 1, torch.float8_e4m3fn: 2}
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one launch.

    Attributes:
        seqs: int32 [n], the sequence of each tile; ``numbers`` [n] which of its tiles it is.
        rows: int32, all tokens of these sequences.
        longest: Tokens of the longest of them.
    """

    seqs: torch.Tensor
    numbers: torch.Tensor
    rows: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A batch on the device.

    Attributes:
        arrays: By name, int32: ``query_starts`` [S + 1], ``context_lens`` [S], ``token_seq`` [T] whose sequence a token
            is, ``tables`` [S, G * W]; with trees ``positions`` [T], ``ancestors`` [T, 2], the lower half first, and
            ``tree_starts`` [S].
        width: W.
        counts: New tokens per sequence, on the host; ``contexts`` likewise, or the longest that they may be.
        tiles: By the number of tokens that a tile has and whether it is of the sequences with few of them.
    """

    arrays: dict[str, torch.Tensor]
    width: int
    block_size: int
    num_tokens: int
    counts: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    tiles: dict[tuple[int, bool], Tiles] = field(default_factory=dict)


class TritonPagedAttention:
    """See the module's docstring. Not thread-safe: one object per runner.

    Args:
        device: Where queries and pools are.

    Attributes:
        stores: Dtypes of pools that may differ from the queries'.
    """

    name = "triton"
    trees = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stores = frozenset({torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if converts_fp8(device) else [])})

    def prepare(self, batch: RaggedBatch) -> TritonPlan:
        """Take a batch to the device."""
        arrays = _arrays_of(batch)
        return TritonPlan(
            arrays=self._upload(arrays),
            width=batch.block_tables.shape[1] // batch.groups,
            block_size=batch.block_size,
            num_tokens=int(batch.query_starts[-1]),
            counts=np.diff(batch.query_starts).astype(np.int64),
            contexts=batch.context_lens.astype(np.int64),
        )

    def prepare_decodes(
        self, context_lens: torch.Tensor, tables: torch.Tensor, block_size: int, groups: int
    ) -> TritonPlan:
        """See :meth:`CapturedAttention.prepare_decodes`; launches are those that suit the longest sequences.

        A sequence of length 0 is padding: nothing is written for it, and its output is 0.
        """
        count = len(context_lens)
        width = tables.shape[1] // groups
        fixed = {"query_starts": np.arange(count + 1, dtype=np.int32), "token_seq": np.arange(count, dtype=np.int32)}
        return TritonPlan(
            arrays={**self._upload(fixed), "context_lens": context_lens, "tables": tables},
            width=width,
            block_size=block_size,
            num_tokens=count,
            counts=np.ones(count, np.int64),
            contexts=np.full(count, width * block_size, np.int64),
        )

    def run(
        self, plan: TritonPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
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
        return self.attend(plan, spec, pool, self.write(plan, spec, pool, (q, k, v), rotation))

    def attend(self, plan: TritonPlan, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [T, num_heads, k_dim] over keys and values that are in the pool."""
        out = q.new_empty(len(q), spec.num_heads, spec.v_dim)
        for few in (True, False):
            self._launch(plan, spec, pool, (q, out), few=few)
        return out

    def write(
        self,
        plan: TritonPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Norm and rotate, quantize and store keys and values, without attending.

        Returns:
            The queries, rotated ones in memory of their own.
        """
        q, k, v = qkv
        q_out = q if rotation is None else q.new_empty(len(q), spec.num_heads, spec.k_dim)
        turn = rotation or Rotation(q, q)
        heads = spec.kv_heads + (0 if rotation is None else spec.num_heads)
        arrays, (k_scales, v_scales, scale_block) = plan.arrays, _scales_of(pool)
        stored = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (pool.k, pool.v))
        write_kernel[plan.num_tokens, heads](
            *(q, k, v, q_out, *stored, k_scales, v_scales, turn.cos, turn.sin),
            *(q if turn.q_norm is None else turn.q_norm, q if turn.k_norm is None else turn.k_norm),
            *(arrays["query_starts"], arrays["context_lens"], arrays["token_seq"]),
            *(arrays.get("positions", arrays["token_seq"]), arrays["tables"][:, pool.group * plan.width :]),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(*pool.k.stride()[:3], *pool.v.stride()[:3], scale_block, arrays["tables"].stride(0), plan.block_size),
            *(spec.num_heads, spec.kv_heads, spec.k_dim, spec.v_dim),
            *(2 * turn.cos.shape[1] if rotation else 0, turn.norm_eps, turn.norm_offset),
            D=triton.next_power_of_2(spec.k_dim),
            DV=triton.next_power_of_2(spec.v_dim),
            ROTATE=rotation is not None,
            PAIRS=turn.pairs,
            Q_NORM=turn.q_norm is not None,
            K_NORM=turn.k_norm is not None,
            LATENT=pool.is_latent,
            TREE="ancestors" in arrays,
            STORAGE=_STORAGES.get(pool.k.dtype, 0),
            num_warps=1,
        )
        return q_out

    def _launch(
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
        arrays = plan.arrays
        main = 1 << (spec.k_dim.bit_length() - 1)
        operator = "attention_few" if few else "attention_many"
        chosen = tuning_for(operator, self._device, {"k_dim": spec.k_dim, "v_dim": spec.v_dim, "group": group})
        heads = min(group, chosen.tile_m)
        tiles = self._tiles(plan, chosen.tile_m // heads, few=few)
        if not len(tiles.seqs):
            return
        columns = spec.kv_heads * -(-group // heads)
        splits = self._splits(tiles, columns, spec.window, chosen) if few else 1
        dv = max(16, triton.next_power_of_2(spec.v_dim))
        sums = stats = out
        if splits > 1:
            sums = q.new_empty(splits, plan.num_tokens, spec.num_heads, dv, dtype=torch.float32)
            stats = q.new_empty(splits, plan.num_tokens, spec.num_heads, 2, dtype=torch.float32)
        starts = arrays["query_starts"]
        k_and_v_scales = _scales_of(pool)
        attend_kernel[len(tiles.seqs), columns, splits](
            *(q, pool.k, pool.v, *k_and_v_scales[:2], out, sums, stats, q if spec.sinks is None else spec.sinks),
            *(starts, arrays["context_lens"]),
            *(arrays.get(name, starts) for name in ("positions", "ancestors", "tree_starts")),
            *(arrays["tables"][:, pool.group * plan.width :], tiles.seqs, tiles.numbers, q.stride(0), q.stride(1)),
            *(*pool.k.stride()[:3], *pool.v.stride()[:3], k_and_v_scales[2], arrays["tables"].stride(0)),
            *(plan.num_tokens, spec.num_heads, spec.k_dim, spec.v_dim, spec.window, spec.scale, spec.softcap),
            GROUP=group,
            HEADS=heads,
            TOKENS=chosen.tile_m // heads,
            SPLITS=splits,
            BLOCK_SIZE=plan.block_size,
            TILE_M=chosen.tile_m,
            TILE_N=chosen.tile_n,
            D=max(16, main),
            REST=1 if spec.k_dim <= max(16, main) else max(16, triton.next_power_of_2(spec.k_dim - main)),
            DV=dv,
            WINDOW=spec.window > 0,
            SOFTCAP=spec.softcap > 0,
            SINKS=spec.sinks is not None,
            TREE="ancestors" in arrays,
            STORAGE=_STORAGES.get(pool.k.dtype, 0),
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )
        if splits > 1:
            merge_kernel[len(tiles.rows), spec.num_heads](
                *(sums, stats, out, tiles.rows, plan.num_tokens, spec.num_heads, spec.v_dim),
                SPLITS=splits,
                PAD=triton.next_power_of_2(splits),
                DV=dv,
                num_warps=1,
            )

    def _splits(self, tiles: Tiles, columns: int, window: int, chosen: Tuning) -> int:
        """Programs per tile: a power of two, so that few kinds of launches occur."""
        keys = min(tiles.longest, window + FEW_TOKENS) if window else tiles.longest
        wanted = chosen.programs * processors(self._device) / (len(tiles.seqs) * columns)
        splits = 1
        while splits < min(wanted, MAX_SPLITS) and splits * KEYS_PER_SPLIT < keys:
            splits *= 2
        return splits

    def _tiles(self, plan: TritonPlan, tokens: int, *, few: bool) -> Tiles:
        """Return the tiles of ``tokens`` tokens each, made once per plan."""
        found = plan.tiles.get((tokens, few))
        if found is None:
            chosen = np.flatnonzero((plan.counts <= FEW_TOKENS) == few)
            each = -(-plan.counts[chosen] // tokens)
            numbers = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
            rows = np.flatnonzero(np.repeat((plan.counts <= FEW_TOKENS) == few, plan.counts))
            arrays = {"seqs": np.repeat(chosen, each), "numbers": numbers, "rows": rows}
            on_device = self._upload({name: array.astype(np.int32) for name, array in arrays.items()})
            found = Tiles(**on_device, longest=int(plan.contexts[chosen].max(initial=0)))
            plan.tiles[tokens, few] = found
        return found

    def _upload(self, arrays: dict[str, Int32s]) -> dict[str, torch.Tensor]:
        """Take int32 arrays to the device in one copy; returns views of it."""
        flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays.values()]))
        if self._device.type == "cuda":
            flat = flat.pin_memory().to(self._device, non_blocking=True)
        parts = torch.split(flat, [array.size for array in arrays.values()])
        return {name: part.view(array.shape) for part, (name, array) in zip(parts, arrays.items(), strict=True)}


def _arrays_of(batch: RaggedBatch) -> dict[str, Int32s]:
    """Return a batch's arrays as the kernels take them."""
    counts = np.diff(batch.query_starts)
    arrays = {
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "token_seq": np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        "tables": batch.block_tables,
    }
    if batch.trees is not None:
        arrays["positions"] = batch.positions.astype(np.int32)
        arrays["ancestors"] = np.ascontiguousarray(batch.trees.ancestors).view(np.int32).reshape(-1, 2)
        arrays["tree_starts"] = batch.trees.starts
    return arrays


def _scales_of(pool: LayerPool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the scales of keys and of values, as kernels take them, and their stride from block to block."""
    if pool.k_scales is None or pool.v_scales is None:
        return pool.k, pool.k, 0
    if pool.k.dtype is torch.int8:  # of bfloat16, which Triton's interpreter has not, kernels take the bits
        return pool.k_scales.view(torch.int16), pool.v_scales.view(torch.int16), pool.k_scales.stride(0)
    return pool.k_scales, pool.v_scales, 0
