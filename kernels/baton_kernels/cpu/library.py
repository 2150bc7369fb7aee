"""Loads the C++ operators into this process, gives them memory for weights, and calls them.

The libraries leave OpenMP's symbols open; they are bound to the runtime that torch has loaded.

A call from Python (a tensor for the result, addresses, releasing and taking the interpreter's lock) takes some ten
microseconds: as long as the work itself where rows are few, and longer where other threads want the lock. So calls can
be bound to memory once (:class:`BoundCall`) and made one after the other without Python between them
(:class:`NativeCalls`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from baton_kernels.cpu.variants import Variant, sources_digest

LIBRARIES = Path(__file__).parent / "lib"
SOURCES = Path(__file__).parent / "csrc"
"""C++ sources, in a checkout; wheels have none."""
BUILD_COMMAND = "python scripts/build_native.py"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types as the C interface numbers them."""

HUGE_PAGE = 2 << 20
CHUNK = 32 << 20
"""Bytes of a mapping for weights, unless one weight is larger."""
ALIGNMENT = 64
"""Bytes of a cache line."""

_POINTERS = [[ctypes.c_void_p] * count for count in range(6)]
_INTEGERS = [[ctypes.c_int64] * count for count in range(6)]
"""Argument types of C functions, by how many of them follow each other."""


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: list[Any]) -> Any:
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function


@dataclass(frozen=True, slots=True)
class LinearOperator:
    """One of the linear operators.

    Attributes:
        run: C function (address of a call's structure).
        pack: C function (address of the weight, address of the packed weight, out_features, in_features).
        packed_size: C function (out_features, in_features) -> number of bfloat16 elements of the packed weight.
    """

    run: Any
    pack: Any
    packed_size: Any

    @classmethod
    def look_up(cls, library: ctypes.CDLL, name: str) -> LinearOperator:
        """Find the functions of the operator ``name`` in a library."""
        pack = _function(library, f"{name}_pack", None, _POINTERS[2] + _INTEGERS[2])
        packed_size = _function(library, f"{name}_packed_size", ctypes.c_int64, _INTEGERS[2])
        return cls(_function(library, name, None, _POINTERS[1]), pack, packed_size)


@dataclass(frozen=True, slots=True)
class ExpertsOperator:
    """The operator for mixtures of experts.

    Attributes:
        run: C function (address of a call's structure).
        pack: C function (dtype code, addresses of gate_up, down, packed gate_up and packed down, hidden size, inner
            size).
        sizes: C function (dtype code, hidden size, inner size, address of four int64) that writes, per expert, the
            bytes of the packed gate_up and down, and the inner and hidden columns, padded to whole panels.
    """

    run: Any
    pack: Any
    sizes: Any

    @classmethod
    def look_up(cls, library: ctypes.CDLL) -> ExpertsOperator:
        """Find the functions of the operator in a library."""
        pack = _function(library, "baton_experts_pack", None, _INTEGERS[1] + _POINTERS[4] + _INTEGERS[2])
        sizes = _function(library, "baton_experts_sizes", None, _INTEGERS[3] + _POINTERS[1])
        return cls(_function(library, "baton_experts", None, _POINTERS[1]), pack, sizes)


@dataclass(frozen=True, slots=True)
class QuantizedOperators:
    """The operators with quantized weights.

    Attributes:
        run: C function of a linear layer (address of a call's structure).
        experts: C function of a mixture's experts (address of a call's structure).
        pack: C function (addresses of a shape's structure, values, scales, zeros or ``None``, and the packed weight).
        packed_size: C function (address of a shape's structure) -> bytes of the packed weight.
    """

    run: Any
    experts: Any
    pack: Any
    packed_size: Any

    @classmethod
    def look_up(cls, library: ctypes.CDLL) -> QuantizedOperators:
        """Find the functions of the operators in a library."""
        return cls(
            _function(library, "baton_quantized_linear", None, _POINTERS[1]),
            _function(library, "baton_quantized_experts", None, _POINTERS[1]),
            _function(library, "baton_quantized_pack", None, _POINTERS[5]),
            _function(library, "baton_quantized_packed_size", ctypes.c_int64, _POINTERS[1]),
        )


