"""Checks that the forms of quantized weights share: that tensors fit each other, and where they may be cut."""

from __future__ import annotations

import torch


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise :class:`ValueError` unless ``tensor`` is a matrix of ``dtype``."""
    if tensor.dtype != dtype or tensor.dim() != 2:
        raise ValueError(f"{name} must be {dtype} [rows, columns], got {tensor.dtype} {list(tensor.shape)}")


def check_group(values: torch.Tensor, columns: int, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Raise :class:`ValueError` unless ``scales`` and ``zeros`` are those of whole groups of ``columns``."""
    check_tensor("scales", scales, torch.float32)
    rows, groups = scales.shape
    if rows != values.shape[0] or not groups or columns % groups:
        raise ValueError(f"scales {list(scales.shape)} do not fit {values.shape[0]} rows of {columns} columns")
    if zeros is not None:
        check_tensor("zeros", zeros, torch.float32)
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros are {list(zeros.shape)}, scales {list(scales.shape)}")


def check_order(order: torch.Tensor | None, columns: int) -> None:
    """Raise :class:`ValueError` unless ``order`` is a permutation of ``columns`` columns, or ``None``."""
    if order is None:
        return
    if order.dtype != torch.int32 or order.shape != (columns,):
        raise ValueError(f"order must be int32 [{columns}], got {order.dtype} {list(order.shape)}")
    every = torch.arange(columns, dtype=torch.int32, device=order.device)
    if not order.is_meta and not torch.equal(order.sort().values, every):
        raise ValueError(f"order must name each of {columns} columns once")


def same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are the same permutation, or both none."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def cut_group(start: int, stop: int, columns: int, group: int, order: torch.Tensor | None, step: int = 1) -> slice:
    """Return which groups columns ``start`` to ``stop`` are.

    A group of all columns (a scale per channel) goes with every part.

    Raises:
        ValueError: A group, or ``step`` columns that share a byte, would be cut, or there is an order of columns.
    """
    if (start, stop) == (0, columns):
        return slice(None)
    if order is not None:
        raise ValueError("columns with an order of their own (act order) cannot be cut")
    last = stop == columns
    if start % step or stop % step:
        raise ValueError(f"columns {start} to {stop} cut a byte of {step} values")
    if group == columns:
        return slice(None)
    if start % group or (stop % group and not last):
        raise ValueError(f"columns {start} to {stop} cut a group of {group}")
    return slice(start // group, -(-stop // group))
