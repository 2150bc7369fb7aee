"""Copies of block runs between two mappings, without holding the interpreter lock.

A page of C, compiled once per process where a compiler is, copies any number of runs in one call and past the cache:
scattered blocks about as fast as one big ``memcpy``, where a ``memcpy`` per block is 1.6 times slower. Without a
compiler, big runs go through libc's ``memcpy`` one call each, small ones through ``process_vm_readv`` on this very
process: slower per byte, but one system call takes a thousand runs, and every call may cost a wait for the lock.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError
from baton.transport.block_types import Bytes, Ids
from baton.transport.waiting import Wait

BATCH_BYTES = 32 << 20
"""Bytes between two looks at the cancel flag (a few milliseconds)."""
BIG_RUN_BYTES = 256 << 10
_IOV_MAX = 1024
_SOURCE = Path(__file__).with_name("copying.c")

Runs = npt.NDArray[np.uint64]
"""uint64 [n, 3]: offset in the target, offset in the source, bytes."""
CopyRuns = Callable[[int, int, Runs], None]
"""Copies runs between two base addresses."""


def merge_runs(remote_ids: Ids, local_ids: Ids) -> npt.NDArray[np.int64]:
    """Join neighbours: int64 [runs, 3] of first local id, first remote id, number of blocks.

    A run goes on while both ids rise by one.
    """
    if len(remote_ids) == 0:
        return np.empty((0, 3), dtype=np.int64)
    breaks = np.flatnonzero((np.diff(remote_ids) != 1) | (np.diff(local_ids) != 1)) + 1
    first = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((first, [len(remote_ids)])))
    return np.stack((local_ids[first], remote_ids[first], counts), axis=1)


def id_runs(ids: Ids) -> list[tuple[int, int]]:
    """Join neighbours on one side: (first id, end id) per run."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts = ids[np.concatenate(([0], breaks))] if len(ids) else ids
    lasts = ids[np.concatenate((breaks - 1, [len(ids) - 1]))] if len(ids) else ids
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


class BlockCopier:
    """Copies blocks from one array of blocks to another; thread safe.

    Attributes:
        method: ``"native"`` or ``"libc"``.
    """

    def __init__(self, *, native: bool = True, compilers: tuple[str, ...] = ("cc", "gcc", "clang")) -> None:
        found = _compile(compilers) if native else None
        self.method = "native" if found else "libc"
        self._copy = found or _libc_copy()

    def copy(self, local: Bytes, remote: Bytes, remote_ids: Ids, local_ids: Ids, wait: Wait) -> None:
        """Copy ``remote[remote_ids[i]]`` to ``local[local_ids[i]]`` and order later reads after the copies.

        Args:
            local: uint8 [blocks, block_bytes], C-contiguous, writable.
            remote: The same with its own number of blocks.
            remote_ids: In range; the caller has checked.
            local_ids: In range and all different.
            wait: Looked at every ``BATCH_BYTES``.

        Raises:
            DeadlineError, CancelledError: Part of the blocks may have been written.
        """
        size = local.shape[1]
        runs = _split(merge_runs(remote_ids, local_ids), max(1, BATCH_BYTES // size))
        table = np.ascontiguousarray(runs * size, dtype=np.uint64)
        to, source = local.ctypes.data, remote.ctypes.data
        batch_of = np.cumsum(runs[:, 2]) * size // BATCH_BYTES
        edges = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(table)]
        for start, end in itertools.pairwise(edges):
            wait.check("copying blocks")
            self._copy(to, source, table[start:end])
        wait.check("copying blocks")


def fence() -> None:
    """Order the memory reads before this call before those after it, on every machine.

    Two pairs of lock and unlock: reads before the first unlock cannot sink below it, reads after the second lock
    cannot rise above it.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


def _split(runs: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
    """Cut runs longer than ``limit`` blocks."""
    if len(runs) == 0 or int(runs[:, 2].max()) <= limit:
        return runs
    out: list[tuple[int, int, int]] = []
    for local, remote, count in runs.tolist():
        out.extend((local + at, remote + at, min(limit, count - at)) for at in range(0, count, limit))
    return np.array(out, dtype=np.int64)


@functools.cache  # a loaded library stays loaded: the second copier of a process needs no compiler
def _compile(compilers: tuple[str, ...]) -> CopyRuns | None:
    """Build the C helper in a private directory that is gone when this returns; ``None`` where that cannot be."""
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="baton-copy-") as folder:
        target = Path(folder) / "copying.so"
        command = [compiler, "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=30)
            library = ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError):
            return None  # no headers, a read-only or noexec folder: libc serves
    function = library.baton_copy_runs
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None

    def copy(to: int, source: int, runs: Runs) -> None:
        function(to, source, runs.ctypes.data, len(runs))

    return copy


def _libc_copy() -> CopyRuns:
    libc = ctypes.CDLL(None, use_errno=True)
    memcpy = libc.memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p
    readv = libc.process_vm_readv
    readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    readv.restype = ctypes.c_ssize_t

    def each(to: int, source: int, runs: Runs) -> None:
        for local, remote, count in runs.tolist():
            memcpy(to + local, source + remote, count)

    def small(to: int, source: int, runs: Runs) -> None:
        sizes = runs[:, 2]
        here = np.stack((runs[:, 0] + np.uint64(to), sizes), axis=1)
        there = np.stack((runs[:, 1] + np.uint64(source), sizes), axis=1)
        for at in range(0, len(runs), _IOV_MAX):
            count = min(_IOV_MAX, len(runs) - at)
            got = readv(os.getpid(), here[at:].ctypes.data, count, there[at:].ctypes.data, count, 0)
            if got != int(sizes[at : at + count].sum()):
                if got < 0:  # forbidden by a sandbox: the slow way works everywhere
                    each(to, source, runs[at:])
                    return
                raise InternalError(f"process_vm_readv copied {got} bytes of {int(sizes[at : at + count].sum())}")

    def copy(to: int, source: int, runs: Runs) -> None:
        few_and_big = len(runs) < 16 or int(runs[:, 2].sum()) // len(runs) >= BIG_RUN_BYTES
        (each if few_and_big else small)(to, source, runs)
        fence()

    return copy