class CpuLibrary:
    """The operators as ctypes functions; a call releases the interpreter's lock.

    Attributes:
        amx: Whether bfloat16 can be multiplied in AMX's tiles: the library, the processor and the kernel allow it.
        instructions: Instruction set that the library was compiled for, e.g. ``"avx512-bf16"``.
        sources: Digest of the sources that the library was built from.
        pairs_are_faster: Whether this processor multiplies bfloat16 pairs faster than float32, measured at load (a
            millisecond): processors that have the instruction differ by a factor of four in its rate.
        weights: Memory for packed weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self.paged_attention = _function(library, "baton_paged_attention", ctypes.c_int, _POINTERS[1])
        self.linear = LinearOperator.look_up(library, "baton_linear")
        self.linear_amx = LinearOperator.look_up(library, "baton_linear_amx")
        self.linear_pairs = LinearOperator.look_up(library, "baton_linear_pairs")
        self.rms_norm = _function(library, "baton_rms_norm", None, _POINTERS[1])
        self.sample = _function(library, "baton_sample", None, _POINTERS[1])
        self.mask_tokens = _function(library, "baton_mask_tokens", None, _POINTERS[1])
        self.gated_mul = _function(library, "baton_gated_mul", None, _POINTERS[1])
        self.experts = ExpertsOperator.look_up(library)
        self.quantized = QuantizedOperators.look_up(library)
        self.route = _function(library, "baton_route", None, _POINTERS[1])
        self.run_calls = _function(library, "baton_run_calls", ctypes.c_int64, _POINTERS[1] + _INTEGERS[1])
        name = _function(library, "baton_cpu_instructions", ctypes.c_char_p, [])()
        self.instructions: str = name.decode()
        mark = ctypes.c_char.in_dll(library, "baton_build_mark")
        self.sources = ctypes.string_at(ctypes.addressof(mark)).decode().rpartition("-")[2]
        self.pairs_are_faster = bool(_function(library, "baton_pairs_are_faster", ctypes.c_int, [])())
        self.amx = bool(_function(library, "baton_amx_ready", ctypes.c_int, [])())
        self.weights = WeightMemory()
        self._library = library


class OperatorsMissingError(RuntimeError):
    """The operators cannot be loaded; the message says why in one line."""


def load_library(variant: Variant) -> CpuLibrary:
    """Load a build of the operators.

    Args:
        variant: One of :func:`baton_kernels.cpu.variants.runnable_variants`.

    Raises:
        OperatorsMissingError: The library was not built, cannot be loaded, or was built from other sources than those
            in the checkout, so that its structures may differ from those of the Python functions.
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


_digest = functools.cache(sources_digest)


def openmp_runtime() -> str:
    """Return the path of the OpenMP runtime that torch is bound to; a process may have several.

    Raises:
        OSError: torch has no OpenMP runtime.
    """
    try:
        # The symbol is looked up in torch's own library and in those that it depends on.
        address = ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError as error:
        raise OSError(f"torch has no OpenMP runtime ({error})") from error
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, end = (int(bound, 16) for bound in span.split("-"))
        if first <= address < end and path:
            return path[0]
    raise OSError("the OpenMP runtime of torch is no file")


class WeightMemory:
    """Allocates tensors within large mappings, in large pages where the kernel has them. Not thread-safe.

    A step reads all weights once. With pages of 4 KiB most of that time goes into looking up pages, above all in a
    virtual machine: one core was measured to read 12 GB/s from small pages and 21 GB/s from large ones. A mapping lives
    as long as any tensor in it.
    """

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros [count] that begins at a cache line."""
        size = count * dtype.itemsize
        at = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._chunk is None or at + size > len(self._chunk):
            self._chunk = _map_zeros(max(CHUNK, -(-size // HUGE_PAGE) * HUGE_PAGE))
            at = 0
        self._used = at + size
        return self._chunk[at : at + size].view(dtype)


def _map_zeros(size: int) -> torch.Tensor:
    """Map zeros, uint8 [size], from the beginning of a large page on; the last pages may be small."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages uses small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    skip = -memory.data_ptr() % HUGE_PAGE
    return memory[skip : skip + size]


