"""Torch tensors to and from what pipes carry. The only module of the transport that imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.errors import InvalidRequestError, TransferError
from baton.kv_transfer.pipes.base import DTYPE_SIZES, WireTensor

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_SIZES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_wire(tensors: Sequence[torch.Tensor]) -> list[WireTensor]:
    """Describe CPU tensors for a pipe, without a copy where they are contiguous.

    Args:
        tensors: Dense tensors; those on a device or with gradients are detached and copied to the CPU.

    Raises:
        InvalidRequestError: A dtype that pipes don't carry, or a sparse tensor.
    """
    out = []
    for tensor in tensors:
        name = _NAMES.get(tensor.dtype)
        if name is None or tensor.layout != torch.strided:
            raise InvalidRequestError(f"pipes don't carry {tensor.layout} {tensor.dtype} tensors", field="tensors")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        out.append(WireTensor(name, tuple(tensor.shape), flat.numpy().data))
    return out


def from_wire(tensors: Sequence[WireTensor]) -> list[torch.Tensor]:
    """Return CPU tensors over the received memory, without a copy.

    Raises:
        TransferError: The memory is read-only.
    """
    out = []
    for tensor in tensors:
        if tensor.data.readonly:
            raise TransferError("a received tensor's memory is read-only")
        dtype = _DTYPES[tensor.dtype]
        if tensor.data.nbytes == 0:
            out.append(torch.empty(tensor.shape, dtype=dtype))
        else:
            out.append(torch.frombuffer(tensor.data, dtype=torch.uint8).view(dtype).reshape(tensor.shape))
    return out
