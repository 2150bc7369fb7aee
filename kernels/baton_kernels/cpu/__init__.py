"""C++ operators for CPUs: compiled on first use for the machine they run on, called through a plain C interface."""

from baton_kernels.cpu.build import BuildError
from baton_kernels.cpu.library import CpuLibrary, load_library

__all__ = ["BuildError", "CpuLibrary", "load_library"]
