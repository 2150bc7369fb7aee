"""A KV pool in host memory: one shareable mapping, allocated once.

The mapping is anonymous shared memory (``memfd_create``): another process on the host maps it from a passed file
descriptor and copies blocks from pool to pool, and the kernel frees it with its last user, also after SIGKILL.

A pool that no other process will ever read can be private memory instead, which the kernel backs with large pages more
readily: attention then reads it up to a fifth faster.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np

from baton.errors import ConfigError
from baton.kv_cache.arena.base import ArenaState, Bytes, Spans, checked_spans, page_up, read_header, state_bytes
from baton.types import Epoch

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HostArena:
    """Implements :class:`~baton.kv_cache.arena.base.Arena`; the mapping is its state, then the blocks.

    Args:
        num_blocks: Of the pool.
        block_bytes: Size of each.
        epoch: Of this arena; default: a new one.
        private: Never to be mapped by another process.

    Attributes:
        blocks: uint8 array [num_blocks, block_bytes].

    Raises:
        ConfigError: No blocks, or no bytes.
    """

    mapped = True

    def __init__(self, num_blocks: int, block_bytes: int, *, epoch: Epoch | None = None, private: bool = False) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"an arena needs blocks and bytes, got {num_blocks} x {block_bytes}", field="kv_blocks")
        size = arena_bytes(num_blocks, block_bytes)
        if private:
            self._fd = -1
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, size)
            # Sealed in its size, so that no reader's mapping can ever fault on memory that went away.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(self._fd, size, access=mmap.ACCESS_WRITE)
        self._discard = mmap.MADV_DONTNEED if private else mmap.MADV_REMOVE
        with contextlib.suppress(OSError):  # a kernel without large pages, or none for shared memory: small ones do
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        self._use(mapping, whole, ArenaState.create(whole, num_blocks, block_bytes, epoch))

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> HostArena:
        """Map another process's arena from a file descriptor, which this object then owns.

        Args:
            fd: Of the arena's memory.
            writable: For a rank of the instance that the arena belongs to; others only read.

        Raises:
            ConfigError: The descriptor is not an arena.
        """
        self = cls.__new__(cls)
        self._fd = fd
        header = os.pread(fd, 40, 0)
        _, num_blocks, block_bytes = read_header(header)
        size = arena_bytes(num_blocks, block_bytes)
        if os.fstat(fd).st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConfigError("the file descriptor received is not a KV arena")
        self._discard = mmap.MADV_REMOVE
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        whole = np.frombuffer(mapping, np.uint8)
        self._use(mapping, whole, ArenaState.at(whole, header))
        return self

    def _use(self, mapping: mmap.mmap, whole: Bytes, state: ArenaState) -> None:
        self._mapping = mapping
        self.num_blocks, self.block_bytes, self.epoch = state.num_blocks, state.block_bytes, state.epoch
        self.generations, self.progress = state.generations, state.progress
        self._start = state_bytes(state.num_blocks)
        used = whole[self._start : self._start + state.num_blocks * state.block_bytes]
        self.blocks: Bytes = used.reshape(state.num_blocks, state.block_bytes)

    def open_read_only(self) -> int:
        """Return a new file descriptor of the memory that cannot be written through; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """The memory's file descriptor, to be passed to readers on the same host; -1 if it is private."""
        return self._fd

    def read_into(self, target: Bytes, spans: Spans) -> None:
        """Copy spans of blocks to ``target``; see :meth:`~baton.kv_cache.arena.base.Arena.read_into`."""
        for at, block, span in checked_spans(spans, len(target), self.num_blocks, self.block_bytes):
            target[at] = self.blocks[block, span]

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy ``source`` to spans of blocks."""
        for at, block, span in checked_spans(spans, len(source), self.num_blocks, self.block_bytes):
            self.blocks[block, span] = source[at]

    def touch(self) -> None:
        """Fault every page in, so that no first transfer pays for it (about 1.4 GB/s instead of 20)."""
        self.blocks[:, ::4096] = 0

    def discard(self, first: int, stop: int) -> None:
        """Give the memory of the blocks ``[first, stop)`` back to the kernel, whole pages only; they read as zeros."""
        start = self._start + page_up(first * self.block_bytes)
        end = self._start + stop * self.block_bytes // 4096 * 4096
        if stop == self.num_blocks:
            end = self._start + page_up(stop * self.block_bytes)
        if end > start:
            self._mapping.madvise(self._discard, start, end - start)

    def close(self) -> None:
        """Release the file descriptor; the mapping goes with the last array that refers to it.

        The blocks of private memory, which nobody else reads, are given back at once: they read as zeros then.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        elif self._discard == mmap.MADV_DONTNEED:
            self.discard(0, self.num_blocks)


def arena_bytes(num_blocks: int, block_bytes: int) -> int:
    """Bytes of the whole mapping."""
    return state_bytes(num_blocks) + page_up(num_blocks * block_bytes)
