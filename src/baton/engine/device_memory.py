"""A KV pool in the memory of the device that computes: blocks are reached by copies, gathered and scattered there.

Epoch, generations and progress stay in host memory, which readers on this host map. A copy runs on a stream of its own,
behind all that the engine has queued by then: progress says that a layer's kernels are queued, and what is queued
before a copy is done before it. Generations fence as in host memory: the next owner of a block raises its generation
before it queues a write, so an unchanged generation after a copy means that no write had begun.

Another process cannot wait for this one's stream. It asks, and is answered once what was queued by then is done
(:meth:`DeviceArena.settle`); then it copies on the device, out of memory that it has opened by a handle.

Of several ranks the leader allocates all arenas, each on its rank's device, and a follower opens its own by the handle
(:meth:`DeviceArena.attach`). What followers queue is ordered by the leader's stream: a layer is reported once the sum
over the ranks behind it is queued there, which completes when all of them have written the layer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np
import psutil
import torch

from baton.engine.device import ComputeDevice
from baton.errors import ConfigError, InternalError, PipeClosedError
from baton.kv_cache.arena import (
    Arena,
    ArenaState,
    Bytes,
    HostArena,
    MemoryRange,
    Spans,
    read_header,
    require_spans,
    state_bytes,
)
from baton.types import Epoch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_HOST_TO_DEVICE = 1
_DEVICE_TO_HOST = 2
_STAND_IN = struct.Struct("<8sqqq")
_STAND_IN_MAGIC = b"BATONMEM"


class DeviceMemory(Protocol):
    """A piece of memory of a device, this process's own or one that it has opened.

    Attributes:
        tensor: uint8 [bytes] on the device.
    """

    tensor: torch.Tensor

    def handle(self) -> bytes:
        """Return what another process on this host opens the memory by, 64 bytes.

        Raises:
            OSError: It cannot be opened elsewhere.
        """


def allocate(device: torch.device, size: int) -> DeviceMemory:
    """Return new zeroed memory.

    Raises:
        ConfigError: There is not so much left; names ``kv_blocks``.
    """
    return CudaMemory.allocate(device, size) if device.type == "cuda" else StandInMemory.allocate(size)


def open_memory(device: torch.device, handle: bytes, size: int) -> DeviceMemory:
    """Open another process's memory.

    Args:
        device: Device of this process.
        handle: Result of :meth:`DeviceMemory.handle` in the other process.
        size: Bytes of the memory.

    Raises:
        PipeClosedError: It cannot be reached from here, or its process is gone.
    """
    opened = CudaMemory.open if device.type == "cuda" else StandInMemory.open
    return opened(device, handle, size)


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory begins.

    Attributes:
        address: As its process sees it.
        device: Index of the GPU that it is on; ``None``: the host's memory.
    """

    address: int
    device: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Return where a tensor begins."""
        return cls(tensor.data_ptr(), tensor.device.index if tensor.is_cuda else None)

    def __add__(self, offset: int) -> Place:
        return Place(self.address + offset, self.device)


def queue_copy(target: Place, source: Place, size: int, stream: int) -> None:
    """Queue a copy of bytes as CUDA's runtime has it, and nothing around it: the measure of every other copy.

    Args:
        target: Destination.
        source: Source. Host memory on either side must be pinned, or the call blocks.
        size: Bytes.
        stream: Handle of a CUDA stream. Where both ends are the host's memory, they are copied before it returns.

    Raises:
        OSError: CUDA refused.
    """
    if target.device is None and source.device is None:
        ctypes.memmove(target.address, source.address, size)
        return
    to = ctypes.c_void_p(target.address)
    since = ctypes.c_void_p(source.address)
    count = ctypes.c_size_t(size)
    queue = ctypes.c_void_p(stream)
    if target.device is not None and source.device is not None:
        devices = ctypes.c_int(target.device), ctypes.c_int(source.device)
        _call_cuda("cudaMemcpyPeerAsync", to, devices[0], since, devices[1], count, queue)
    else:
        kind = _HOST_TO_DEVICE if source.device is None else _DEVICE_TO_HOST
        _call_cuda("cudaMemcpyAsync", to, since, count, ctypes.c_int(kind), queue)


# CUDA


@functools.cache
def _cuda_runtime() -> ctypes.CDLL:
    """Return CUDA's runtime that torch has loaded into this process; torch does not offer all of its functions.

    Raises:
        OSError: There is none.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if "libcudart" in path[2]:
            library = ctypes.CDLL("/" + path[2])
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    raise OSError("torch has loaded no libcudart")


