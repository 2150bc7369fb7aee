"""Loads the C++ operators into this process: the build for the best instruction set that the processor has.

The libraries leave OpenMP's symbols open; they are bound to the runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from baton_kernels.cpu.memory import WeightMemory
from baton_kernels.cpu.variants import Variant

LIBRARIES = Path(__file__).parent / "lib"
BUILD_COMMAND = "python scripts/build_native.py"

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


class OperatorsMissingError(RuntimeError):
    """The operators cannot be loaded; says why in one line."""


def load_library(variant: Variant) -> CpuLibrary:
    """Load a build of the operators.

    Args:
        variant: One of :func:`baton_kernels.cpu.variants.runnable_variants`.

    Raises:
        OperatorsMissingError: It was not built or cannot be loaded.
    """
    path = LIBRARIES / variant.file_name
    if not path.exists():
        raise OperatorsMissingError(f"{path} is missing; in a checkout run: {BUILD_COMMAND}")
    try:
        _share_openmp()
        return CpuLibrary(path)
    except OSError as error:
        raise OperatorsMissingError(f"cannot load {path}: {error}") from error


def _share_openmp() -> None:
    """Let libraries loaded from now on find the symbols of the OpenMP runtime that torch has loaded.

    Raises:
        OSError: It has none, and the system neither.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    runtimes = sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))
    ctypes.CDLL(runtimes[0] if runtimes else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: int) -> Any:
    function = library[name]
    function.restype = result
    function.argtypes = [ctypes.c_void_p] * arguments
    return function
