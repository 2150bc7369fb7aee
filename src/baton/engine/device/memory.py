"""Memory of a device that other processes on this host can open: of a GPU by CUDA's IPC handles.

A KV pool is one allocation of its own, past torch's allocator, whose segments hold other tensors too and may be of a
kind that has no handles. It is freed with the last tensor over it. Where there is no GPU, shared memory of the host
stands in for it.

Source: CUDA Runtime API, 6.13 (device management: ``cudaIpcGetMemHandle``, ``cudaIpcOpenMemHandle``).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from baton.errors import ConfigError, PipeClosedError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
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
        device: Of this process.
        handle: What :meth:`DeviceMemory.handle` returned there.
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
        target: Where to.
        source: Where from. Where one end is the host's memory, that must be pinned, or the call waits.
        size: Bytes.
        stream: Handle of a CUDA stream. Where both ends are the host's memory, they are copied before it returns.

    Raises:
        OSError: CUDA refused.
    """
    if target.device is None and source.device is None:
        ctypes.memmove(target.address, source.address, size)
        return
    to, since = ctypes.c_void_p(target.address), ctypes.c_void_p(source.address)
    count, queue = ctypes.c_size_t(size), ctypes.c_void_p(stream)
    if target.device is not None and source.device is not None:
        devices = ctypes.c_int(target.device), ctypes.c_int(source.device)
        _cuda_runtime().call("cudaMemcpyPeerAsync", to, devices[0], since, devices[1], count, queue)
    else:
        kind = _HOST_TO_DEVICE if source.device is None else _DEVICE_TO_HOST
        _cuda_runtime().call("cudaMemcpyAsync", to, since, count, ctypes.c_int(kind), queue)


# CUDA


class _CudaRuntime:
    """The few functions of CUDA's runtime that torch does not offer."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            OSError: It failed; says why.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # or torch would report it with the next launch
            raise OSError(code, f"{name}: {self._library.cudaGetErrorString(code).decode()}")


@functools.cache
def _cuda_runtime() -> _CudaRuntime:
    """Return the runtime that torch has loaded into this process.

    Raises:
        OSError: There is none.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if "libcudart" in path[2]:
            return _CudaRuntime("/" + path[2])
    raise OSError("torch has loaded no libcudart")


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
        self._device, self._address = device, address
        region = _Region(address, size)
        weakref.finalize(region, _release, device, address, free)
        self.tensor: torch.Tensor = torch.as_tensor(region)

    @classmethod
    def allocate(cls, device: torch.device, size: int) -> CudaMemory:
        """Return new zeroed memory; see :func:`allocate`."""
        torch.cuda.empty_cache()
        address = ctypes.c_void_p()
        try:
            with torch.cuda.device(device):
                _cuda_runtime().call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
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
        """Open another process's memory; see :func:`open_memory`."""
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        try:
            with torch.cuda.device(device):
                _cuda_runtime().call(
                    "cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS)
                )
        except OSError as error:
            raise PipeClosedError(f"the peer's device memory cannot be opened ({error})") from error
        return cls(device, int(address.value or 0), size, "cudaIpcCloseMemHandle")

    def handle(self) -> bytes:
        """Return the IPC handle; see :class:`DeviceMemory`."""
        made = _Handle()
        with torch.cuda.device(self._device):
            _cuda_runtime().call("cudaIpcGetMemHandle", ctypes.byref(made), ctypes.c_void_p(self._address))
        return bytes(made)


def _release(device: torch.device, address: int, function: str) -> None:
    with torch.cuda.device(device):
        _cuda_runtime().call(function, ctypes.c_void_p(address))


# Where there is no GPU


class StandInMemory:
    """Shared memory of the host in place of a device's; see :class:`DeviceMemory`."""

    def __init__(self, fd: int, size: int) -> None:
        mapping = mmap.mmap(fd, size)
        self._fd, self._size = fd, size
        weakref.finalize(self, os.close, fd)
        self.tensor: torch.Tensor = torch.from_numpy(np.frombuffer(mapping, np.uint8))

    @classmethod
    def allocate(cls, size: int) -> StandInMemory:
        """Return new zeroed memory."""
        fd = os.memfd_create("baton-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def open(cls, device: torch.device, handle: bytes, size: int) -> StandInMemory:
        """Open another process's memory; see :func:`open_memory`."""
        magic, pid, number, theirs = _STAND_IN.unpack_from(handle)
        if magic != _STAND_IN_MAGIC or theirs != size:
            raise PipeClosedError("the peer's device memory is of another kind, or size")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PipeClosedError(f"the peer's device memory cannot be opened ({error.strerror})") from error
        return cls(fd, size)

    def handle(self) -> bytes:
        """Return process and descriptor; see :class:`DeviceMemory`."""
        return _STAND_IN.pack(_STAND_IN_MAGIC, os.getpid(), self._fd, self._size).ljust(HANDLE_BYTES, b"\0")
