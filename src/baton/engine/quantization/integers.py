"""Integers that formats pack several of into one int32, and the forms that they become."""

from __future__ import annotations

import torch

from baton_kernels.quantized_weights import Int4Weight, Int8Weight, pack_nibbles

LITTLE_END_FIRST = tuple(range(8))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight consecutive columns stands in each four bits of AWQ's int32, the lowest first."""


def unpack_int32(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the unsigned values uint8 [rows, n * 32 / bits] of int32 [rows, n].

    Args:
        packed: Values stand from the lowest bits on.
        bits: 4 or 8.
        order: Which of the consecutive values of an int32 stands where, from the lowest bits on; default: in turn.
    """
    each = 32 // bits
    mask = (1 << bits) - 1
    places = order or tuple(range(each))
    out = torch.empty(*packed.shape, each, dtype=torch.uint8)
    for place, value in enumerate(places):
        out[..., value] = (packed >> (bits * place)).bitwise_and_(mask).to(torch.uint8)
    return out.flatten(-2)


def integer_weight(
    values: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
) -> Int4Weight | Int8Weight:
    """Make a form of unsigned values.

    Args:
        values: uint8 [rows, columns], from 0 to ``2 ** bits - 1``.
        bits: 4 or 8.
        scales: float32 [rows, groups].
        zeros: float32 [rows, groups], unsigned as the values are; ``None``: the middle of their range.
        order: As forms have it.
    """
    if bits == 4:
        middle = torch.full_like(scales, 8.0) if zeros is None else zeros
        return Int4Weight(pack_nibbles(values), scales, middle, order)
    signed = (values ^ 128).view(torch.int8)
    return Int8Weight(signed, scales, None if zeros is None else zeros - 128.0, order)
