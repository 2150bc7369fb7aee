"""Copies of blocks between two mappings, fenced by generations, without holding the interpreter lock.

A page of C, compiled once per process where a compiler is, reads any number of blocks in one call and past the cache:
scattered blocks about as fast as one big ``memcpy``, where a ``memcpy`` per block is 1.6 times slower. Without a
compiler, big runs go through libc's ``memcpy`` one call each, small ones through ``process_vm_readv`` on this very
process: slower per byte, but one system call takes a thousand runs, and every call may cost a wait for the lock.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError
from baton.kv.reshard import Segments
from baton.native import COMPILERS, address_of, load_helper
from baton.transport.block_types import BlockReads, Bytes, Generations, Ids, Valid
from baton.transport.waiting import Wait

BATCH_BYTES = 32 << 20
"""Bytes between two looks at the cancel flag (a few milliseconds)."""
BIG_RUN_BYTES = 256 << 10
_IOV_MAX = 1024

ReadBlocks = Callable[[Bytes, Bytes, Generations, BlockReads, Segments, Valid], None]
"""Reads blocks from the second array into the first and fills in which of them are valid."""


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


class BlockCopier:
    """Reads blocks of one mapped pool into another; thread safe.

    Attributes:
        method: ``"native"`` or ``"libc"``.
    """

    def __init__(self, *, native: bool = True, compilers: tuple[str, ...] = COMPILERS) -> None:
        found = _native_read(compilers) if native else None
        self.method = "native" if found else "libc"
        self._read = found or _libc_read()

    def read(self, local: Bytes, remote: Bytes, generations: Generations, reads: BlockReads, wait: Wait) -> Valid:
        """Copy blocks, or their segments, and say which had the wanted generation before and after.

        Args:
            local: uint8 [blocks, block_bytes], C-contiguous, writable.
            remote: The same with its own number and size of blocks.
            generations: Of the remote blocks, [blocks]; may change at any time.
            reads: In range; the caller has checked.
            wait: Looked at every ``BATCH_BYTES``.

        Returns:
            bool [n].

        Raises:
            DeadlineError, CancelledError: Part of the blocks may have been written.
        """
        size = local.shape[1]
        segments = reads.segments_of(size)
        valid = np.empty(len(reads), dtype=np.bool_)
        batch = max(1, BATCH_BYTES // max(1, reads.bytes_per_block(size)))
        if len(reads) <= batch:
            wait.check("copying blocks")
            self._read(local, remote, generations, reads, segments, valid)
            return valid
        for at in range(0, len(reads), batch):
            wait.check("copying blocks")
            part = slice(at, at + batch)
            self._read(local, remote, generations, reads.take(part), segments, valid[part])
        wait.check("copying blocks")
        return valid


def fence() -> None:
    """Order the memory reads before this call before those after it, on every machine.

    Two pairs of lock and unlock: reads before the first unlock cannot sink below it, reads after the second lock
    cannot rise above it.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


@functools.lru_cache(maxsize=1024)  # pools don't move, and making one takes longer than the rest of a small read
def _side(base: int, block_bytes: int) -> Any:
    return ctypes.byref(_Side(base, block_bytes))


class _Places:
    """Addresses of arrays that live long: looking one up again takes a tenth of the time of asking numpy."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[npt.NDArray[Any]], int]] = {}

    def of(self, array: npt.NDArray[Any]) -> int:
        """Return where an array's memory begins; thread safe."""
        key = id(array)
        known = self._known.get(key)
        if known is not None and known[0]() is array:
            return known[1]
        address = address_of(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None)), address
        return address


def _address_of_new(array: Any) -> int:
    """Return where the memory of a numpy array begins that was just made; a third of the time that numpy takes."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    except (TypeError, ValueError):  # read-only, or empty
        return address_of(array)


class _Side(ctypes.Structure):
    """The C structure ``side``."""

    _fields_ = (("base", ctypes.c_uint64), ("block_bytes", ctypes.c_uint64))


def _native_read(compilers: tuple[str, ...]) -> ReadBlocks | None:
    library = load_helper(Path(__file__).with_name("copying.c"), compilers)
    if library is None:
        return None
    function = library.baton_read_blocks
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer] * 6 + [size, pointer, size, pointer]
    function.restype = None
    places = _Places()

    def read(
        local: Bytes, remote: Bytes, generations: Generations, reads: BlockReads, segments: Segments, valid: Valid
    ) -> None:
        function(
            _side(places.of(local), local.shape[1]),
            _side(places.of(remote), remote.shape[1]),
            places.of(generations),
            _address_of_new(reads.remote_ids),
            _address_of_new(reads.generations),
            _address_of_new(reads.local_ids),
            len(valid),
            places.of(segments),
            len(segments),
            _address_of_new(valid),
        )

    return read


def _libc_read() -> ReadBlocks:
    copy = _libc_copy()

    def read(
        local: Bytes, remote: Bytes, generations: Generations, reads: BlockReads, segments: Segments, valid: Valid
    ) -> None:
        valid[:] = generations[reads.remote_ids] == reads.generations
        good = reads.take(valid)
        whole = len(segments) == 1 and int(segments[0, 2]) == local.shape[1] == remote.shape[1]
        if whole:
            runs = merge_runs(good.remote_ids, good.local_ids) * local.shape[1]
        else:
            to = good.local_ids[:, None] * local.shape[1] + segments[:, 1]
            source = good.remote_ids[:, None] * remote.shape[1] + segments[:, 0]
            sizes = np.broadcast_to(segments[:, 2], to.shape)
            runs = np.stack((to.ravel(), source.ravel(), sizes.ravel()), axis=1)
        copy(address_of(local), address_of(remote), np.ascontiguousarray(runs, dtype=np.uint64))
        fence()
        valid &= generations[reads.remote_ids] == reads.generations

    return read


def _libc_copy() -> Callable[[int, int, npt.NDArray[np.uint64]], None]:
    """Return a copy between two base addresses of runs uint64 [n, 3]: target offset, source offset, bytes."""
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

    def each(to: int, source: int, runs: npt.NDArray[np.uint64]) -> None:
        for local, remote, count in runs.tolist():
            memcpy(to + local, source + remote, count)

    def small(to: int, source: int, runs: npt.NDArray[np.uint64]) -> None:
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

    def copy(to: int, source: int, runs: npt.NDArray[np.uint64]) -> None:
        few_and_big = len(runs) < 16 or int(runs[:, 2].sum()) // len(runs) >= BIG_RUN_BYTES
        (each if few_and_big else small)(to, source, runs)

    return copy
