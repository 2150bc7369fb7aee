"""Paged attention by Triton kernels, for pools in the memory of a GPU (or of a CPU, under Triton's interpreter).

A plan holds the launches of a step. :meth:`TritonPagedAttention.prepare` makes one for a batch,
:meth:`TritonPagedAttention.prepare_decodes` one whose launches depend on shapes alone, for CUDA graphs.

Three kernels: new tokens' KV into the pool, attention over tiles of it, the merge of splits. Queries of one KV head's
group are in the rows of one tile, so that a key is read once for all of them. A tile goes over its keys in pieces of
``TILE_N`` with a running maximum and sum (Milakov and Gimelshein, 2018; FlashAttention-2, 2023); where few tiles would
leave the device idle, several programs share a tile's keys, and a second kernel merges their results (Flash-Decoding,
2023). Lengths are read on the device and no launch depends on them, so launches can be captured.

Head sizes are any: a key is read as its largest power of two and the rest (512 + 64 for MLA's latents, 64 + 16 for 80).
KV of 8 bits (:mod:`baton_kernels.paged_attention.quantized`) is multiplied without conversion: scales of keys are
factors of scores, those of values are factors of weights (int8) or of the result (fp8). ``STORAGE``: 0 floats, 1 int8,
2 fp8.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from baton_kernels.gpu import PRECISION, converts_fp8
from baton_kernels.gpu.tuning import Tuning, processors, tuning_for
from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, RaggedBatch, RotatingAttention, Rotation

LOG2E = tl.constexpr(1.4426950408889634)
PART = tl.constexpr(64)
"""Elements of a wide head that are multiplied at a time."""
_INDICES = ["query_starts", "context_lens", "token_seq", "positions", "ancestors", "tree_starts", "tables"]
_INDICES += ["tile_seqs", "tile_numbers", "rows"]
"""Arrays of a batch: they lie behind each other, at other places in each step.

