"""The C helpers: one shared library, built from ``native/`` when Baton is installed, called through ctypes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = Path(__file__).parent / "_native" / "baton_native.so"
BUILD_COMMAND = "python scripts/build_native.py"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"Baton's native library is not built ({error}). In a checkout run: {BUILD_COMMAND}; "
            "elsewhere install Baton again."
        ) from error


_library = _load()
_addressof = ctypes.addressof
_from_buffer: Any = ctypes.c_char.from_buffer
_library_with_lock = ctypes.PyDLL("baton_native", handle=_library._handle)


def function(name: str, result: Any, *arguments: Any, keep_lock: bool = False) -> Any:
    """Return a function of the library.

    Args:
        name: Name of the function, without ``baton_``.
        result: ctypes type of its result; ``None``: it returns nothing.
        arguments: ctypes types of its arguments; none: ctypes' own conversions are used, which are faster.
        keep_lock: Whether to hold the interpreter lock meanwhile: for calls shorter than waiting for the lock.

    Raises:
        ImportError: The library has no such function: it was built from other sources.
    """
    library = _library_with_lock if keep_lock else _library
    try:
        called = library[f"baton_{name}"]
    except AttributeError as error:
        raise ImportError(f"Baton's native library is of other sources ({error}). Run: {BUILD_COMMAND}") from error
    called.restype = result
    if arguments:
        called.argtypes = arguments
    return called


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array's memory begins, in a quarter of the time that ``array.ctypes`` takes."""
    try:
        return _addressof(_from_buffer(array))
    except (TypeError, ValueError, BufferError):  # it is empty, read-only or not contiguous
        # Not from the array interface, which describes all columns of a structured array first (7 us instead of 2).
        return array.ctypes.data


class Layout:
    """A C structure of the library, as numpy and ``struct`` write it; all of its fields have 8 bytes.

    Args:
        name: Name of the structure.
        layout: Returns the offset of a field (``structure.field``) or the size of a structure in the library.
        fields: Type of each field, in order: ``d`` (double), ``q`` (an int64 or a pointer), or another structure.

    Attributes:
        dtype: The structure as a numpy dtype: an array of it has a named column per field.
        size: Size of the structure in bytes.
        pack, pack_into, unpack_from: As of ``struct.Struct``: the values of all fields in order, nested ones flattened.

    Raises:
        ImportError: The library has another structure: it was built from other sources.
    """

    def __init__(self, name: str, layout: Callable[[bytes], int], **fields: str | Layout) -> None:
        columns = [(x, t.dtype if isinstance(t, Layout) else np.dtype(t)) for x, t in fields.items()]
        self.dtype: np.dtype[np.void] = np.dtype(columns)
        self._offsets = {x: int(entry[1]) for x, entry in (self.dtype.fields or {}).items()}
        self._codes: str = "".join(t._codes if isinstance(t, Layout) else t for t in fields.values())
        packer = struct.Struct("=" + self._codes)
        self.pack = packer.pack
        self.pack_into = packer.pack_into
        self.unpack_from = packer.unpack_from
        self.size = packer.size
        for field, offset in ((name, self.size), *((f"{name}.{x}", at) for x, at in self._offsets.items())):
            if layout(field.encode()) != offset:
                raise ImportError(f"Baton's native library is of other sources ({field}). Run: {BUILD_COMMAND}")

    def column(self, address: int, field: str) -> tuple[int, int]:
        """Return the address of a field in the first of several structures, and the bytes from one to the next."""
        return address + self._offsets[field], self.size
