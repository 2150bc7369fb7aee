"""Integers that formats pack several of into one int32, and the forms that they become."""

from __future__ import annotations

import torch

from baton_kernels.quantization import Int4Weight, Int8Weight, pack_nibbles, unpack_nibbles

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


def packed_weight(
    packed: torch.Tensor,
    columns: int,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None = None,
) -> Int4Weight | Int8Weight:
    """Make a form of int32 [rows, ...] that hold columns in turn, from the lowest bits on.

    Args:
        packed: Contiguous.
        columns: Of the weight; what is packed may be longer.
        bits: 4 or 8.
        scales: As :func:`integer_weight` takes them.
        zeros: Likewise.
        order: int64 [columns], in which order columns are to stand, or ``None``.
    """
    values = packed.view(torch.uint8)  # little end first, as the forms have it
    if bits == 4 and order is None:
        return Int4Weight(values[:, : columns // 2].contiguous(), scales, _or_middle(zeros, scales))
    values = (values if bits == 8 else unpack_nibbles(values))[:, :columns]
    if order is None:
        return integer_weight(values, bits, scales, zeros)
    return integer_weight(values[:, order], bits, scales, zeros, order.int())


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
        return Int4Weight(pack_nibbles(values), scales, _or_middle(zeros, scales), order)
    signed = (values ^ 128).view(torch.int8)
    return Int8Weight(signed, scales, None if zeros is None else zeros - 128.0, order)


def _or_middle(zeros: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor:
    """Zeros, or one for all groups that takes no memory."""
    return scales.new_full((1, 1), 8.0).expand_as(scales) if zeros is None else zeros
