"""The C helpers: one shared library, built from ``native/`` when Baton is installed, called through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

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
        name: Its name without ``baton_``.
        result: Its ctypes result; ``None``: it returns nothing.
        arguments: Its ctypes arguments; none: they are converted as ctypes does by itself, which is faster.
        keep_lock: Call it with the interpreter lock held: for calls that take less time than waiting for the lock does.
    """
    found = (_library_with_lock if keep_lock else _library)[f"baton_{name}"]
    found.restype = result
    if arguments:
        found.argtypes = arguments
    return found


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array's memory begins, in a quarter of the time that ``array.ctypes`` takes."""
    try:
        return _addressof(_from_buffer(array))
    except (TypeError, ValueError, BufferError):  # it is empty, read-only or not contiguous
        address: int = array.__array_interface__["data"][0]
        return address
