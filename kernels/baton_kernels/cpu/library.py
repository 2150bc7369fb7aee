"""Loads the compiled operators into this process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from baton_kernels.cpu.build import BuildError, build_library
from baton_kernels.cpu.memory import WeightMemory

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types as the C interface numbers them."""


class RowCall(ctypes.Structure):
    """The C structure ``RowOp``; see ``csrc/fused.cpp``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "x_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    ]


def row_call(dtype: torch.dtype) -> RowCall:
    """Return a call of a row-wise operator for a storage type."""
    return RowCall(dtype=DTYPE_CODES[dtype])


@dataclass(frozen=True, slots=True)
class LinearOperator:
    """One of the linear operators.

    Attributes:
        run: Takes the address of a call's structure.
        pack: Takes weight and packed weight (addresses), out_features and in_features.
        packed_size: Takes out_features and in_features; returns the packed weight's elements, bfloat16.
    """

    run: Any
    pack: Any
    packed_size: Any

    @classmethod
    def of(cls, library: ctypes.CDLL, name: str) -> LinearOperator:
        """Look its functions up."""
        pack, packed_size = library[f"{name}_pack"], library[f"{name}_packed_size"]
        pack.argtypes, pack.restype = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2, None
        packed_size.argtypes, packed_size.restype = [ctypes.c_int64] * 2, ctypes.c_int64
        return cls(_function(library, name, None, 1), pack, packed_size)


class CpuLibrary:
    """The operators as ctypes functions; a call releases the interpreter's lock.

    Attributes:
        amx: Whether bfloat16 can be multiplied in AMX's tiles: the library, the processor and the kernel allow it.
        instructions: What the library was compiled for, e.g. ``"avx512-bf16"``.
        pairs_are_faster: Whether bfloat16 pairs are multiplied faster than float32 here, measured at load (a
            millisecond): processors that have the instruction differ by a factor of four in its rate.
        weights: Where packed weights lie.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self.paged_attention = _function(library, "baton_paged_attention", ctypes.c_int, 1)
        self.linear = LinearOperator.of(library, "baton_linear")
        self.linear_amx = LinearOperator.of(library, "baton_linear_amx")
        self.rms_norm = _function(library, "baton_rms_norm", None, 1)
        self.silu_mul = _function(library, "baton_silu_mul", None, 1)
        self.attention_struct_bytes = int(_function(library, "baton_attention_struct_bytes", ctypes.c_int64, 0)())
        name = _function(library, "baton_cpu_instructions", ctypes.c_char_p, 0)()
        self.instructions: str = name.decode()
        self.pairs_are_faster = bool(_function(library, "baton_pairs_are_faster", ctypes.c_int, 0)())
        self.amx = bool(_function(library, "baton_amx_ready", ctypes.c_int, 0)())
        self.weights = WeightMemory()
        self._library = library


def load_library(cache_dir: Path, *, target: str = "native") -> CpuLibrary:
    """Build the operators unless they are cached, and load them.

    Args:
        cache_dir: Where compiled libraries are kept.
        target: Architecture to compile for; see :func:`build_library`.

    Raises:
        BuildError: They cannot be built or loaded on this machine.
    """
    openmp = _torch_openmp()
    if openmp is not None:
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    path = build_library(cache_dir, link_openmp=openmp is None, target=target)
    try:
        return CpuLibrary(path)
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error


def _torch_openmp() -> str | None:
    """Path of the GNU OpenMP runtime that this process (torch) has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    return min(paths) if paths else None


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: int) -> Any:
    function = library[name]
    function.restype = result
    function.argtypes = [ctypes.c_void_p] * arguments
    return function
