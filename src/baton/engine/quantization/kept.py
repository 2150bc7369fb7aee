"""Quantized weights in memory: as few bytes as hold all of their numbers, in mappings of their own."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from typing import Any

import torch

from baton_kernels.quantization import QuantizedWeight

MAPPED_BYTES = 1 << 16
"""Bytes of a weight from which on it gets a mapping of its own."""
ALIGNMENT = 64
NARROW = {
    "scales": (torch.bfloat16, torch.float16),
    "zeros": (torch.int8, torch.uint8, torch.bfloat16, torch.float16),
}
"""Types that numbers of a group are kept in if these hold all of a weight's exactly: forms have them in float32."""


class KeptWeight:
    """A copy of a weight, which goes back to the system when it is dropped.

    It has a mapping of its own: the allocator would keep what is dropped among what was allocated meanwhile, the memory
    of two copies of a model while its operators are made of it, and afterwards. Scales and zeros take 8 or 16 bits
    where these hold them, one zero for all groups those of one number. On a GPU it is an ordinary copy.

    Args:
        weight: On any device.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        self._form = type(weight)
        tensors = weight.tensors()
        names = (field.name for field in dataclasses.fields(weight))
        self._others = {name: getattr(weight, name) for name in names if name not in tensors}
        on_cpu = weight.values.device.type == "cpu"
        if on_cpu:
            tensors = {name: _narrowed(name, tensor) for name, tensor in tensors.items()}
        self._tensors = _own(tensors) if on_cpu else {name: each.clone() for name, each in tensors.items()}

    def get(self) -> QuantizedWeight:
        """Return the weight; what is not narrowed shares this one's memory."""
        wide: dict[str, Any] = {
            name: tensor.float() if name in NARROW and tensor.dtype != torch.float32 else tensor
            for name, tensor in self._tensors.items()
        }
        return self._form(**self._others, **wide)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes if any(each.stride()) else each.element_size() for each in self._tensors.values())


def return_free_memory() -> None:
    """Give back to the system what the C library keeps of what was freed, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _narrowed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in fewer bytes, if there are types for that."""
    if name not in NARROW or not any(tensor.stride()) or not tensor.numel():
        return tensor
    if name == "zeros" and bool((tensor == tensor[0, 0]).all()):
        return tensor[:1, :1].clone().expand_as(tensor)
    for dtype in NARROW[name]:
        narrow = tensor.to(dtype)
        if torch.equal(narrow.float(), tensor):
            return narrow
    return tensor


def _own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in one piece of memory; one number that stands for all zeros takes none as it is."""
    copied = {name: tensor for name, tensor in tensors.items() if any(tensor.stride())}
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in copied.values()]
    kept = dict(tensors)
    for (name, tensor), part in zip(copied.items(), torch.split(_memory(sum(sizes)), sizes), strict=True):
        kept[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return kept


def _memory(size: int) -> torch.Tensor:
    if size < MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
