"""The C library's memory allocator."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Return freed memory from the C library's allocator to the system, where the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
