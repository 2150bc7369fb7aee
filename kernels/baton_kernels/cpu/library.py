"""Loads the C++ operators into this process, and gives them memory for weights.

The libraries leave OpenMP's symbols open; they are bound to the runtime that torch has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton_kernels.cpu.variants import Variant, sources_digest

LIBRARIES = Path(__file__).parent / "lib"
SOURCES = Path(__file__).parent / "csrc"
"""In a checkout; wheels have none."""
BUILD_COMMAND = "python scripts/build_native.py"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types as the C interface numbers them."""

HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
ALIGNMENT = 64


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


@dataclass(frozen=True, slots=True)
class ExpertsOperator:
    """The operator for mixtures of experts.

    Attributes:
        run: Takes the address of a call's structure.
        pack: Takes dtype code, gate_up, down and where they go (addresses), hidden and inner sizes.
        sizes: Takes dtype code, hidden and inner sizes and the address of four int64: per expert, bytes of the packed
            gate_up and down; inner and hidden columns with what fills the last panels.
    """

    run: Any
    pack: Any
    sizes: Any

    @classmethod
    def of(cls, library: ctypes.CDLL) -> ExpertsOperator:
        """Look its functions up."""
        pack, sizes = library["baton_experts_pack"], library["baton_experts_sizes"]
        pack.argtypes, pack.restype = [ctypes.c_int64, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2], None
        sizes.argtypes, sizes.restype = [*[ctypes.c_int64] * 3, ctypes.c_void_p], None
        return cls(_function(library, "baton_experts", None, 1), pack, sizes)


@dataclass(frozen=True, slots=True)
class QuantizedOperators:
    """The operators with quantized weights.

    Attributes:
        run: Of a linear layer; takes the address of a call's structure.
        experts: Of a mixture's experts, likewise.
        pack: Takes a shape's structure, values, scales, zeros (or ``None``) and where they go (addresses).
        packed_size: Takes a shape's structure; returns bytes.
    """

    run: Any
    experts: Any
    pack: Any
    packed_size: Any

    @classmethod
    def of(cls, library: ctypes.CDLL) -> QuantizedOperators:
        """Look its functions up."""
        return cls(
            _function(library, "baton_quantized_linear", None, 1),
            _function(library, "baton_quantized_experts", None, 1),
            _function(library, "baton_quantized_pack", None, 5),
            _function(library, "baton_quantized_packed_size", ctypes.c_int64, 1),
        )


class CpuLibrary:
    """The operators as ctypes functions; a call releases the interpreter's lock.

    Attributes:
        amx: Whether bfloat16 can be multiplied in AMX's tiles: the library, the processor and the kernel allow it.
        instructions: What the library was compiled for, e.g. ``"avx512-bf16"``.
        sources: Digest of what it was built from.
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
        self.linear_pairs = LinearOperator.of(library, "baton_linear_pairs")
        self.rms_norm = _function(library, "baton_rms_norm", None, 1)
        self.sample = _function(library, "baton_sample", None, 1)
        self.mask_tokens = _function(library, "baton_mask_tokens", None, 1)
        self.gated_mul = _function(library, "baton_gated_mul", None, 1)
        self.experts = ExpertsOperator.of(library)
        self.quantized = QuantizedOperators.of(library)
        self.route = _function(library, "baton_route", None, 1)
        self.run_calls = library["baton_run_calls"]
        self.run_calls.argtypes, self.run_calls.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        name = _function(library, "baton_cpu_instructions", ctypes.c_char_p, 0)()
        self.instructions: str = name.decode()
        mark = ctypes.c_char.in_dll(library, "baton_build_mark")
        self.sources = ctypes.string_at(ctypes.addressof(mark)).decode().rpartition("-")[2]
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
        OperatorsMissingError: It was not built, cannot be loaded, or was built from other sources than are there: calls
            take structures that have to be those of its own Python functions.
    """
    path = LIBRARIES / variant.file_name
    if not path.exists():
        raise OperatorsMissingError(f"{path} is missing; in a checkout run: {BUILD_COMMAND}")
    try:
        # Libraries loaded from now on find the runtime's symbols.
        ctypes.CDLL(openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
        library = CpuLibrary(path)
    except (OSError, AttributeError, ValueError) as error:  # no library, or one without what is looked up
        raise OperatorsMissingError(f"cannot load {path}: {error}; in a checkout run: {BUILD_COMMAND}") from error
    if SOURCES.is_dir() and library.sources != _digest(SOURCES):
        raise OperatorsMissingError(f"{path} was built from other sources than {SOURCES} has; run: {BUILD_COMMAND}")
    return library


@functools.cache
def _digest(folder: Path) -> str:
    return sources_digest(folder)


def openmp_runtime() -> str:
    """Return the path of the OpenMP runtime that torch is bound to, of perhaps several in this process.

    Raises:
        OSError: It has none.
    """
    try:
        # Looked up in torch's own library and in those that it depends on.
        address = ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError as error:
        raise OSError(f"torch has no OpenMP runtime ({error})") from error
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, end = (int(bound, 16) for bound in span.split("-"))
        if first <= address < end and path:
            return path[0]
    raise OSError("the OpenMP runtime of torch is no file")


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: int) -> Any:
    function = library[name]
    function.restype = result
    function.argtypes = [ctypes.c_void_p] * arguments
    return function


class WeightMemory:
    """Hands out pieces of large mappings, in large pages where the kernel gives them. Not thread-safe.

    A step reads all weights once. With pages of 4 KiB most of that time goes into looking up pages, above all in a
    virtual machine: one core was measured to read 12 GB/s from small pages and 21 GB/s from large ones. A mapping lives
    as long as a piece of it.
    """

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
