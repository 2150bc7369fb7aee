"""Python functions in the threads that torch and the operators compute in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from baton_kernels.cpu.library import openmp_runtime


class ThreadTeam:
    """The OpenMP threads of whoever calls: those that its tensors' operations run in.

    Between two operations these wait in a loop, each on a processor of its own: what they are given begins at once,
    while another thread would have to wait until the system takes a processor from one of them, and keep all others
    waiting in the next operation.

    Args:
        threads: Threads of a team, the caller's among them.

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
        """Call a function once in each thread, at the same time as far as it leaves the interpreter's lock.

        Args:
            work: Takes its share from what the others take theirs from.

        Raises:
            Exception: What the function raised in one of them; all have ended then.
        """
        failures: list[BaseException] = []

        def guarded(_: object) -> None:
            try:
                work()
            except BaseException as failure:  # nothing may leave a function that C calls
                failures.append(failure)

        if self.threads == 1:
            guarded(None)
        else:
            self._parallel(self._function(guarded), None, self.threads, 0)
        if failures:
            raise failures[0]