Kernels are not specialized on their alignment, nor for numbers that change from step to step: a variant that a step
is the first to need keeps all sequences waiting for seconds.
"""


@triton.jit
def _rotated(
    x, weight, cos, sin, dim, first, position, eps, offset, D: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr
):
    """Norm and rotate a head at ``x`` [dim], float32 [D]; ``first`` is the number of elements that rotate."""
    d = tl.arange(0, D)
    half = first // 2
    if PAIRS:
        partner, number, low = d ^ 1, d // 2, d % 2 == 0
    else:
        low = d < half
        partner, number = tl.where(low, d + half, d - half), tl.where(low, d, d - half)
    turns = d < first
    partner, number = tl.where(turns, partner, d), tl.where(turns, number, 0)
    value = tl.load(x + d, mask=d < dim, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=d < dim, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
        value *= factor * (tl.load(weight + d, mask=d < dim, other=0.0).to(tl.float32) + offset)
        other *= factor * (tl.load(weight + partner, mask=d < dim, other=0.0).to(tl.float32) + offset)
    c = tl.load(cos + position * half + number, mask=turns, other=1.0)
    s = tl.load(sin + position * half + number, mask=turns, other=0.0)
    return value * c + tl.where(low, -other, other) * s


@triton.jit
def _from_bfloat16(bits):
    """Return float32 of the bits of bfloat16, int16."""
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store(x, to, scales, dim, D: tl.constexpr, STORAGE: tl.constexpr):
    """Store x [D] at ``to``; ``scales``: where its scale is written (int8, bits of bfloat16) or read (fp8, float32).

    fp8 is stored as bytes.
    """
    there = tl.arange(0, D) < dim
    if STORAGE == 1:
        x = tl.where(there, x.to(tl.float32), 0.0)
        largest = tl.max(tl.abs(x), axis=0)
        odd = (tl.sum((x != x).to(tl.int32), axis=0) > 0) | (largest == float("inf"))
        wanted = tl.div_rn(largest, 127.0)
        bits = wanted.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        bits = tl.where(wanted < 1.1754943508222875e-38, 0, bits)
        bits = tl.where(odd, 0x7FC0, bits)
        scale = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        usable = scale > 0.0
        x = tl.div_rn(tl.where(odd, 0.0, x), tl.where(usable, scale, 1.0))
        # Sums beyond 2^23 have no fraction: to add and subtract this number rounds to nearest, ties to even.
        x = tl.where(usable, (x + 12582912.0) - 12582912.0, 0.0)
        tl.store(scales, bits.to(tl.int16))
    if STORAGE == 2:
        x = tl.div_rn(x.to(tl.float32), tl.load(scales))
        odd = (x != x) | (tl.abs(x) == float("inf"))
        size = tl.where(odd, 0.0, tl.minimum(tl.abs(x), 448.0))
        # To nearest, ties to even, by hand: the interpreter's conversion is not exact. Normal numbers lose 20 bits of
        # the fraction, and the exponent's bias becomes 7 instead of 127; subnormal ones are multiples of 2^-9.
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
        subnormal = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)
        sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << 7
        x = tl.where(odd, 0x7F, tl.where(size < 0.015625, subnormal, normal) | sign)
    tl.store(to + tl.arange(0, D), x.to(to.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def write_kernel(
    q, k, v, q_out, k_pool, v_pool, k_scales, v_scales, cos, sin, q_norm, k_norm,
    query_starts, context_lens, token_seq, positions, tables,
    q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_pool_head, k_slot, v_block, v_pool_head, v_slot, scale_block, table_stride, block_size,
    num_heads, kv_heads, k_dim, v_dim, rotary, eps, offset,
    D: tl.constexpr, DV: tl.constexpr, ROTATE: tl.constexpr, PAIRS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, LATENT: tl.constexpr, TREE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Store one KV head of one token, or, beyond the KV heads, rotate one of its query heads into ``q_out``.

    Grid: (tokens, kv_heads), with ``ROTATE`` (tokens, kv_heads + num_heads). Sequences of length 0 are skipped.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = tl.load(token_seq + token)
    end = tl.load(query_starts + seq + 1)
    slot = tl.load(context_lens + seq) - end + token
    if slot < 0:
        return
    position = slot
    if TREE:
        position = tl.load(positions + token).to(tl.int64)
    d = tl.arange(0, D)
    if head >= kv_heads:
        head -= kv_heads
        x = _rotated(
            q + token * q_token + head * q_head,
            q_norm,
            cos,
            sin,
            k_dim,
            rotary,
            position,
            eps,
            offset,
            D,
            Q_NORM,
            PAIRS,
        )
        to = q_out + (token * num_heads + head) * k_dim + d
        tl.store(to, x.to(q_out.dtype.element_ty), mask=d < k_dim)
    else:
        block = tl.load(tables + seq * table_stride + slot // block_size).to(tl.int64)
        slot = slot % block_size
        at = k + token * k_token + head * k_head
        scale = block * scale_block + head * block_size + slot
        if STORAGE == 2:
            scale = head.to(tl.int64)
        if ROTATE:
            x = _rotated(at, k_norm, cos, sin, k_dim, rotary, position, eps, offset, D, K_NORM, PAIRS)
        else:
            x = tl.load(at + d, mask=d < k_dim, other=0.0).to(tl.float32)
        _store(x, k_pool + block * k_block + head * k_pool_head + slot * k_slot, k_scales + scale, k_dim, D, STORAGE)
        if not LATENT:
            dv = tl.arange(0, DV)
            y = tl.load(v + token * v_token + head * v_head + dv, mask=dv < v_dim, other=0.0)
            _store(
                y, v_pool + block * v_block + head * v_pool_head + slot * v_slot, v_scales + scale, v_dim, DV, STORAGE
            )


@triton.jit
def _ones(bits):
    """Return the number of set bits of int32 numbers (Warren, Hacker's Delight, 5-1)."""
    x = bits.to(tl.uint32, bitcast=True)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _below(count):
    """Return int32 with the lowest ``count`` bits set, 0 to 32 of them."""
    count = tl.minimum(tl.maximum(count, 0), 32)
    return tl.where(count == 32, -1, (1 << tl.minimum(count, 31)) - 1)


@triton.jit
def _seen_in_tree(key, slot, position, root, low, high, window, WINDOW: tl.constexpr):
    """Return which keys [1, N] tokens [M, 1] see; a token without bits of ancestors is in no tree.

    Up to the root a key's position is its slot; below the root it follows from the number of ancestors above the key.
    """
    number = key - root
    word = tl.where(number < 32, low, high)
    inside = (number >= 0) & (number < 64) & (((word >> (number & 31)) & 1) != 0)
    tree = (low | high) != 0
    seen = tl.where(tree, (number < 0) | inside, key <= slot)
    if WINDOW:
        depth = _ones(low & _below(number)) + _ones(high & _below(number - 32))
        seen = seen & (tl.where(tree & (number > 0), root + depth, key) > position - window)
    return seen


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "splits"], do_not_specialize_on_alignment=_INDICES)
def attend_kernel(
    q, k_pool, v_pool, k_scales, v_scales, out, sums, stats, sinks,
    query_starts, context_lens, positions, ancestors, tree_starts, tables, tile_seqs, tile_numbers,
    q_token, q_head, k_block, k_pool_head, k_slot, v_block, v_pool_head, v_slot, scale_block, table_stride,
    num_tokens, num_heads, k_dim, v_dim, window, scale, softcap, splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Attend with ``TOKENS`` tokens of a sequence and ``HEADS`` of a KV head's ``GROUP`` over a split of the keys.

    Grid: (tiles, kv_heads * ceil(GROUP / HEADS), splits). Without ``SPLIT`` the result goes to ``out`` [T, heads,
    v_dim]; else sums of weighted values go to ``sums`` float32 [splits, T, heads, DV], and maxima (base 2) and sums of
    weights to ``stats`` float32 [splits, T, heads, 2]. A sequence of length 0 has zeros.
    """
    seq = tl.load(tile_seqs + tl.program_id(0))
    first = tl.load(query_starts + seq) + tl.load(tile_numbers + tl.program_id(0)) * TOKENS
    parts = (GROUP + HEADS - 1) // HEADS
    kv_head, part, split = tl.program_id(1) // parts, tl.program_id(1) % parts, tl.program_id(2)
    end, context = tl.load(query_starts + seq + 1), tl.load(context_lens + seq)
    row = tl.arange(0, TILE_M)
    token, inner = first + row // HEADS, part * HEADS + row % HEADS
    live = (row < TOKENS * HEADS) & (token < end) & (inner < GROUP)
    slot = context - end + token
    head = kv_head * GROUP + inner
    d, rest, dv = tl.arange(0, D), D + tl.arange(0, REST), tl.arange(0, DV)
    from_q = token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head
    # Queries of so many float32 do not fit into registers: their parts are read again for each tile of keys.
    WIDE: tl.constexpr = D >= 256 and q.dtype.element_ty == tl.float32
    if not WIDE:
        q_main = tl.load(q + from_q + d[None, :], mask=live[:, None] & (d[None, :] < k_dim), other=0.0)
    q_rest = tl.load(q + from_q + rest[None, :], mask=live[:, None] & (rest[None, :] < k_dim), other=0.0)

    last = tl.minimum(context, context - end + first + TOKENS)  # one behind the last slot that a row sees
    lowest = context - end + first  # position of the first row, or one before all rows
    if TREE:
        root = tl.load(tree_starts + seq)
        low = tl.load(ancestors + token * 2, mask=live, other=0)
        high = tl.load(ancestors + token * 2 + 1, mask=live, other=0)
        position = tl.load(positions + token, mask=live, other=0)
        if tl.load(ancestors + first * 2, mask=first < end, other=0) != 0:
            lowest = root
    lower = 0
    if WINDOW:
        lower = tl.maximum(0, lowest + 1 - window)
    start = lower // TILE_N * TILE_N
    stop = last
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(last - start, 0), TILE_N), splits) * TILE_N
        start += split * share
        stop = tl.minimum(last, start + share)

    most = tl.full([TILE_M], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_M], tl.float32)
    if SINKS:
        if split == 0:
            most = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
            weight += 1.0
    total = tl.zeros([TILE_M, DV], tl.float32)
    k_scale = scale
    if STORAGE == 2:
        k_scale = scale * tl.load(k_scales + kv_head)
    for at in range(start, stop, TILE_N):
        key = at + tl.arange(0, TILE_N)
        there = (key < stop) & (key >= lower)
        block = tl.load(tables + seq * table_stride + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        from_k = k_pool + block * k_block + kv_head * k_pool_head + key % BLOCK_SIZE * k_slot
        if WIDE:
            scores = tl.zeros([TILE_M, TILE_N], tl.float32)
            for first_d in range(0, D, PART):
                part_d = first_d + tl.arange(0, PART)
                q_part = tl.load(
                    q + from_q + part_d[None, :], mask=live[:, None] & (part_d[None, :] < k_dim), other=0.0
                )
                there_k = there[None, :] & (part_d[:, None] < k_dim)
                k_part = tl.load(from_k[None, :] + part_d[:, None], mask=there_k, other=0.0)
                scores += tl.dot(q_part, k_part.to(q_part.dtype), input_precision=PRECISION)
        else:
            k_main = tl.load(from_k[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < k_dim), other=0.0)
            scores = tl.dot(q_main, k_main.to(q_main.dtype), input_precision=PRECISION)
        if REST > 1:
            k_rest = tl.load(from_k[None, :] + rest[:, None], mask=there[None, :] & (rest[:, None] < k_dim), other=0.0)
            scores += tl.dot(q_rest, k_rest.to(q_rest.dtype), input_precision=PRECISION)
        if STORAGE == 1:
            from_scales = block * scale_block + kv_head * BLOCK_SIZE + key % BLOCK_SIZE
            scores *= _from_bfloat16(tl.load(k_scales + from_scales, mask=there, other=0))[None, :]
        scores *= k_scale
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if TREE:
            seen = there[None, :] & _seen_in_tree(
                key[None, :], slot[:, None], position[:, None], root, low[:, None], high[:, None], window, WINDOW
            )
        else:
            seen = there[None, :] & (key[None, :] <= slot[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > slot[:, None] - window)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(most - base)
        weight = weight * decay + tl.sum(weights, axis=1)
        from_v = v_pool + block * v_block + kv_head * v_pool_head + key % BLOCK_SIZE * v_slot
        values = tl.load(from_v[:, None] + dv[None, :], mask=there[:, None] & (dv[None, :] < v_dim), other=0.0)
        values = values.to(q_rest.dtype)
        if STORAGE == 1:
            weights *= _from_bfloat16(tl.load(v_scales + from_scales, mask=there, other=0))[None, :]
        total = total * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        most = higher
    if STORAGE == 2:
        total *= tl.load(v_scales + kv_head)
    if not SPLIT:
        to = out + (token.to(tl.int64) * num_heads + head)[:, None] * v_dim + dv[None, :]
        total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & (dv[None, :] < v_dim))
    else:
        at = (split.to(tl.int64) * num_tokens + token) * num_heads + head
        tl.store(sums + at[:, None] * DV + dv[None, :], total, mask=live[:, None])
        tl.store(stats + at * 2, most, mask=live)
        tl.store(stats + at * 2 + 1, weight, mask=live)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_INDICES)
def merge_kernel(
    sums, stats, out, rows, num_tokens, num_heads, v_dim, SPLITS: tl.constexpr, PAD: tl.constexpr, DV: tl.constexpr
):
    """Merge the splits of one head of one token. Grid: (rows, heads); ``rows`` names the tokens."""
    token, head = tl.load(rows + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    split, dv = tl.arange(0, PAD), tl.arange(0, DV)
    at = (split.to(tl.int64) * num_tokens + token) * num_heads + head
    there = split < SPLITS
    most = tl.load(stats + at * 2, mask=there, other=float("-inf"))
    weight = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
    highest = tl.max(most, axis=0)
    factor = tl.exp2(most - tl.where(highest == float("-inf"), 0.0, highest))
    parts = tl.load(sums + at[:, None] * DV + dv[None, :], mask=there[:, None], other=0.0)
    all_weight = tl.sum(weight * factor, axis=0)
    total = tl.sum(parts * factor[:, None], axis=0) / tl.where(all_weight == 0.0, 1.0, all_weight)
    tl.store(out + (token * num_heads + head) * v_dim + dv, total.to(out.dtype.element_ty), mask=dv < v_dim)


# Launches


FEW_TOKENS = 8
"""Sequences with at most so many new tokens (decodes, drafts to verify) divide their keys among several programs."""
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256
"""Fewer keys are not worth a program of their own."""
_STORAGES = {torch.int8: 1, torch.float8_e4m3fn: 2}
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one launch.

    Attributes:
        seqs: int32 [n], index of each tile's sequence.
        numbers: int32 [n], index of each tile among those of its sequence.
        rows: int32, indices of all tokens of these sequences.
        longest: Number of tokens of the longest of them.
    """

    seqs: torch.Tensor
    numbers: torch.Tensor
    rows: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A batch on the device.

    Attributes:
        arrays: int32 arrays by name: ``query_starts`` [S + 1], ``context_lens`` [S], ``token_seq`` [T] (index of each
            token's sequence), ``tables`` [S, G * W]; with trees ``positions`` [T], ``ancestors`` [T, 2], the lower half
            first, and ``tree_starts`` [S].
        width: Number of blocks in a block table, W.
        block_size: Number of tokens per block.
        num_tokens: Number of new tokens, T.
        counts: New tokens per sequence, on the host.
        contexts: Tokens per sequence, on the host, or the largest possible numbers of them.
        tiles: Tiles by the number of their tokens, and whether they are of sequences with few new tokens.
    """

    arrays: dict[str, torch.Tensor]
    width: int
    block_size: int
    num_tokens: int
    counts: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    tiles: dict[tuple[int, bool], Tiles] = field(default_factory=dict)


class TritonPagedAttention(RotatingAttention):
    """See the module's docstring. Not thread-safe: one object per runner.

    Args:
        device: Device of queries and pools.

    Attributes:
        stores: Dtypes of pools that are supported beside the queries' dtype.
    """

    name = "triton"
    trees = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stores = frozenset({torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if converts_fp8(device) else [])})

    def prepare(self, batch: RaggedBatch) -> TritonPlan:
        """Copy a batch to the device."""
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
        self, context_lens: torch.Tensor, tables: torch.Tensor, block_size: int, groups: int, tokens: int = 1
    ) -> TritonPlan:
        """See :meth:`CapturedAttention.prepare_decodes`; launches are those that suit the longest sequences.

        A sequence of length 0 is padding: nothing is written for it, and its output is 0.
        """
        count = len(context_lens)
        width = tables.shape[1] // groups
        fixed = {
            "query_starts": np.arange(count + 1, dtype=np.int32) * tokens,
            "token_seq": np.repeat(np.arange(count, dtype=np.int32), tokens),
        }
        return TritonPlan(
            arrays={**self._upload(fixed), "context_lens": context_lens, "tables": tables},
            width=width,
            block_size=block_size,
            num_tokens=count * tokens,
            counts=np.full(count, tokens, np.int64),
            contexts=np.full(count, width * block_size, np.int64),
        )

    def run_rotated(
        self,
        plan: TritonPlan,
        spec: AttentionSpec,
        pool: LayerPool,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: Rotation | None,
    ) -> torch.Tensor:
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
            The queries; rotated ones are in new memory.
        """
        q, k, v = qkv
        q_out = q if rotation is None else q.new_empty(len(q), spec.num_heads, spec.k_dim)
        turn = rotation or Rotation(q, q)
        heads = spec.kv_heads + (0 if rotation is None else spec.num_heads)
        arrays, (k_scales, v_scales, scale_block) = plan.arrays, _pool_scales(pool)
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
        sizes = {"bytes": q.element_size(), "k_dim": spec.k_dim, "v_dim": spec.v_dim, "group": group}
        chosen = tuning_for(operator, self._device, sizes)
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
        k_and_v_scales = _pool_scales(pool)
        attend_kernel[len(tiles.seqs), columns, splits](
            *(q, pool.k, pool.v, *k_and_v_scales[:2], out, sums, stats, q if spec.sinks is None else spec.sinks),
            *(starts, arrays["context_lens"]),
            *(arrays.get(name, starts) for name in ("positions", "ancestors", "tree_starts")),
            *(arrays["tables"][:, pool.group * plan.width :], tiles.seqs, tiles.numbers, q.stride(0), q.stride(1)),
            *(*pool.k.stride()[:3], *pool.v.stride()[:3], k_and_v_scales[2], arrays["tables"].stride(0)),
            *(plan.num_tokens, spec.num_heads, spec.k_dim, spec.v_dim, spec.window, spec.scale, spec.softcap),
            splits,
            GROUP=group,
            HEADS=heads,
            TOKENS=chosen.tile_m // heads,
            SPLIT=splits > 1,
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
        """Return the number of programs per tile: a power of two, so that few kinds of launches occur."""
        keys = min(tiles.longest, window + FEW_TOKENS) if window else tiles.longest
        wanted = chosen.programs * processors(self._device) / (len(tiles.seqs) * columns)
        splits = 1
        while splits < min(wanted, MAX_SPLITS) and splits * KEYS_PER_SPLIT < keys:
            splits *= 2
        return splits

    def _tiles(self, plan: TritonPlan, tokens: int, *, few: bool) -> Tiles:
        """Return the tiles of ``tokens`` tokens each, made once per plan."""
        tiles = plan.tiles.get((tokens, few))
        if tiles is None:
            chosen = np.flatnonzero((plan.counts <= FEW_TOKENS) == few)
            each = -(-plan.counts[chosen] // tokens)
            numbers = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
            rows = np.flatnonzero(np.repeat((plan.counts <= FEW_TOKENS) == few, plan.counts))
            arrays = {"seqs": np.repeat(chosen, each), "numbers": numbers, "rows": rows}
            on_device = self._upload({name: array.astype(np.int32) for name, array in arrays.items()})
            tiles = Tiles(**on_device, longest=int(plan.contexts[chosen].max(initial=0)))
            plan.tiles[tokens, few] = tiles
        return tiles

    def _upload(self, arrays: dict[str, Int32s]) -> dict[str, torch.Tensor]:
        """Copy int32 arrays to the device in one copy; return views of it."""
        flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays.values()]))
        if self._device.type == "cuda":
            flat = flat.pin_memory().to(self._device, non_blocking=True)
        parts = torch.split(flat, [array.size for array in arrays.values()])
        return {name: part.view(array.shape) for part, (name, array) in zip(parts, arrays.items(), strict=True)}


def _arrays_of(batch: RaggedBatch) -> dict[str, Int32s]:
    """Return a batch's arrays as the kernels read them."""
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


def _pool_scales(pool: LayerPool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the scales of keys and of values, as kernels read them, and their stride from block to block."""
    if pool.k_scales is None or pool.v_scales is None:
        return pool.k, pool.k, 0
    if pool.k.dtype is torch.int8:  # kernels read the bits: Triton's interpreter has no bfloat16
        return pool.k_scales.view(torch.int16), pool.v_scales.view(torch.int16), pool.k_scales.stride(0)
    return pool.k_scales, pool.v_scales, 0
