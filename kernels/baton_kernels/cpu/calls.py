"""Calls of operators that are bound to memory once, and made one after the other without Python between them.

What an operator's Python does for a call (a tensor for the result, addresses, the interpreter's lock given back and
taken again) takes some ten microseconds: as long as the work itself where rows are few, and longer where other threads
want the lock. A list of bound calls takes that once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from baton_kernels.cpu.library import CpuLibrary


@dataclass(frozen=True, slots=True, eq=False)
class BoundCall:
    """A call of an operator whose inputs and results always lie in the same memory.

    Attributes:
        function: The library's, which takes the structure's address.
        structure: The arguments. Who makes the call sets ``rows``, where it has that, and ``threads``.
        keeps: What the structure points into.
        checked: Whether the function returns 0 unless it failed.
    """

    function: Any
    structure: Any
    keeps: tuple[Any, ...]
    checked: bool = False


@runtime_checkable
class BindableOperator(Protocol):
    """An operator over rows that can be bound."""

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        """Bind it to rows of x, out and residual, as many as the call will say; ``None``: it cannot be bound.

        Args:
            x: [most rows, inputs], contiguous.
            out: [most rows, outputs], contiguous.
            residual: Added to the result, like ``out``, and perhaps the same memory; or ``None``.
        """


class NativeCall(ctypes.Structure):
    """The C structure ``Call`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        ("function", ctypes.c_void_p),
        ("structure", ctypes.c_void_p),
        ("checked", ctypes.c_int64),
    ]


class NativeCalls:
    """A list of bound calls. Not thread-safe: calls share memory."""

    def __init__(self, library: CpuLibrary, calls: Sequence[BoundCall]) -> None:
        self._run, self._calls = library.run_calls, tuple(calls)
        self._native = (NativeCall * len(calls))(
            *(
                NativeCall(
                    ctypes.cast(call.function, ctypes.c_void_p).value, ctypes.addressof(call.structure), call.checked
                )
                for call in calls
            )
        )
        self._sized = [call.structure for call in calls if hasattr(call.structure, "rows")]
        self._size = (0, 0)

    def resize(self, rows: int, threads: int) -> None:
        """Set for how many rows and with how many threads calls are made from now on."""
        if (rows, threads) == self._size:
            return
        for structure in self._sized:
            structure.rows, structure.threads = rows, threads
        self._size = (rows, threads)

    def run(self, first: int = 0, end: int | None = None) -> None:
        """Make the calls ``first`` to ``end``, or to the last one.

        Raises:
            ValueError: One of them was refused; those behind it were not made.
        """
        end = len(self._calls) if end is None else end
        made = self._run(ctypes.byref(self._native, first * ctypes.sizeof(NativeCall)), end - first)
        if made != end - first:
            raise ValueError(f"an operator refused its arguments: {type(self._calls[first + made].structure).__name__}")
