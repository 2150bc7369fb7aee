"""What a KV pool's memory offers, wherever it lies, and what is shared of it apart from its blocks.

Epoch, a generation per block, and progress are always in host memory (:class:`ArenaState`). The blocks' bytes need not
be: memory of a device is reached by explicit copies alone, :meth:`Arena.read_into` and :meth:`Arena.write_from`.

Generations fence one-sided reads. The owner raises a block's generation before it hands the block to a new user,
so a reader who finds the generation unchanged *after* its copy knows that the block was not written meanwhile.

Progress is a counter that the owner raises and readers wait for: the layers of a running step, as they are computed.
A reader that was told "block 7 is complete at 1234" waits for 1234 and copies, while the owner computes the next
layer. Waiting is the kernel's futex on the mapping itself: no message, no polling, and the owner's cost without a
waiter is one system call. A waiter for a value is woken by the values up to it that are congruent to it modulo 32,
so as a rule once, and not for every layer.
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
_FUTEX_WAIT_BITSET, _FUTEX_WAKE_BITSET = 9, 10
_BITS = 32
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_POLL_S = 0.0005


class Progress:
    """The counter.

    Args:
        word: uint64 [1], aligned to 8 bytes, in memory that all parties map; readers may map it read-only.
    """

    def __init__(self, word: npt.NDArray[np.uint64]) -> None:
        self._word = word
        # The kernel compares 32 bits: the low half, which changes with every step.
        self._address = int(word.__array_interface__["data"][0])
        number = _SYS_FUTEX.get(platform.machine())
        self._futex = None if number is None else _futex_call(number)

    @property
    def value(self) -> int:
        """The counter now."""
        return int(self._word[0])

    def advance(self, value: int) -> None:
        """Raise the counter and wake waiting readers; a value not above the present one changes nothing."""
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
                time.sleep(min(left, _POLL_S))  # a machine whose number of the system call is not known here
                continue
            self._futex(self._address, _FUTEX_WAIT_BITSET, now & 0xFFFFFFFF, deadline, _bits(value, value))
        return now


class Arena(Protocol):
    """Memory of ``num_blocks`` blocks of ``block_bytes`` bytes.

    Attributes:
        epoch: 16 random bytes of this arena; a restarted process has another.
        generations: uint64 [num_blocks] in host memory, shared with readers.
        progress: How far the owner's computation is, in host memory, shared with readers.
        mapped: Whether the host addresses the blocks, so that :attr:`blocks` works.
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
            target: uint8 [the spans' bytes], contiguous.
            spans: What to copy.

        Raises:
            InternalError: A span is not within a block, or ``target`` has another size.
        """

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy host memory to spans of blocks: :meth:`read_into` the other way round."""

    def touch(self) -> None:
        """Make the memory ready, so that no first transfer pays for it."""

    def close(self) -> None:
        """Release the memory's descriptor; harmless if repeated."""


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Where an arena's blocks lie, for what addresses memory by itself, as network cards do.

    Attributes:
        address: Of the first, as this process sees it.
        size: Bytes of all.
        device: Index of the GPU that has them; ``None``: the host, also where its memory stands in for a device's.
    """

    address: int
    size: int
    device: int | None = None

    def __str__(self) -> str:
        where = "host memory" if self.device is None else f"the memory of cuda:{self.device}"
        return f"{self.size} bytes of {where}"


@runtime_checkable
class SharedDeviceArena(Protocol):
    """What an :class:`Arena` in device memory has that other processes on this host can open, to copy on the device.

    Attributes:
        block_bytes: Of each block.
    """

    block_bytes: int

    def memory_range(self) -> MemoryRange:
        """Return where the blocks lie."""

    def export(self) -> tuple[bytes, int]:
        """Return the handle of the blocks, and a new read-only descriptor of the state, which the caller closes.

        Raises:
            OSError: No other process can open the memory.
        """

    def settle(self) -> None:
        """Wait until all is done that the owner has queued on the device by now."""

    def open_peer(self, handle: bytes, fd: int) -> Arena:
        """Open another process's arena, to read it alone; ``fd`` is closed.

        Raises:
            PipeClosedError: It cannot be reached from here.
            ConfigError: What was passed is no arena.
        """

    def copy_from(self, peer: Any, taken: Spans, into: Spans) -> None:
        """Copy spans of a peer's blocks to spans of these, on the device; returns when the bytes are there.

        Args:
            peer: What :meth:`open_peer` returned.
            taken: Of the peer's.
            into: Parallel, of the same sizes.

        Raises:
            InternalError: A span is not within a block, or sizes differ.
        """


def memory_range(arena: Arena) -> MemoryRange:
    """Return where an arena's blocks lie.

    Raises:
        InternalError: Nothing but the arena itself reaches them.
    """
    if isinstance(arena, SharedDeviceArena):
        return arena.memory_range()
    return MemoryRange(int(arena.blocks.ctypes.data), arena.num_blocks * arena.block_bytes)


def whole_blocks(block_ids: npt.ArrayLike | list[BlockId], block_bytes: int) -> Spans:
    """Return the spans, int64 [n, 3], of whole blocks."""
    ids = np.asarray(block_ids, np.int64).reshape(-1)
    return np.column_stack([ids, np.zeros_like(ids), np.full_like(ids, block_bytes)])


def require_spans(spans: Spans, num_bytes: int, num_blocks: int, block_bytes: int) -> None:
    """Refuse spans beyond blocks, or of another size together than their buffer.

    Raises:
        InternalError: As it says.
    """
    ids, starts, sizes = spans[:, 0], spans[:, 1], spans[:, 2]
    inside = (ids >= 0) & (ids < num_blocks) & (starts >= 0) & (sizes >= 0) & (starts + sizes <= block_bytes)
    if not inside.all() or int(sizes.sum()) != num_bytes:
        raise InternalError(f"spans of {int(sizes.sum())} bytes do not fit a buffer of {num_bytes}, or the blocks")


def checked_spans(
    spans: Spans, num_bytes: int, num_blocks: int, block_bytes: int
) -> Iterator[tuple[slice, int, slice]]:
    """Yield each span as its place in the host buffer, its block and its bytes there.

    Raises:
        InternalError: A span is not within a block, or the buffer has another size than all of them; before any
            is yielded.
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
        generations: uint64 [num_blocks].
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
        """Lay the state of a new arena into zeroed memory.

        Args:
            memory: uint8, at least ``state_bytes(num_blocks)``, aligned to 8 bytes.
            num_blocks: Of the arena.
            block_bytes: Size of each.
            epoch: Default: a new one.
        """
        epoch = epoch or Epoch(secrets.token_bytes(16))
        header = MAGIC + epoch + num_blocks.to_bytes(8, "little") + block_bytes.to_bytes(8, "little")
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        return cls.at(memory, header)

    @classmethod
    def at(cls, memory: npt.NDArray[np.uint8], header: bytes) -> ArenaState:
        """Return the state that lies in memory under a header that :func:`read_header` accepts."""
        epoch, num_blocks, block_bytes = read_header(header)
        generations = memory[_HEADER_BYTES : _HEADER_BYTES + 8 * num_blocks].view(np.uint64)
        progress = Progress(memory[_PROGRESS_AT : _PROGRESS_AT + 8].view(np.uint64))
        return cls(epoch, num_blocks, block_bytes, generations, progress)


def read_header(header: bytes) -> tuple[Epoch, int, int]:
    """Return epoch, number of blocks and bytes per block from the beginning of an arena's state.

    Raises:
        ConfigError: It is no arena's.
    """
    if len(header) < _FIELDS_BYTES or header[:8] != MAGIC:
        raise ConfigError("the memory received is not a KV arena")
    return Epoch(header[8:24]), int.from_bytes(header[24:32], "little"), int.from_bytes(header[32:40], "little")


def state_bytes(num_blocks: int) -> int:
    """Bytes of the state, in whole pages."""
    return _HEADER_BYTES + page_up(8 * num_blocks)


def page_up(size: int) -> int:
    """Round bytes up to whole pages."""
    return -(-size // 4096) * 4096


def _bits(first: int, last: int) -> int:
    """The set of bits that stands for the values from the first to the last."""
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
        if deadline is not None:  # that of ``time.monotonic``, the clock of this operation
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
    """Implements :class:`~baton.kv_cache.arena.Arena`; the mapping is its state, then the blocks.

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
        """Copy spans of blocks to ``target``; see :meth:`~baton.kv_cache.arena.Arena.read_into`."""
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
