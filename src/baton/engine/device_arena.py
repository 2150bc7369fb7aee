"""A KV pool in the memory of the device that computes: blocks are reached by copies, gathered and scattered there.

Epoch, generations and progress stay in host memory, where readers poll them. A copy runs on a stream of its own, behind
all that the engine has queued by then: progress says that a layer's kernels are queued, and what is queued before a
copy is done before it. Generations fence as in host memory: whoever gets a block next raises its generation before
anything that writes it is queued, so an unchanged generation after a copy means that no such thing had begun.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch

from baton.errors import InternalError
from baton.kv_cache.arena import ArenaState, Spans
from baton.kv_cache.arena.base import Bytes, checked_spans, state_bytes
from baton.types import Epoch

STAGING_BYTES = 1 << 25
"""Of one copy at a time; longer ones come in parts."""


class DeviceArena:
    """Implements :class:`baton.kv_cache.arena.base.Arena`.

    Args:
        device: Where the blocks lie.
        num_blocks: How many.
        block_bytes: Size of each.
        epoch: Default: a new one.

    Attributes:
        memory: The blocks, uint8 [num_blocks, block_bytes] on the device.
    """

    mapped = False
    fd = -1

    def __init__(self, device: torch.device, num_blocks: int, block_bytes: int, *, epoch: Epoch | None = None) -> None:
        state = ArenaState.create(np.zeros(state_bytes(num_blocks), np.uint8), num_blocks, block_bytes, epoch)
        self.num_blocks, self.block_bytes, self.epoch = num_blocks, block_bytes, state.epoch
        self.generations, self.progress = state.generations, state.progress
        self.memory = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        self._cuda = device.type == "cuda"
        self._copies = _copies(cuda=self._cuda)
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        size = max(STAGING_BYTES, block_bytes)
        self._staging = torch.empty(size, dtype=torch.uint8, device=device)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)

    @property
    def blocks(self) -> Bytes:
        """Refused: it is device memory."""
        raise InternalError("the blocks are in device memory: the host cannot address them")

    def open_read_only(self) -> int:
        """Refused: no other process can map it."""
        raise OSError("device memory has no file descriptor")

    def read_into(self, target: Bytes, spans: Spans) -> None:
        """Copy spans of blocks to host memory; see :meth:`~baton.kv_cache.arena.base.Arena.read_into`."""
        for at, part in self._parts(len(target), spans):
            size = at.stop - at.start
            with self._copying():
                self._copies.gather_spans(self.memory, part, self._staging[:size])
                self._host[:size].copy_(self._staging[:size], non_blocking=True)
                self._finish()
                target[at] = self._host[:size].numpy()

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy host memory to spans of blocks."""
        for at, part in self._parts(len(source), spans):
            size = at.stop - at.start
            with self._copying():
                self._host[:size] = torch.from_numpy(source[at])
                self._staging[:size].copy_(self._host[:size], non_blocking=True)
                self._copies.scatter_spans(self.memory, part, self._staging[:size])
                self._finish()

    def touch(self) -> None:
        """Nothing to do: the memory is there."""

    def close(self) -> None:
        """Nothing to release: the memory goes with the last tensor over it."""

    def _parts(self, num_bytes: int, spans: Spans) -> Iterator[tuple[slice, Spans]]:
        """Divide spans into copies that fit the staging memory; yields their place in the host's buffer."""
        limit = len(self._staging)
        begin, end, part = 0, 0, list[tuple[int, int, int]]()
        for at, block, span in checked_spans(spans, num_bytes, self.num_blocks, self.block_bytes):
            if at.stop - begin > limit:
                yield slice(begin, end), np.array(part, np.int64)
                begin, part = end, []
            part.append((block, span.start, span.stop - span.start))
            end = at.stop
        if part:
            yield slice(begin, end), np.array(part, np.int64)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """One copy at a time, behind what the engine has queued."""
        with self._lock:
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.default_stream(self.memory.device))
            with torch.cuda.stream(self._stream):
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


def _copies(*, cuda: bool) -> ModuleType:
    """The copies of this device: Triton's kernels, or their definitions."""
    if cuda:
        from baton_kernels.gpu import kv_copy as kernels

        return kernels
    from baton_kernels import kv_copy

    return kv_copy