# Calls


@dataclass(frozen=True, slots=True, eq=False)
class BoundCall:
    """A call of an operator whose inputs and results always are in the same memory.

    Attributes:
        function: C function of the library that takes the structure's address.
        structure: The function's arguments. The caller sets ``rows``, where the structure has that, and ``threads``.
        keeps: Objects that own the memory the structure points to; the call keeps them alive.
        checked: Whether the function's result is an error code: 0 is success.
    """

    function: Any
    structure: Any
    keeps: tuple[Any, ...]
    checked: bool = False


class RowsCall(ctypes.Structure):
    """Base of the C structures of operators over rows, which may have any stride, with a residual."""

    def set_tensors(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Set inputs, results and what is added to these, and the number of threads."""
        self.x = x.data_ptr()
        self.x_stride = x.stride(0)
        self.out = out.data_ptr()
        self.residual = address(residual)
        if residual is not None:
            self.residual_stride = residual.stride(0)
        self.threads = torch.get_num_threads()

    def bind(
        self, function: Any, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, *keeps: Any
    ) -> BoundCall:
        """Return a bound call of a function; see :class:`BindableOperator`."""
        call = type(self).from_buffer_copy(self)
        call.set_tensors(x, out, residual)
        return BoundCall(function, call, (x, out, residual, *keeps))


def address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's elements, or ``None`` for no tensor."""
    return None if tensor is None else tensor.data_ptr()


@runtime_checkable
class BindableOperator(Protocol):
    """An operator over rows whose calls can be bound to memory."""

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        """Return a call over the first rows of x, out and residual; ``None``: this operator cannot be bound.

        Args:
            x: Inputs [maximum of rows, inputs], contiguous.
            out: Results [maximum of rows, outputs], contiguous.
            residual: Added to the result, shaped as ``out``, which may be the same memory; or ``None``.
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
        self._run = library.run_calls
        self._calls = tuple(calls)
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
        """Set the number of rows and of threads of all further calls."""
        if (rows, threads) == self._size:
            return
        for structure in self._sized:
            structure.rows = rows
            structure.threads = threads
        self._size = (rows, threads)

    def run(self, first: int = 0, end: int | None = None) -> None:
        """Make the calls ``first`` to ``end``, or to the last one.

        Raises:
            ValueError: An operator refused its arguments; the calls behind it were not made.
        """
        end = len(self._calls) if end is None else end
        done = self._run(ctypes.byref(self._native, first * ctypes.sizeof(NativeCall)), end - first)
        if done != end - first:
            raise ValueError(f"an operator refused its arguments: {type(self._calls[first + done].structure).__name__}")


class ThreadTeam:
    """The calling thread's OpenMP threads, which torch and the operators compute in; runs Python functions in them.

    Between two operations these threads wait in a loop, each on a processor of its own, so that a function starts at
    once. Any other thread would have to wait until the system takes a processor from one of them, and would keep all
    others waiting in the next operation.

    Args:
        threads: Number of threads of the team, the caller's included.

    Raises:
        OSError: torch has no OpenMP runtime.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._parallel = ctypes.CDLL(openmp_runtime()).GOMP_parallel
        self._parallel.argtypes = [self._function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, work: Callable[[], object]) -> None:
        """Call a function once in each thread, in parallel as far as it releases the interpreter's lock.

        Args:
            work: The function; it takes its share of the work from a queue that all threads share.

        Raises:
            Exception: The function raised it in one of the threads; all threads have finished.
        """
        failures: list[BaseException] = []

        def guarded(_: object) -> None:
            try:
                work()
            except BaseException as failure:  # C code cannot pass exceptions on
                failures.append(failure)

        if self.threads == 1:
            guarded(None)
        else:
            self._parallel(self._function(guarded), None, self.threads, 0)
        if failures:
            raise failures[0]
