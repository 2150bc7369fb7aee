"""A KV pool in the memory of the device that computes: blocks are reached by copies, gathered and scattered there.

Epoch, generations and progress stay in host memory, which readers on this host map. A copy runs on a stream of its own,
behind all that the engine has queued by then: progress says that a layer's kernels are queued, and what is queued
before a copy is done before it. Generations fence as in host memory: whoever gets a block next raises its generation
before anything that writes it is queued, so an unchanged generation after a copy means that no such thing had begun.

Another process cannot wait for this one's stream. It asks, and is answered once what was queued by then is done
(:meth:`DeviceArena.settle`); then it copies on the device, out of memory that it has opened by a handle.

Of several ranks the leader allocates all arenas, each on its rank's device, and a follower opens its own by the handle
(:meth:`DeviceArena.attach`). What followers queue is ordered by the leader's stream: a layer is told of once the sum
over the ranks behind it is queued there, which ends when all of them have written the layer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch

from baton.engine.device.compute import ComputeDevice
from baton.engine.device.memory import HANDLE_BYTES, DeviceMemory, allocate, open_memory
from baton.errors import ConfigError, InternalError, PipeClosedError
from baton.kv_cache.arena import ArenaState, MemoryRange, Spans
from baton.kv_cache.arena.base import Bytes, read_header, require_spans, state_bytes
from baton.types import Epoch

STAGING_BYTES = 1 << 25
"""Of one copy at a time; longer ones come in parts."""


class DeviceArena:
    """Implements :class:`~baton.kv_cache.arena.base.SharedDeviceArena`.

    Args:
        device: Where the blocks lie.
        num_blocks: How many.
        block_bytes: Size of each.
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
        self._device, self._state_fd, self._whole = device, fd, memory
        self._leader, self._handle = device, b""
        self._elsewhere: dict[torch.device, torch.Tensor] = {}
        self.num_blocks, self.block_bytes, self.epoch = state.num_blocks, state.block_bytes, state.epoch
        self.generations, self.progress = state.generations, state.progress
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
        """Copy spans of blocks to host memory; see :meth:`~baton.kv_cache.arena.base.Arena.read_into`."""
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
        """Have the buffers of copies ready: the memory is there."""
        with self._lock:
            self._buffers(host=True)

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
            device: Of this process, which is to reach it.
            handle: Of its blocks.
            fd: Of its state, which is closed.

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
        """Copy spans of a peer's blocks to spans of these, on the device; returns when the bytes are there.

        Args:
            peer: What :meth:`open_peer` returned.
            taken: Of the peer's.
            into: Parallel, of the same sizes.

        Raises:
            InternalError: A span is not within a block, or sizes differ.
        """
        peer._check(int(taken[:, 2].sum()), taken)
        self._check(int(taken[:, 2].sum()), into)
        if not np.array_equal(taken[:, 2], into[:, 2]):
            raise InternalError("spans that are copied to spans of another size")
        source, at = peer._reached_from(self._device.memory), 0
        for part in self._parts(taken):
            size, to = int(part[:, 2].sum()), into[at : at + len(part)]
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
            found = self._elsewhere.get(device)
            if found is None:
                opened = open_memory(device, self._handle, self.num_blocks * self.block_bytes)
                found = self._elsewhere[device] = opened.tensor.view(self.num_blocks, self.block_bytes)
        return found

    def _check(self, num_bytes: int, spans: Spans) -> None:
        require_spans(spans, num_bytes, self.num_blocks, self.block_bytes)

    def _parts(self, spans: Spans) -> Iterator[Spans]:
        """Divide spans into copies that fit the staging memory."""
        ends, at, before = np.cumsum(spans[:, 2]), 0, 0
        while at < len(spans):
            stop = int(np.searchsorted(ends, before + self._staging_bytes, side="right"))
            yield spans[at:stop]
            at, before = stop, int(ends[stop - 1])

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
