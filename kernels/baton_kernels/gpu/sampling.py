"""Sampling on a GPU: mask, temperature, top-k, top-p, min-p and the draw of a token per row, without a sort.

The definition is ``baton.engine.sample`` (``filters.filter_batch`` and ``sampler.draw``), with the same random numbers:
a token is the same on CPU and GPU up to the rounding of sums. Thresholds of top-k and top-p are found by their bits:
floats are ordered as their bits are, so 16 passes over a row, each of which counts (or sums) what reaches three
candidates, give the exact value (a radix selection; Alabi et al., "Fast k-Selection Algorithms for Graphics Processing
Units", 2012).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from baton_kernels.random_numbers import GOLDEN, MIX1, MIX2, Uint64s
from baton_kernels.sampling import RowFilter
from baton_kernels.token_mask import TokenMask, Upload, upload_to

TILE = 4096
"""Number of logits that a program reads at a time; a multiple of the chunk."""
CHUNK = 128
"""Number of tokens whose sum takes part in the first round of a draw, as in the definition."""
WARPS = 16
"""Of the one program of a row: as many loads have to be under way as its multiprocessor can take."""
_TOKENS = 1 << 32


class RandomConstants:
    """The constants of SplitMix64 on a device: Triton has no unsigned literals of 64 bits.

    Attributes:
        tensor: uint64 [3], the increment and the two multipliers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tensor = self.upload(np.array([GOLDEN, MIX1, MIX2], np.uint64))

    def upload(self, numbers: Uint64s) -> torch.Tensor:
        """Copy uint64 numbers to the device."""
        return torch.from_numpy(numbers.view(np.int64)).to(self._device).view(torch.uint64)


