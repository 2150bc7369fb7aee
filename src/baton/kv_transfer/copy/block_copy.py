"""Copies of blocks between two mappings, fenced by generations; big ones do not hold the interpreter lock.

A page of C, compiled once per process where a compiler is, reads any number of blocks in one call and past the cache:
scattered blocks about as fast as one big ``memcpy``, where a ``memcpy`` per block is 1.6 times slower. Without a
compiler, big runs go through libc's ``memcpy`` one call each, small ones through ``process_vm_readv`` on this very
process: slower per byte, but one system call takes a thousand runs, and every call may cost a wait for the lock.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError, PipeClosedError
from baton.kv_cache.reshard import Segments
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.sockets import Stream
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Ids, Valid
from baton.native import COMPILERS, address_of, load_helper

BATCH_BYTES = 32 << 20
"""Bytes between two looks at the cancel flag (a few milliseconds)."""
BIG_RUN_BYTES = 256 << 10
SMALL_READ_BYTES = 64 << 10
"""Reads of up to so many bytes keep the interpreter lock (a few microseconds)."""
_IOV_MAX = 1024


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


class Line:
    """A connection to the owner of mapped pools, whose leases end with it.

    Its descriptor is a copy, closed with the last reader that has it: nobody can be in the kernel with it then, and
    reads need no lock against the stream being closed.

    Raises:
        PipeClosedError: The stream was closed.
    """

    def __init__(self, stream: Stream) -> None:
        self.peer, self.descriptor = stream.peer, -1
        with stream.in_use():
            self.descriptor = os.dup(stream.sock.fileno())

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def holds(self) -> bool:
        """Whether neither side has hung up; never blocks."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLRDHUP)
        return not poller.poll(0)


class BlockReader(ABC):
    """Reads one mapped pool's blocks into pools of this process; thread safe.

    Args:
        remote: uint8 [blocks, block_bytes], C-contiguous.
        generations: Of the remote blocks, [blocks]; may change at any time.
        line: To the pool's owner; ``None``: it is this process.
    """

    def __init__(self, remote: Bytes, generations: Generations, line: Line | None) -> None:
        self._remote, self._generations, self._line = remote, generations, line

    def read(self, local: Bytes, reads: BlockReads, wait: Wait) -> Valid:
        """Copy blocks, or their segments, and say which had the wanted generation before and after.

        Args:
            local: uint8 [blocks, block_bytes], C-contiguous, writable, with its own number and size of blocks.
            reads: In range; the caller has checked.
            wait: Looked at every ``BATCH_BYTES``.

        Returns:
            bool [n].

        Raises:
            PipeClosedError: The pool's owner is gone; what was copied must not be used.
            DeadlineError, CancelledError: Part of the blocks may have been written.
        """
        wait.check("copying blocks")
        count = len(reads.remote_ids)
        each = reads.bytes_per_block(local.shape[1])
        if count * each <= BATCH_BYTES or count <= 1:
            return self._copy(local, reads, count * each)
        batch = max(1, BATCH_BYTES // each)
        parts: list[Valid] = []
        for at in range(0, count, batch):
            part = reads.take(slice(at, at + batch))
            parts.append(self._copy(local, part, len(part) * each))
            wait.check("copying blocks")
        return np.concatenate(parts)

    @abstractmethod
    def holds(self) -> bool:
        """Whether the connection to the pool's owner is there; never blocks."""

    @abstractmethod
    def _copy(self, local: Bytes, reads: BlockReads, num_bytes: int) -> Valid:
        """Copy blocks of so many bytes together; see :meth:`read`."""

    def _gone(self) -> PipeClosedError:
        peer = self._line.peer if self._line else "the owner"
        return PipeClosedError(f"{peer} went away during a read: its lease on the blocks is over")


class BlockCopier:
    """Makes readers of mapped pools, of the best kind that works here.

    Attributes:
        method: ``"native"`` or ``"libc"``.
    """

    def __init__(self, *, native: bool = True, compilers: tuple[str, ...] = COMPILERS) -> None:
        library = load_helper(Path(__file__).with_name("block_copy.c"), compilers) if native else None
        self._calls = _NativeCalls(library) if library else _libc_copy()
        self.method = "native" if library else "libc"

    def reader(self, remote: Bytes, generations: Generations, line: Line | None = None) -> BlockReader:
        """Return a reader of a mapped pool; see :class:`BlockReader`."""
        if isinstance(self._calls, _NativeCalls):
            return _NativeReader(self._calls, remote, generations, line)
        return _LibcReader(self._calls, remote, generations, line)


def fence() -> None:
    """Order the memory reads before this call before those after it, on every machine.

    Two pairs of lock and unlock: reads before the first unlock cannot sink below it, reads after the second lock
    cannot rise above it.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


class _Way(ctypes.Structure):
    """The C structure ``way``."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("to_bytes", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("source_bytes", ctypes.c_uint64),
        ("generations", ctypes.c_uint64),
        ("line", ctypes.c_int64),
    )