def _call_cuda(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's runtime.

    Raises:
        OSError: It failed; says why.
    """
    library = _cuda_runtime()
    if code := getattr(library, name)(*arguments):
        library.cudaGetLastError()  # or torch would report it with the next launch
        raise OSError(code, f"{name}: {library.cudaGetErrorString(code).decode()}")


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_: ClassVar[Any] = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Region:
    """Lets torch make a tensor over memory that is not its own; it keeps this object as long as the tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaMemory:
    """Memory of a GPU; see :class:`DeviceMemory`."""

    def __init__(self, device: torch.device, address: int, size: int, free: str) -> None:
        self._device = device
        self._address = address
        region = _Region(address, size)
        weakref.finalize(region, _release, device, address, free)
        self.tensor: torch.Tensor = torch.as_tensor(region)

    @classmethod
    def allocate(cls, device: torch.device, size: int) -> CudaMemory:
        torch.cuda.empty_cache()
        address = ctypes.c_void_p()
        try:
            with torch.cuda.device(device):
                _call_cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        except OSError as error:
            free = int(torch.cuda.mem_get_info(device)[0])
            raise ConfigError(
                f"a KV pool of {size / 2**20:.0f} MiB does not fit {device}, of which {free / 2**20:.0f} MiB are free "
                f"({error})",
                field="kv_blocks",
            ) from error
        made = cls(device, int(address.value or 0), size, "cudaFree")
        made.tensor.zero_()
        return made

    @classmethod
    def open(cls, device: torch.device, handle: bytes, size: int) -> CudaMemory:
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        try:
            with torch.cuda.device(device):
                _call_cuda("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        except OSError as error:
            raise PipeClosedError(f"the peer's device memory cannot be opened ({error})") from error
        return cls(device, int(address.value or 0), size, "cudaIpcCloseMemHandle")

    def handle(self) -> bytes:
        made = _Handle()
        with torch.cuda.device(self._device):
            _call_cuda("cudaIpcGetMemHandle", ctypes.byref(made), ctypes.c_void_p(self._address))
        return bytes(made)


def _release(device: torch.device, address: int, function: str) -> None:
    with torch.cuda.device(device):
        _call_cuda(function, ctypes.c_void_p(address))


# Where there is no GPU


class StandInMemory:
    """Shared memory of the host in place of a device's; see :class:`DeviceMemory`."""

    def __init__(self, fd: int, size: int) -> None:
        mapping = mmap.mmap(fd, size)
        self._fd = fd
        self._size = size
        weakref.finalize(self, os.close, fd)
        self.tensor: torch.Tensor = torch.from_numpy(np.frombuffer(mapping, np.uint8))

    @classmethod
    def allocate(cls, size: int) -> StandInMemory:
        fd = os.memfd_create("baton-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def open(cls, device: torch.device, handle: bytes, size: int) -> StandInMemory:
        magic, pid, number, peer_size = _STAND_IN.unpack_from(handle)
        if magic != _STAND_IN_MAGIC or peer_size != size:
            raise PipeClosedError("the peer's device memory is of another kind, or size")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PipeClosedError(f"the peer's device memory cannot be opened ({error.strerror})") from error
        return cls(fd, size)

    def handle(self) -> bytes:
        return _STAND_IN.pack(_STAND_IN_MAGIC, os.getpid(), self._fd, self._size).ljust(HANDLE_BYTES, b"\0")


STAGING_BYTES = 1 << 25
"""Of one copy at a time; longer ones come in parts."""


class DeviceArena:
    """Implements :class:`~baton.kv_cache.arena.SharedDeviceArena`.

    Args:
        device: Where the blocks lie.
        num_blocks: Number of blocks.
        block_bytes: Bytes per block.
        epoch: Default: a new one.
        leader: Where this process computes, if not there: what is queued there orders what other ranks write.

    Attributes:
        memory: The blocks, uint8 [num_blocks, block_bytes] on the device.

    Raises:
        ConfigError: They do not fit; names ``kv_blocks``.
    """

    mapped = False
    fd = -1

    def __init__(
        self,
        device: ComputeDevice,
        num_blocks: int,
        block_bytes: int,
        *,
        epoch: Epoch | None = None,
        leader: ComputeDevice | None = None,
    ) -> None:
        fd = os.memfd_create("baton-kv-state", os.MFD_CLOEXEC)
        os.ftruncate(fd, state_bytes(num_blocks))
        mapping = np.frombuffer(mmap.mmap(fd, state_bytes(num_blocks)), np.uint8)
        state = ArenaState.create(mapping, num_blocks, block_bytes, epoch)
        self._use(device, state, fd, allocate(device.memory, num_blocks * block_bytes))
        self._leader = leader or device

    def _use(self, device: ComputeDevice, state: ArenaState, fd: int, memory: DeviceMemory) -> None:
        self._device = device
        self._state_fd = fd
        self._whole = memory
        self._leader = device
        self._handle = b""
        self._elsewhere: dict[torch.device, torch.Tensor] = {}
        self.num_blocks = state.num_blocks
        self.block_bytes = state.block_bytes
        self.epoch = state.epoch
        self.generations = state.generations
        self.progress = state.progress
        self.memory = memory.tensor.view(self.num_blocks, self.block_bytes)
        self._copies = _copies(on_gpu=device.on_gpu)
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        if device.is_cuda:
            self._stream = torch.cuda.Stream(device.memory)  # type: ignore[no-untyped-call]
        self._staging: torch.Tensor | None = None
        self._host: torch.Tensor | None = None

    @property
    def blocks(self) -> Bytes:
        """Refused: it is device memory."""
        raise InternalError("the blocks are in device memory: the host cannot address them")

    def open_read_only(self) -> int:
        """Refused: the blocks have no file descriptor."""
        raise OSError("device memory has no file descriptor")

    def read_into(self, target: Bytes, spans: Spans) -> None:
        """Copy spans of blocks to host memory; see :meth:`~baton.kv_cache.arena.Arena.read_into`."""
        self._check(len(target), spans)
        at = 0
        for part in self._parts(spans):
            size = int(part[:, 2].sum())
            with self._copying():
                staging, host = self._buffers(host=True)
                self._copies.gather_spans(self.memory, part, staging[:size])
                host[:size].copy_(staging[:size], non_blocking=True)
                self._finish()
                target[at : at + size] = host[:size].numpy()
            at += size

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy host memory to spans of blocks."""
        self._check(len(source), spans)
        at = 0
        for part in self._parts(spans):
            size = int(part[:, 2].sum())
            with self._copying():
                staging, host = self._buffers(host=True)
                host[:size] = torch.from_numpy(source[at : at + size])
                staging[:size].copy_(host[:size], non_blocking=True)
                self._copies.scatter_spans(self.memory, part, staging[:size])
                self._finish()
            at += size

    def touch(self) -> None:
        """Have the buffers and the kernels of copies ready: the memory is there."""
        with self._lock:
            self._buffers(host=True)
        first = np.zeros(min(8, self.block_bytes), np.uint8)
        spans = np.array([[0, 0, len(first)]])
        self.read_into(first, spans)
        self.write_from(first, spans)

    def close(self) -> None:
        """Release the state's descriptor; the memory goes with the last tensor over it."""
        if self._state_fd >= 0:
            os.close(self._state_fd)
            self._state_fd = -1

    # Between processes

    def export(self) -> tuple[bytes, int]:
        """Return the handle of the blocks, and a new read-only descriptor of the state, which the caller closes."""
        return self._whole.handle(), os.open(f"/proc/self/fd/{self._state_fd}", os.O_RDONLY | os.O_CLOEXEC)

    def memory_range(self) -> MemoryRange:
        """Return where the blocks lie."""
        device = self._device.memory.index if self._device.is_cuda else None
        return MemoryRange(self.memory.data_ptr(), self.memory.numel(), device)

    def settle(self) -> None:
        """Wait until all is done that the engine has queued by now."""
        if self._device.is_cuda:
            queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            queued.record(torch.cuda.default_stream(self._leader.memory))
            queued.synchronize()

    def open_peer(self, handle: bytes, fd: int) -> DeviceArena:
        """Open another process's arena, to read it alone; see :meth:`attach`."""
        return DeviceArena.attach(self._device, handle, fd)

    @classmethod
    def attach(cls, device: ComputeDevice, handle: bytes, fd: int) -> DeviceArena:
        """Open another process's arena by what :meth:`export` returned there.

        Args:
            device: Device of this process that reads the arena.
            handle: Handle of the arena's blocks.
            fd: File descriptor of the arena's state; it is closed.

        Raises:
            PipeClosedError: It cannot be reached from here.
            ConfigError: What was passed is no arena.
        """
        try:
            header = os.pread(fd, 40, 0)
            _, num_blocks, block_bytes = read_header(header)
            if os.fstat(fd).st_size != state_bytes(num_blocks) or len(handle) != HANDLE_BYTES:
                raise ConfigError("what the peer passed is not the state of a KV arena")
            mapping = np.frombuffer(mmap.mmap(fd, state_bytes(num_blocks), access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:
            raise PipeClosedError(f"the state of the peer's arena cannot be mapped ({error})") from error
        finally:
            os.close(fd)
        peer = cls.__new__(cls)
        opened = open_memory(device.memory, handle, num_blocks * block_bytes)
        peer._use(device, ArenaState.at(mapping, header), -1, opened)
        peer._handle = handle
        return peer

    def copy_from(self, peer: DeviceArena, taken: Spans, into: Spans) -> None:
        """See :meth:`baton.kv_cache.arena.SharedDeviceArena.copy_from`."""
        peer._check(int(taken[:, 2].sum()), taken)
        self._check(int(taken[:, 2].sum()), into)
        if not np.array_equal(taken[:, 2], into[:, 2]):
            raise InternalError("spans that are copied to spans of another size")
        source = peer._reached_from(self._device.memory)
        at = 0
        for part in self._parts(taken):
            size = int(part[:, 2].sum())
            to = into[at : at + len(part)]
            with self._copying():
                staging, _ = self._buffers(host=False)
                self._copies.gather_spans(source, part, staging[:size])
                self._copies.scatter_spans(self.memory, to, staging[:size])
                self._finish()
            at += len(part)

    def _reached_from(self, device: torch.device) -> torch.Tensor:
        """The blocks of an arena of another process, as a device of this one reaches them: each opens them itself."""
        if device == self._device.memory:
            return self.memory
        with self._lock:
            reachable = self._elsewhere.get(device)
            if reachable is None:
                opened = open_memory(device, self._handle, self.num_blocks * self.block_bytes)
                reachable = self._elsewhere[device] = opened.tensor.view(self.num_blocks, self.block_bytes)
        return reachable

    def _check(self, num_bytes: int, spans: Spans) -> None:
        require_spans(spans, num_bytes, self.num_blocks, self.block_bytes)

    def _parts(self, spans: Spans) -> Iterator[Spans]:
        """Divide spans into copies that fit the staging memory."""
        ends = np.cumsum(spans[:, 2])
        at = 0
        before = 0
        while at < len(spans):
            stop = int(np.searchsorted(ends, before + self._staging_bytes, side="right"))
            yield spans[at:stop]
            at = stop
            before = int(ends[stop - 1])

    @property
    def _staging_bytes(self) -> int:
        return max(STAGING_BYTES, self.block_bytes)

    def _buffers(self, *, host: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the staging memory on the device, and that on the host if it is wanted."""
        if self._staging is None:
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=self._device.memory)
        if self._host is None and host:
            self._host = torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=self._device.is_cuda)
        return self._staging, self._staging if self._host is None else self._host

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """One copy at a time, behind what the engine has queued."""
        with self._lock:
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.default_stream(self._leader.memory))
            with torch.cuda.device(self._device.memory), torch.cuda.stream(self._stream):
                yield

    def _finish(self) -> None:
        """Wait until what was queued here is done."""
        if self._stream is not None:
            self._stream.synchronize()


def arena_memory(arena: object) -> torch.Tensor:
    """Return an arena's blocks, uint8 [bytes], as a tensor where they are."""
    if isinstance(arena, DeviceArena):
        return arena.memory.view(-1)
    return torch.from_numpy(arena.blocks.reshape(-1))  # type: ignore[attr-defined]


def _copies(*, on_gpu: bool) -> ModuleType:
    """The copies of this device: Triton's kernels, or their definitions."""
    if on_gpu:
        from baton_kernels.gpu import kv_copy as kernels

        return kernels
    from baton_kernels import kv_copy

    return kv_copy


_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Versions 2 and 1: folder, files of limit and use, and the part of the use that can be dropped."""


def new_arena(
    device: ComputeDevice, blocks: int, block_bytes: int, *, private: bool, leader: ComputeDevice | None = None
) -> Arena:
    """Return an arena where a model runs.

    Args:
        device: Device of the rank.
        blocks: Number of blocks.
        block_bytes: Bytes per block.
        private: No other process will read it.
        leader: Device of this process's own rank, if ``device`` is another rank's.
    """
    if device.on_gpu:
        return DeviceArena(device, blocks, block_bytes, leader=leader)
    return HostArena(blocks, block_bytes, private=private)


def free_bytes(device: torch.device) -> int:
    """Bytes of the memory that a pool for a device comes from which are free: the device's, or this host's."""
    if device.type == "cpu":
        return available_bytes()
    torch.cuda.empty_cache()  # what torch keeps of what it has freed
    return int(torch.cuda.mem_get_info(device)[0])


def available_bytes() -> int:
    """Bytes of host memory that this process can still take, within the limit of its control group."""
    available = int(psutil.virtual_memory().available)
    for folder, limit, usage, cache in _CONTROL_GROUPS:
        try:
            text = (folder / limit).read_text().strip()
            if text == "max":
                continue
            used = int((folder / usage).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == cache:  # page cache that can be dropped does not count
                    used -= int(value)
            available = min(available, max(0, int(text) - max(0, used)))
        except (OSError, ValueError):
            continue  # no such version of control groups here
    return available