@triton.jit
def uniform(key, number, constants):
    """Return the ``number``-th number of a key, between 0 and 1, in float64; see ``baton_kernels.random_numbers``."""
    x = key + (tl.cast(number, tl.uint64) + 1) * tl.load(constants)
    x = (x ^ (x >> 30)) * tl.load(constants + 1)
    x = (x ^ (x >> 27)) * tl.load(constants + 2)
    x = x ^ (x >> 31)
    return ((x >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def exponential(key, number, constants):
    """Return the ``number``-th number of a key, exponentially distributed with mean 1, in float64."""
    return -tl.log(uniform(key, number, constants))


@triton.jit
def _logits(logits, mask, at, vocab, MASKED: tl.constexpr):
    """Load logits in float32, minus infinity where they are forbidden or beyond the vocabulary."""
    there = at < vocab
    x = tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32)
    if MASKED:
        word = tl.load(mask + at // 32, mask=there, other=0)
        x = tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _ordered(x):
    """Return uint32 numbers in the order of float32 numbers."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # zeros of both signs are equal
    return bits ^ ((bits >> 31) * 0x7FFFFFFF | 0x80000000)  # flips all bits of negative numbers, and the sign of others


@triton.jit
def _weights(logits, mask, at, vocab, bound, greatest, scale, MASKED: tl.constexpr):
    """Return exp of scaled logits relative to the greatest; 0 for those whose :func:`_ordered` is below ``bound``."""
    x = _logits(logits, mask, at, vocab, MASKED)
    return tl.where(_ordered(x) >= bound, tl.exp2((x - greatest) * scale), 0.0)


@triton.jit
def _top_k_bound(logits, mask, vocab, top_k, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Return the greatest number of :func:`_ordered` that at least ``top_k`` logits reach; two bits of it per pass."""
    i = tl.arange(0, TILE)
    bound = tl.zeros([], tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        first, second, third = bound + step, bound + 2 * step, bound + 3 * step
        reach_first, reach_second, reach_third = 0, 0, 0
        for at in range(0, vocab, TILE):
            x = _ordered(_logits(logits, mask, at + i, vocab, MASKED))
            there = at + i < vocab
            reach_first += tl.sum(((x >= first) & there).to(tl.int32), axis=0)
            reach_second += tl.sum(((x >= second) & there).to(tl.int32), axis=0)
            reach_third += tl.sum(((x >= third) & there).to(tl.int32), axis=0)
        if reach_third >= top_k:
            bound = third
        elif reach_second >= top_k:
            bound = second
        elif reach_first >= top_k:
            bound = first
        step = step >> 2
    return bound


@triton.jit
def _top_p_bound(logits, mask, vocab, bound, greatest, scale, target, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Return the bits of the least weight above which there is less than ``target``; two bits of it per pass."""
    i = tl.arange(0, TILE)
    least = tl.zeros([], tl.uint32)
    step = tl.full([], 1 << 28, tl.uint32)  # weights are at most 1: their two highest bits are 0
    for _ in range(15):
        first, second, third = least + step, least + 2 * step, least + 3 * step
        above_first, above_second, above_third = (
            tl.zeros([], tl.float64),
            tl.zeros([], tl.float64),
            tl.zeros([], tl.float64),
        )
        for at in range(0, vocab, TILE):
            w = _weights(logits, mask, at + i, vocab, bound, greatest, scale, MASKED)
            bits = w.to(tl.uint32, bitcast=True)
            above_first += tl.sum(tl.where(bits >= first, w, 0.0), axis=0)
            above_second += tl.sum(tl.where(bits >= second, w, 0.0), axis=0)
            above_third += tl.sum(tl.where(bits >= third, w, 0.0), axis=0)
        if above_third >= target:
            least = third
        elif above_second >= target:
            least = second
        elif above_first >= target:
            least = first
        step = step >> 2
    return least


@triton.jit(do_not_specialize_on_alignment=["masks", "temperatures", "top_ks", "top_ps", "min_ps", "keys"])
def _sample_kernel(
    logits, masks, temperatures, top_ks, top_ps, min_ps, keys, constants, tokens, vocab, stride, mask_stride,
    first_token_number, TILE: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). Writes -1 where the allowed logits have NaN, or their greatest is infinite."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    masks += row * mask_stride
    i = tl.arange(0, TILE)
    greatest, best, odd = float("-inf"), 0, 0
    for at in range(0, vocab, TILE):
        x = _logits(logits, masks, at + i, vocab, MASKED)
        odd += tl.sum((x != x).to(tl.int32), axis=0)
        most = tl.max(x, axis=0)
        if most > greatest:
            greatest = most
            best = at + tl.argmax(x, axis=0)
    temperature = tl.load(temperatures + row)
    token = best
    if (odd > 0) | (greatest == float("-inf")) | (greatest == float("inf")):
        token = -1
    elif temperature > 0.0:
        bound = tl.zeros([], tl.uint32)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab):
            bound = _top_k_bound(logits, masks, vocab, top_k, TILE, MASKED)
        scale = 1.4426950408889634 / temperature
        least = tl.zeros([], tl.uint32)
        top_p = tl.load(top_ps + row)
        if top_p < 1.0:
            total = tl.zeros([], tl.float64)
            for at in range(0, vocab, TILE):
                w = _weights(logits, masks, at + i, vocab, bound, greatest, scale, MASKED)
                total += tl.sum(w, axis=0)
            least = _top_p_bound(logits, masks, vocab, bound, greatest, scale, total * top_p, TILE, MASKED)
        weakest = tl.maximum(least.to(tl.float32, bitcast=True), tl.load(min_ps + row))
        key = tl.load(keys + row)
        soonest, winner = tl.full([], float("inf"), tl.float64), 0
        c = tl.arange(0, TILE // CHUNK)
        for at in range(0, vocab, TILE):
            w = _weights(logits, masks, at + i, vocab, bound, greatest, scale, MASKED)
            w = tl.where(w >= weakest, w, 0.0)
            sums = tl.sum(tl.reshape(w, [TILE // CHUNK, CHUNK]), axis=1)
            arrival = exponential(key, (at // CHUNK + c).to(tl.int64), constants)
            arrival = tl.where(sums > 0.0, arrival / tl.where(sums > 0.0, sums, 1.0).to(tl.float64), float("inf"))
            first = tl.min(arrival, axis=0)
            if first < soonest:
                soonest = first
                winner = at // CHUNK + tl.argmin(arrival, axis=0)
        ids = winner * CHUNK + tl.arange(0, CHUNK)
        w = _weights(logits, masks, ids, vocab, bound, greatest, scale, MASKED)
        w = tl.where(w >= weakest, w, 0.0)
        arrival = exponential(key, ids.to(tl.int64) + first_token_number, constants)
        arrival = tl.where(w > 0.0, arrival / tl.where(w > 0.0, w, 1.0).to(tl.float64), float("inf"))
        token = winner * CHUNK + tl.argmin(arrival, axis=0)
    tl.store(tokens + row, token)


class TritonSampler:
    """Sampling on a GPU, like :class:`baton_kernels.sampling.CpuSampler` on a CPU. Logits stay on the device.

    Args:
        device: Device of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._constants = RandomConstants(device)

    def __call__(
        self,
        logits: torch.Tensor,
        filters: Sequence[RowFilter],
        keys: npt.NDArray[np.uint64],
        masks: Sequence[TokenMask | None] | None = None,
        upload: Upload | None = None,
    ) -> torch.Tensor:
        """Return a token per row, int64 [R] on the device; -1 where logits have NaN, or their greatest is infinite.

        Forbidden logits are ignored.

        Args:
            logits: [R, vocab] of any float dtype, rows of any stride; not changed.
            filters: Filters of the R rows.
            keys: Keys of the draws' random numbers, uint64 [R].
            masks: Masks of the R rows, uint32 [ceil(vocab / 32)], or ``None`` for a row: all tokens.
            upload: Copies arrays to the logits' device; default: copies that the host waits for.
        """
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        device, (rows, vocab) = logits.device, logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        if not rows:
            return tokens
        numbers = np.array(filters, np.float64).reshape(rows, 4)
        take = upload or upload_to(device)
        floats, top_k, drawn = take(
            np.ascontiguousarray(numbers[:, (0, 2, 3)].T.astype(np.float32)),
            np.clip(numbers[:, 1], 0, vocab).astype(np.int32),
            np.ascontiguousarray(keys).view(np.int64),
        )
        drawn = drawn.view(torch.uint64)
        words = -(-vocab // 32)
        masked = False
        bits = logits
        if masks is not None and any(mask is not None for mask in masks):
            masked = True
            everything = np.full(words, 0xFFFFFFFF, np.uint32)
            packed = np.stack([everything if mask is None else mask for mask in masks])
            (bits,) = take(packed.view(np.int32))
        _sample_kernel[rows,](
            *(logits, bits, floats[0], top_k, floats[1], floats[2], drawn, self._constants.tensor, tokens),
            *(vocab, logits.stride(0), words if masked else 0, _TOKENS),
            TILE=TILE,
            CHUNK=CHUNK,
            MASKED=masked,
            num_warps=WARPS,
        )
        return tokens
