"""Memory of a KV pool, on the host or on a device, and the state that it shares with readers beside its blocks.

Epoch, generations and progress are always in host memory (:class:`ArenaState`). The blocks' bytes may be in device
memory, which only explicit copies reach: :meth:`Arena.read_into` and :meth:`Arena.write_from`.

Generations fence one-sided reads. The owner raises a block's generation before it hands the block to a new user,
so a reader that finds the generation unchanged *after* its copy knows that the block was not written meanwhile.

Progress is a counter that the owner raises and readers wait for: the layers of a running step, as they are computed.
A reader of "block 7 is complete at 1234" waits for 1234 and copies, while the owner computes the next layer. Waiting
is the kernel's futex on the mapping itself: no message, no polling, and the owner's cost without a waiter is one
system call. A waiter for a value is woken by the values up to it that are congruent to it modulo 32, so usually once,
and not for every layer.

Host memory (:class:`HostArena`) is one mapping of anonymous shared memory (``memfd_create``): another process on the
host maps it from a passed file descriptor and copies blocks from pool to pool, and the kernel frees it with its last
user, also after SIGKILL. A pool that no other process will read can be private memory instead, which the kernel backs
with large pages more readily: attention then reads it up to a fifth faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, InternalError
from baton.types import BlockId, Epoch

Bytes = npt.NDArray[np.uint8]
Spans = npt.NDArray[np.int64]
"""int64 [m, 3]: block id, first byte within the block, number of bytes."""

MAGIC = b"BATONKV1"
_HEADER_BYTES = 4096
_FIELDS_BYTES = 40
_PROGRESS_AT = 64  # a cache line of its own
_FUTEX_WAIT_BITSET = 9
_FUTEX_WAKE_BITSET = 10
_BITS = 32
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_POLL_S = 0.0005


class Progress:
    """A counter in shared memory that its owner raises and readers wait for.

    Args:
        word: The counter, uint64 [1], aligned to 8 bytes, in memory that all parties map; readers may map it read-only.
    """

    def __init__(self, word: npt.NDArray[np.uint64]) -> None:
        self._word = word
        # The kernel compares 32 bits: the low half, which changes with every step.
        self._address = int(word.__array_interface__["data"][0])
        number = _SYS_FUTEX.get(platform.machine())
        self._futex = None if number is None else _futex_call(number)

    @property
    def value(self) -> int:
        """Current value of the counter."""
        return int(self._word[0])

    def advance(self, value: int) -> None:
        """Raise the counter and wake waiting readers; a value that is not higher changes nothing."""
        before = int(self._word[0])
        if value > before:
            self._word[0] = value
            if self._futex is not None:
                self._futex(self._address, _FUTEX_WAKE_BITSET, 2**31 - 1, None, _bits(before + 1, value))

    def wait(self, value: int, timeout_s: float) -> int:
        """Block until the counter has reached ``value`` or the time is up; returns the counter."""
        deadline = time.monotonic() + timeout_s
        while (now := int(self._word[0])) < value:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if self._futex is None:
                time.sleep(min(left, _POLL_S))  # a machine whose system call number is not known here
                continue
            self._futex(self._address, _FUTEX_WAIT_BITSET, now & 0xFFFFFFFF, deadline, _bits(value, value))
        return now


class Arena(Protocol):
    """Memory of ``num_blocks`` blocks of ``block_bytes`` bytes.

    Attributes:
        num_blocks: Number of blocks.
        block_bytes: Size of a block in bytes.
        epoch: 16 random bytes of this arena; a restarted process has others.
        generations: Generation of each block, uint64 [num_blocks], in host memory, shared with readers.
        progress: Progress of the owner's computation, in host memory, shared with readers.
        mapped: Whether the host can address the blocks, so that :attr:`blocks` works.
    """

    num_blocks: int
    block_bytes: int
    epoch: Epoch
    generations: npt.NDArray[np.uint64]
    progress: Progress
    mapped: bool

    @property
    def blocks(self) -> Bytes:
        """The blocks as host memory, uint8 [num_blocks, block_bytes].

        Raises:
            InternalError: The host cannot address them (:attr:`mapped` is ``False``).
        """

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for processes on this host; -1 if no other process can map it."""

    def open_read_only(self) -> int:
        """Return a new file descriptor of the memory that cannot be written through; the caller closes it.

        Raises:
            OSError: No other process can map the memory.
        """

    def read_into(self, target: Bytes, spans: Spans) -> None:
        """Copy spans of blocks to host memory, one after the other; returns when the bytes are there.

        Args:
            target: Buffer to fill, uint8 [total bytes of the spans], contiguous.
            spans: Spans of the arena's blocks, int64 [m, 3].

        Raises:
            InternalError: A span is not within a block, or ``target`` has another size.
        """

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy host memory to spans of blocks, the reverse of :meth:`read_into`."""

    def touch(self) -> None:
        """Make the memory ready, so that no first transfer pays for it."""

    def close(self) -> None:
        """Release the memory's descriptor; harmless if repeated."""


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Address range of an arena's blocks, for hardware that addresses memory itself, as network cards do.

    Attributes:
        address: Address of the first block in this process.
        size: Size of all blocks in bytes.
        device: Index of the GPU that holds the blocks; ``None``: host memory, also if that stands in for a device's.
    """

    address: int
    size: int
    device: int | None = None

    def __str__(self) -> str:
        where = "host memory" if self.device is None else f"the memory of cuda:{self.device}"
        return f"{self.size} bytes of {where}"


@runtime_checkable
class SharedDeviceArena(Protocol):
    """An :class:`Arena` in device memory that other processes on this host can open, to copy on the device.

    Attributes:
        block_bytes: Size of a block in bytes.
    """

    block_bytes: int

    def memory_range(self) -> MemoryRange:
        """Return the address range of the blocks."""

    def export(self) -> tuple[bytes, int]:
        """Return a handle of the blocks, and a new read-only descriptor of the state, which the caller closes.

        Raises:
            OSError: No other process can open the memory.
        """

    def settle(self) -> None:
        """Wait until the device has completed the work that the owner has queued so far."""

    def open_peer(self, handle: bytes, fd: int) -> Arena:
        """Open another process's arena read-only; ``fd`` is closed.

        Raises:
            PipeClosedError: The arena cannot be reached from this process.
            ConfigError: Handle and descriptor are not those of an arena.
        """

    def copy_from(self, peer: Any, taken: Spans, into: Spans) -> None:
        """Copy spans of a peer's blocks to spans of these, on the device; returns when the bytes are there.

        Args:
            peer: An arena that :meth:`open_peer` returned.
            taken: Spans of the peer's blocks.
            into: Spans of these blocks, parallel to ``taken`` and of the same sizes.

        Raises:
            InternalError: A span is not within a block, or sizes differ.
        """


def memory_range(arena: Arena) -> MemoryRange:
    """Return the address range of an arena's blocks.

    Raises:
        InternalError: Only the arena itself reaches them.
    """
    if isinstance(arena, SharedDeviceArena):
        return arena.memory_range()
    return MemoryRange(int(arena.blocks.ctypes.data), arena.num_blocks * arena.block_bytes)


def whole_blocks(block_ids: npt.ArrayLike | list[BlockId], block_bytes: int) -> Spans:
    """Return the spans, int64 [n, 3], of whole blocks."""
    ids = np.asarray(block_ids, np.int64).reshape(-1)
    return np.column_stack([ids, np.zeros_like(ids), np.full_like(ids, block_bytes)])


def require_spans(spans: Spans, num_bytes: int, num_blocks: int, block_bytes: int) -> None:
    """Check that spans are within blocks and as large as their buffer.

    Raises:
        InternalError: They are not.
    """
    ids, starts, sizes = spans.T
    inside = (ids >= 0) & (ids < num_blocks) & (starts >= 0) & (sizes >= 0) & (starts + sizes <= block_bytes)
    if not inside.all() or int(sizes.sum()) != num_bytes:
        raise InternalError(f"spans of {int(sizes.sum())} bytes do not fit a buffer of {num_bytes}, or the blocks")


def checked_spans(
    spans: Spans, num_bytes: int, num_blocks: int, block_bytes: int
) -> Iterator[tuple[slice, int, slice]]:
    """Yield, per span, its slice of the host buffer, its block and its slice of that block.

    Raises:
        InternalError: A span is not within a block, or the buffer has another size; before any is yielded.
    """
    require_spans(spans, num_bytes, num_blocks, block_bytes)
    at = 0
    for block, start, size in spans.tolist():
        yield slice(at, at + size), block, slice(start, start + size)
        at += size


# The shared state


@dataclass(frozen=True, slots=True, eq=False)
class ArenaState:
    """The shared state of an arena: a header page (magic, epoch, sizes, progress), then the generations.

    Attributes:
        epoch: Epoch of the arena.
        num_blocks: Number of blocks.
        block_bytes: Size of a block in bytes.
        generations: Generation of each block, uint64 [num_blocks].
        progress: Progress of the owner's computation.
    """

    epoch: Epoch
    num_blocks: int
    block_bytes: int
    generations: npt.NDArray[np.uint64]
    progress: Progress

    @classmethod
    def create(
        cls, memory: npt.NDArray[np.uint8], num_blocks: int, block_bytes: int, epoch: Epoch | None = None
    ) -> ArenaState:
        """Create the state of a new arena in zeroed memory.

        Args:
            memory: uint8, at least ``state_bytes(num_blocks)``, aligned to 8 bytes.
            num_blocks: Number of blocks in the arena.
            block_bytes: Size of a block in bytes.
            epoch: Epoch of the arena; default: a new one.
        """
        epoch = epoch or Epoch(secrets.token_bytes(16))
        header = MAGIC + epoch + num_blocks.to_bytes(8, "little") + block_bytes.to_bytes(8, "little")
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        return cls.at(memory, header)

    @classmethod
    def at(cls, memory: npt.NDArray[np.uint8], header: bytes) -> ArenaState:
        """Return the state in memory that begins with a header that :func:`read_header` accepts."""
        epoch, num_blocks, block_bytes = read_header(header)
        generations = memory[_HEADER_BYTES : _HEADER_BYTES + 8 * num_blocks].view(np.uint64)
        progress = Progress(memory[_PROGRESS_AT : _PROGRESS_AT + 8].view(np.uint64))
        return cls(epoch, num_blocks, block_bytes, generations, progress)


def read_header(header: bytes) -> tuple[Epoch, int, int]:
    """Return epoch, number of blocks and bytes per block from the beginning of an arena's state.

    Raises:
        ConfigError: The bytes are not the header of an arena.
    """
    if len(header) < _FIELDS_BYTES or header[:8] != MAGIC:
        raise ConfigError("the memory received is not a KV arena")
    return Epoch(header[8:24]), int.from_bytes(header[24:32], "little"), int.from_bytes(header[32:40], "little")


def state_bytes(num_blocks: int) -> int:
    """Return the size of the state in bytes, in whole pages."""
    return _HEADER_BYTES + page_up(8 * num_blocks)


def page_up(size: int) -> int:
    """Round bytes up to whole pages."""
    return -(-size // 4096) * 4096


def _bits(first: int, last: int) -> int:
    """Return the futex bits of the values from the first to the last."""
    run = (1 << min(last - first + 1, _BITS)) - 1 << first % _BITS
    return (run | run >> _BITS) & 0xFFFFFFFF


def _futex_call(number: int) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    syscall = libc.syscall
    syscall.restype = ctypes.c_long

    class Timespec(ctypes.Structure):
        _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))

    def call(address: int, operation: int, value: int, deadline: float | None, bits: int) -> int:
        limit = None
        if deadline is not None:  # in seconds of ``time.monotonic``, the clock of this operation
            seconds = int(deadline)
            limit = ctypes.byref(Timespec(seconds, int((deadline - seconds) * 1e9)))
        result = syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_uint32(value),
            limit, None, ctypes.c_uint32(bits),
        )  # fmt: skip
        code = ctypes.get_errno()
        # Changed before the wait began, time-out, signal: the caller looks at the counter again in any case.
        if result < 0 and code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return int(result)

    return call


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HostArena:
    """An :class:`Arena` in host memory; the mapping is its state, then the blocks.

    Args:
        num_blocks: Number of blocks in the pool, at least 1.
        block_bytes: Size of a block in bytes.
        epoch: Epoch of the arena; default: a new one.
        private: Whether no other process may map the memory.

    Attributes:
        blocks: The blocks, uint8 [num_blocks, block_bytes].

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
        with contextlib.suppress(OSError):  # a kernel without large pages, or without them for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        self._use(mapping, whole, ArenaState.create(whole, num_blocks, block_bytes, epoch))

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> HostArena:
        """Map another process's arena from a file descriptor, which this object then owns.

        Args:
            fd: File descriptor of the arena's memory.
            writable: Map for writing, for a rank of the instance that owns the arena.

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
        self.num_blocks = state.num_blocks
        self.block_bytes = state.block_bytes
        self.epoch = state.epoch
        self.generations = state.generations
        self.progress = state.progress
        self._start = state_bytes(state.num_blocks)
        used = whole[self._start : self._start + state.num_blocks * state.block_bytes]
        self.blocks: Bytes = used.reshape(state.num_blocks, state.block_bytes)

    def open_read_only(self) -> int:
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        return self._fd

    def read_into(self, target: Bytes, spans: Spans) -> None:
        for at, block, span in checked_spans(spans, len(target), self.num_blocks, self.block_bytes):
            target[at] = self.blocks[block, span]

    def write_from(self, source: Bytes, spans: Spans) -> None:
        for at, block, span in checked_spans(spans, len(source), self.num_blocks, self.block_bytes):
            self.blocks[block, span] = source[at]

    def touch(self) -> None:
        """Fault every page in, so that no first transfer pays for it (about 1.4 GB/s instead of 20)."""
        self.blocks[:, ::4096] = 0

    def discard(self, first: int, stop: int) -> None:
        """Return the memory of the blocks ``[first, stop)`` to the kernel, in whole pages; they read as zeros."""
        start = self._start + page_up(first * self.block_bytes)
        end = self._start + stop * self.block_bytes // 4096 * 4096
        if stop == self.num_blocks:
            end = self._start + page_up(stop * self.block_bytes)
        if end > start:
            self._mapping.madvise(self._discard, start, end - start)

    def close(self) -> None:
        """Release the file descriptor; the mapping goes with the last array that refers to it.

        The blocks of private memory, which has no other readers, are freed at once: they read as zeros then.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        elif self._discard == mmap.MADV_DONTNEED:
            self.discard(0, self.num_blocks)


def arena_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of the whole mapping in bytes."""
    return state_bytes(num_blocks) + page_up(num_blocks * block_bytes)