class _NativeCalls:
    """The library's functions.

    Attributes:
        read_small: ``baton_read_blocks``, keeping the interpreter lock: a thread that took it meanwhile could have it
            for milliseconds.
        read: The same without the lock.
        line_holds: ``baton_line_holds``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        locked = ctypes.PyDLL(None, handle=library._handle)
        self.line_holds = locked.baton_line_holds
        self.line_holds.argtypes = [ctypes.c_int64]
        self.read_small, self.read = locked.baton_read_blocks, library.baton_read_blocks
        data, pointer, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
        for function in (self.read_small, self.read):
            function.argtypes = [pointer, data, data, data, size, pointer, size, pointer]


_Known = tuple["weakref.ref[Bytes]", Any, int, Segments]
"""A target pool, the way to it, and where the segments of whole blocks are (kept, so that they stay there)."""


class _NativeReader(BlockReader):
    def __init__(self, calls: _NativeCalls, remote: Bytes, generations: Generations, line: Line | None) -> None:
        super().__init__(remote, generations, line)
        self._calls = calls
        descriptor = -1 if line is None else line.descriptor
        self._from = address_of(remote), remote.shape[1], address_of(generations), descriptor
        self._ways: dict[int, _Known] = {}

    def holds(self) -> bool:
        return bool(self._calls.line_holds(self._from[3]))

    def _copy(self, local: Bytes, reads: BlockReads, num_bytes: int) -> Valid:
        known = self._ways.get(id(local))
        if known is None or known[0]() is not local:
            known = self._find_way(local)
        segments = reads.segments
        valid = np.empty(len(reads.remote_ids), dtype=np.bool_)
        call = self._calls.read_small if num_bytes <= SMALL_READ_BYTES else self._calls.read
        # As bytes, whose address ctypes has at once: to ask an array for its own takes longer than such a copy.
        if not call(
            known[1],
            reads.remote_ids.tobytes(),
            reads.generations.tobytes(),
            reads.local_ids.tobytes(),
            len(valid),
            known[2] if segments is None else _address_of_new(segments),
            1 if segments is None else len(segments),
            _address_of_new(valid),
        ):
            raise self._gone()
        return valid

    def _find_way(self, local: Bytes) -> _Known:
        """Prepare what does not change from read to read: pools don't move."""
        size, whole = local.shape[1], np.array([[0, 0, local.shape[1]]], dtype=np.int64)
        source, source_bytes, generations, line = self._from
        way = _Way(address_of(local), size, source, source_bytes, generations, line)
        for old, (pool, *_) in list(self._ways.items()):
            if pool() is None:
                self._ways.pop(old, None)
        known = self._ways[id(local)] = weakref.ref(local), ctypes.byref(way), address_of(whole), whole
        return known


def _address_of_new(array: Any) -> int:
    """Return where the memory of a numpy array begins that was just made; a third of the time that numpy takes."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    except (TypeError, ValueError):  # read-only, or empty
        return address_of(array)


class _LibcReader(BlockReader):
    def __init__(self, copy: _CopyRuns, remote: Bytes, generations: Generations, line: Line | None) -> None:
        super().__init__(remote, generations, line)
        self._copy_runs = copy

    def holds(self) -> bool:
        return self._line is None or self._line.holds()

    def _copy(self, local: Bytes, reads: BlockReads, num_bytes: int) -> Valid:
        remote, generations = self._remote, self._generations
        valid: Valid = generations[reads.remote_ids] == reads.generations
        good, segments = reads.take(valid), reads.segments_of(local.shape[1])
        whole = len(segments) == 1 and int(segments[0, 2]) == local.shape[1] == remote.shape[1]
        if whole:
            runs = merge_runs(good.remote_ids, good.local_ids) * local.shape[1]
        else:
            to = good.local_ids[:, None] * local.shape[1] + segments[:, 1]
            source = good.remote_ids[:, None] * remote.shape[1] + segments[:, 0]
            sizes = np.broadcast_to(segments[:, 2], to.shape)
            runs = np.stack((to.ravel(), source.ravel(), sizes.ravel()), axis=1)
        self._copy_runs(address_of(local), address_of(remote), np.ascontiguousarray(runs, dtype=np.uint64))
        fence()
        valid &= generations[reads.remote_ids] == reads.generations
        if not self.holds():
            raise self._gone()
        return valid


_CopyRuns = Callable[[int, int, npt.NDArray[np.uint64]], None]
"""A copy between two base addresses of runs uint64 [n, 3]: target offset, source offset, bytes."""


def _libc_copy() -> _CopyRuns:
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
