"""C++ operators for CPUs: built ahead for several instruction sets, called through a plain C interface."""

from baton_kernels.cpu.library import (
    BindableOperator,
    BoundCall,
    CpuLibrary,
    NativeCalls,
    OperatorsMissingError,
    ThreadTeam,
    load_library,
)
from baton_kernels.cpu.variants import runnable_variants

__all__ = [
    "BindableOperator",
    "BoundCall",
    "CpuLibrary",
    "NativeCalls",
    "OperatorsMissingError",
    "ThreadTeam",
    "load_library",
    "runnable_variants",
]
