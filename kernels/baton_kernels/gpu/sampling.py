"""Sampling on a GPU: mask, temperature, top-k, top-p, min-p and the draw of a token per row, without a sort.

The definition is ``baton.engine.sample`` (``filters.filter_batch`` and ``sampler.draw``), with the same random numbers:
a token is the same on CPU and GPU up to the rounding of sums. Thresholds of top-k and top-p are found bit by bit:
floats are ordered as their bits are, so 32 passes over a row, each of which counts (or sums) what reaches a candidate,
give the exact value (a radix selection; Alabi et al., "Fast k-Selection Algorithms for Graphics Processing Units",
2012).
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
def _sample_kernel(
    logits, masks, temperatures, top_ks, top_ps, min_ps, keys, constants, tokens, vocab, stride, mask_stride,
    first_token_number,
    TILE: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
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
        if TOP_K:
            if (top_k > 0) & (top_k < vocab):
                # The greatest value that at least top_k logits reach, bit by bit.
                bit = tl.full([], 0x80000000, tl.uint32)
                for _ in range(32):
                    candidate = bound | bit
                    count = 0
                    for at in range(0, vocab, TILE):
                        x = _logits(logits, masks, at + i, vocab, MASKED)
                        count += tl.sum(((_ordered(x) >= candidate) & (at + i < vocab)).to(tl.int32), axis=0)
                    if count >= top_k:
                        bound = candidate
                    bit = bit >> 1
        scale = 1.4426950408889634 / temperature
        total = tl.zeros([], tl.float64)
        for at in range(0, vocab, TILE):
            w = _weights(logits, masks, at + i, vocab, bound, greatest, scale, MASKED)
            total += tl.sum(w, axis=0)
        least = tl.zeros([], tl.uint32)
        top_p = tl.load(top_ps + row)
        if TOP_P:
            if top_p < 1.0:
                # The least weight above which there is less than top_p of the sum.
                target = total * top_p
                bit = tl.full([], 0x40000000, tl.uint32)
                for _ in range(31):
                    candidate = least | bit
                    above = tl.zeros([], tl.float64)
                    for at in range(0, vocab, TILE):
                        w = _weights(logits, masks, at + i, vocab, bound, greatest, scale, MASKED)
                        above += tl.sum(tl.where(w.to(tl.uint32, bitcast=True) >= candidate, w, 0.0), axis=0)
                    if above >= target:
                        least = candidate
                    bit = bit >> 1
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
        drawing = numbers[:, 0] > 0
        _sample_kernel[rows,](
            *(logits, bits, floats[0], top_k, floats[1], floats[2], drawn, self._constants.tensor, tokens),
            *(vocab, logits.stride(0), words if masked else 0, _TOKENS),
            TILE=TILE,
            CHUNK=CHUNK,
            MASKED=masked,
            TOP_K=bool((drawing & (numbers[:, 1] > 0) & (numbers[:, 1] < vocab)).any()),
            TOP_P=bool((drawing & (numbers[:, 2] < 1.0)).any()),
        )
        return tokens
