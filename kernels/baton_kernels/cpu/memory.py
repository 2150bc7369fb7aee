"""Memory for weights: large pages where the kernel gives them.

A step reads all weights once. With pages of 4 KiB most of that time goes into looking up pages, above all in a virtual
machine: one core was measured to read 12 GB/s from small pages and 21 GB/s from large ones.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64


class WeightMemory:
    """Hands out pieces of large mappings; a mapping lives as long as a piece of it. Not thread-safe."""

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor [count], zero, that begins at a cache line."""
        size = count * dtype.itemsize
        at = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._chunk is None or at + size > len(self._chunk):
            self._chunk, at = _map(max(CHUNK, -(-size // HUGE_PAGE) * HUGE_PAGE)), 0
        self._used = at + size
        return self._chunk[at : at + size].view(dtype)


def _map(size: int) -> torch.Tensor:
    """Map zeros, uint8 [size], from the beginning of a large page on; the last ones may be small."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages: small ones do
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    skip = -memory.data_ptr() % HUGE_PAGE
    return memory[skip : skip + size]
