"""The memory a KV pool lies in: one shareable mapping, allocated once, with a generation number per block.

The mapping is anonymous shared memory (``memfd_create``): another process on the host maps it from a passed file
descriptor and copies blocks from pool to pool, and the kernel frees it with its last user, also after SIGKILL.

A pool that no other process will ever read can be private memory instead, which the kernel backs with large pages more
readily: attention then reads it up to a fifth faster.

Generations fence one-sided reads. The owner raises a block's generation before it hands the block to a new user,
so a reader who finds the generation unchanged *after* its copy knows that nobody wrote into the block meanwhile.

Progress lets readers follow a computation: a counter that the owner raises, and that a reader may wait for.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.kv_cache.progress import Progress
from baton.types import Epoch

HEADER_BYTES = 4096
_PROGRESS_AT = 64  # a cache line of its own
MAGIC = b"BATONKV1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class KVArena:
    """A pool's memory: ``num_blocks`` blocks of ``block_bytes`` bytes behind a header and the generations.

    Layout of the mapping: header page (magic, epoch, num_blocks, block_bytes, progress), generations (uint64 per
    block, padded to a page), blocks.

    Args:
        num_blocks: Of the pool.
        block_bytes: Size of each.
        epoch: Of this arena; default: a new one.
        private: Never to be mapped by another process.

    Attributes:
        epoch: 16 random bytes of this arena; a restarted process has another.
        generations: uint64 array [num_blocks], shared with readers.
        blocks: uint8 array [num_blocks, block_bytes].
        progress: How far the owner's computation is, shared with readers.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, epoch: Epoch | None = None, private: bool = False) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"an arena needs blocks and bytes, got {num_blocks} x {block_bytes}", field="kv_blocks")
        self.epoch = epoch or Epoch(secrets.token_bytes(16))
        size = arena_bytes(num_blocks, block_bytes)
        if private:
            self._fd = -1
            self._map(num_blocks, block_bytes, mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        else:
            self._fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, size)
            # Sealed in its size, so that no reader's mapping can ever fault on memory that went away.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map(num_blocks, block_bytes, mmap.mmap(self._fd, size, access=mmap.ACCESS_WRITE))
        self._discard = mmap.MADV_DONTNEED if private else mmap.MADV_REMOVE
        with contextlib.suppress(OSError):  # a kernel without large pages, or none for shared memory: small ones do
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        header = MAGIC + self.epoch + num_blocks.to_bytes(8, "little") + block_bytes.to_bytes(8, "little")
        self._mapping[: len(header)] = header

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> KVArena:
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
        num_blocks = int.from_bytes(header[24:32], "little")
        block_bytes = int.from_bytes(header[32:40], "little")
        right = header[:8] == MAGIC and os.fstat(fd).st_size == arena_bytes(num_blocks, block_bytes)
        if not right or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConfigError("the file descriptor received is not a KV arena")
        self.epoch = Epoch(header[8:24])
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._discard = mmap.MADV_REMOVE
        self._map(num_blocks, block_bytes, mmap.mmap(fd, arena_bytes(num_blocks, block_bytes), access=access))
        return self

    def _map(self, num_blocks: int, block_bytes: int, mapping: mmap.mmap) -> None:
        self.num_blocks, self.block_bytes, self._mapping = num_blocks, block_bytes, mapping
        whole = np.frombuffer(self._mapping, dtype=np.uint8)
        start = HEADER_BYTES + _page_up(8 * num_blocks)
        self.progress = Progress(whole[_PROGRESS_AT : _PROGRESS_AT + 8].view(np.uint64))
        self.generations: npt.NDArray[np.uint64] = whole[HEADER_BYTES : HEADER_BYTES + 8 * num_blocks].view(np.uint64)
        self.blocks: npt.NDArray[np.uint8] = whole[start : start + num_blocks * block_bytes].reshape(
            num_blocks, block_bytes
        )

    def open_read_only(self) -> int:
        """Return a new file descriptor of the memory that cannot be written through; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """The memory's file descriptor, to be passed to readers on the same host; -1 if it is private."""
        return self._fd

    def touch(self) -> None:
        """Fault every page in, so that no first transfer pays for it (about 1.4 GB/s instead of 20)."""
        self.blocks[:, ::4096] = 0

    def discard(self, first: int, stop: int) -> None:
        """Give the memory of the blocks ``[first, stop)`` back to the kernel, whole pages only; they read as zeros."""
        base = HEADER_BYTES + _page_up(8 * self.num_blocks)
        start = base + _page_up(first * self.block_bytes)
        end = base + stop * self.block_bytes // 4096 * 4096
        if stop == self.num_blocks:
            end = base + _page_up(stop * self.block_bytes)
        if end > start:
            self._mapping.madvise(self._discard, start, end - start)

    def close(self) -> None:
        """Release the file descriptor; the mapping goes with the last array that refers to it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def arena_bytes(num_blocks: int, block_bytes: int) -> int:
    """Bytes of the whole mapping."""
    return HEADER_BYTES + _page_up(8 * num_blocks) + _page_up(num_blocks * block_bytes)


def _page_up(size: int) -> int:
    return -(-size // 4096) * 4096
