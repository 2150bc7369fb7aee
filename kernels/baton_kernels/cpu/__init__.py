"""C++ operators for CPUs: built ahead for several instruction sets, called through a plain C interface."""

from baton_kernels.cpu.library import CpuLibrary, OperatorsMissingError, load_library
from baton_kernels.cpu.variants import runnable_variants

__all__ = ["CpuLibrary", "OperatorsMissingError", "load_library", "runnable_variants"]
