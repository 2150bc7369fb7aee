"""Triton kernels of paged attention: new tokens' KV into the pool, attention over tiles of it, the merge of splits.

Queries of one KV head's group lie in the rows of one tile, so that a key is read once for all of them. A tile goes over
its keys in pieces of ``TILE_N`` with a running maximum and sum (Milakov and Gimelshein, 2018; FlashAttention-2, 2023);
where few tiles would leave the device idle, several programs share a tile's keys, and a second kernel merges what they
found (Flash-Decoding, 2023). Lengths are read on the device and no launch depends on them, so launches can be captured.

Head sizes are any: a key is read as its largest power of two and the rest (512 + 64 for MLA's latents, 64 + 16 for 80).
KV of 8 bits (:mod:`baton_kernels.paged_attention.quantized`) is multiplied as it is: scales of keys are factors of
scores, those of values of weights (int8), or of the result (fp8). ``STORAGE``: 0 floats, 1 int8, 2 fp8.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated(
    x, weight, cos, sin, dim, first, position, eps, offset, D: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr
):
    """Norm and rotate a head at ``x`` [dim]; ``first``: the elements that rotate, the others stay; float32 [D]."""
    d = tl.arange(0, D)
    half = first // 2
    if PAIRS:
        partner, number, low = d ^ 1, d // 2, d % 2 == 0
    else:
        low = d < half
        partner, number = tl.where(low, d + half, d - half), tl.where(low, d, d - half)
    turns = d < first
    partner, number = tl.where(turns, partner, d), tl.where(turns, number, 0)
    mine = tl.load(x + d, mask=d < dim, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=d < dim, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(mine * mine, axis=0) / dim + eps)
        mine *= factor * (tl.load(weight + d, mask=d < dim, other=0.0).to(tl.float32) + offset)
        other *= factor * (tl.load(weight + partner, mask=d < dim, other=0.0).to(tl.float32) + offset)
    c = tl.load(cos + position * half + number, mask=turns, other=1.0)
    s = tl.load(sin + position * half + number, mask=turns, other=0.0)
    return mine * c + tl.where(low, -other, other) * s


@triton.jit
def _from_bfloat16(bits):
    """Return float32 of the bits of bfloat16, int16."""
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store(x, to, scales, dim, D: tl.constexpr, STORAGE: tl.constexpr):
    """Store x [D] at ``to``; ``scales``: where its scale is written (int8, bits of bfloat16) or read (fp8, float32).

    Of fp8 the bytes are stored.
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
        # Sums beyond 2^23 have no fraction: what is added and taken off again rounds to nearest, ties to even.
        x = tl.where(usable, (x + 12582912.0) - 12582912.0, 0.0)
        tl.store(scales, bits.to(tl.int16))
    if STORAGE == 2:
        x = tl.div_rn(x.to(tl.float32), tl.load(scales))
        odd = (x != x) | (tl.abs(x) == float("inf"))
        size = tl.where(odd, 0.0, tl.minimum(tl.abs(x), 448.0))
        # To nearest, ties to even, by hand: the interpreter's conversion is not exact. Of normal numbers 20 bits of the
        # fraction go, and the exponent's bias becomes 7 of 127; subnormal ones are multiples of 2^-9.
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
        subnormal = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)
        sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << 7
        x = tl.where(odd, 0x7F, tl.where(size < 0.015625, subnormal, normal) | sign)
    tl.store(to + tl.arange(0, D), x.to(to.dtype.element_ty), mask=there)


@triton.jit
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

    Grid: (tokens, kv_heads), with ``ROTATE`` (tokens, kv_heads + num_heads). Sequences of length 0 are left out.
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
            x = tl.load(at + d, mask=d < k_dim, other=0.0)
        _store(x, k_pool + block * k_block + head * k_pool_head + slot * k_slot, k_scales + scale, k_dim, D, STORAGE)
        if not LATENT:
            dv = tl.arange(0, DV)
            y = tl.load(v + token * v_token + head * v_head + dv, mask=dv < v_dim, other=0.0)
            _store(
                y, v_pool + block * v_block + head * v_pool_head + slot * v_slot, v_scales + scale, v_dim, DV, STORAGE
            )


@triton.jit
def _ones(bits):
    """How many bits of int32 numbers are set (Warren, Hacker's Delight, 5-1)."""
    x = bits.to(tl.uint32, bitcast=True)
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _below(count):
    """Return int32 of which the lowest ``count`` bits are set, 0 to 32 of them."""
    count = tl.minimum(tl.maximum(count, 0), 32)
    return tl.where(count == 32, -1, (1 << tl.minimum(count, 31)) - 1)


@triton.jit
def _seen_in_tree(key, slot, position, root, low, high, window, WINDOW: tl.constexpr):
    """Which keys [1, N] tokens [M, 1] see that are nodes of a tree, or, without bits of ancestors, of none.

    A key's position is its slot up to the root, and by the number of ancestors above it below that.
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


@triton.jit
def attend_kernel(
    q, k_pool, v_pool, k_scales, v_scales, out, sums, stats, sinks,
    query_starts, context_lens, positions, ancestors, tree_starts, tables, tile_seqs, tile_numbers,
    q_token, q_head, k_block, k_pool_head, k_slot, v_block, v_pool_head, v_slot, scale_block, table_stride,
    num_tokens, num_heads, k_dim, v_dim, window, scale, softcap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """Attend with ``TOKENS`` tokens of a sequence and ``HEADS`` of a KV head's ``GROUP`` over a split of the keys.

    Grid: (tiles, kv_heads * ceil(GROUP / HEADS), SPLITS). With one split the result goes to ``out`` [T, heads, v_dim];
    else sums of weighted values go to ``sums`` float32 [SPLITS, T, heads, DV], and maxima (base 2) and sums of weights
    to ``stats`` float32 [SPLITS, T, heads, 2]. A sequence of length 0 has zeros.
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
    share = tl.cdiv(tl.cdiv(tl.maximum(last - start, 0), TILE_N), SPLITS) * TILE_N
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
        k_main = tl.load(from_k[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < k_dim), other=0.0)
        scores = tl.dot(q_main, k_main.to(q_main.dtype), input_precision="ieee")
        if REST > 1:
            k_rest = tl.load(from_k[None, :] + rest[:, None], mask=there[None, :] & (rest[:, None] < k_dim), other=0.0)
            scores += tl.dot(q_rest, k_rest.to(q_rest.dtype), input_precision="ieee")
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
        values = values.to(q_main.dtype)
        if STORAGE == 1:
            weights *= _from_bfloat16(tl.load(v_scales + from_scales, mask=there, other=0))[None, :]
        total = total * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = higher
    if STORAGE == 2:
        total *= tl.load(v_scales + kv_head)
    if SPLITS == 1:
        to = out + (token.to(tl.int64) * num_heads + head)[:, None] * v_dim + dv[None, :]
        total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & (dv[None, :] < v_dim))
    else:
        at = (split.to(tl.int64) * num_tokens + token) * num_heads + head
        tl.store(sums + at[:, None] * DV + dv[None, :], total, mask=live[:, None])
        tl.store(stats + at * 2, most, mask=live)
        tl.store(stats + at * 2 + 1, weight, mask=live)


@triton.jit
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
