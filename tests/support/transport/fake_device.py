"""A device whose memory the host cannot address: an arena that is reached by explicit copies alone."""

from __future__ import annotations

import numpy as np
import torch

from baton.engine.device import ComputeDevice
from baton.engine.device_memory import DeviceArena
from baton.errors import InternalError
from baton.kv_cache.arena import ArenaState, Bytes, Spans, checked_spans, state_bytes
from baton.types import Epoch


class FakeDeviceArena:
    """Implements :class:`baton.kv_cache.arena.Arena`.

    Attributes:
        device_memory: The blocks, uint8 [num_blocks, block_bytes]: for the computation on the "device" and for checks.
        copies: Spans copied so far, in both directions.
        copied_bytes: Bytes of these.
    """

    mapped = False
    fd = -1

    def __init__(self, num_blocks: int, block_bytes: int, *, epoch: Epoch | None = None) -> None:
        state = ArenaState.create(np.zeros(state_bytes(num_blocks), np.uint8), num_blocks, block_bytes, epoch)
        self.num_blocks, self.block_bytes, self.epoch = num_blocks, block_bytes, state.epoch
        self.generations, self.progress = state.generations, state.progress
        self.device_memory: Bytes = np.zeros((num_blocks, block_bytes), np.uint8)
        self.copies = 0
        self.copied_bytes = 0

    @property
    def blocks(self) -> Bytes:
        """Refused: it is device memory."""
        raise InternalError("the blocks are in device memory: the host cannot address them")

    def open_read_only(self) -> int:
        """Refused: no other process can map it."""
        raise OSError("device memory has no file descriptor")

    def read_into(self, target: Bytes, spans: Spans) -> None:
        """Copy spans of blocks from the device."""
        for at, block, span in checked_spans(spans, len(target), self.num_blocks, self.block_bytes):
            target[at] = self.device_memory[block, span]
        self._count(spans)

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy host memory to the device."""
        for at, block, span in checked_spans(spans, len(source), self.num_blocks, self.block_bytes):
            self.device_memory[block, span] = source[at]
        self._count(spans)

    def touch(self) -> None:
        """Nothing to do: the memory is there."""

    def close(self) -> None:
        """Nothing to release."""

    def _count(self, spans: Spans) -> None:
        self.copies += len(spans)
        self.copied_bytes += int(spans[:, 2].sum())


class StandInArena(DeviceArena):
    """The arena of a device, over the memory of the host that stands in for the device's; other processes can open it.

    Attributes:
        device_memory: The blocks, uint8 [num_blocks, block_bytes]: for the computation on the "device" and for checks.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, epoch: Epoch | None = None) -> None:
        super().__init__(ComputeDevice(torch.device("cpu"), on_gpu=False), num_blocks, block_bytes, epoch=epoch)
        self.device_memory: Bytes = self.memory.numpy()


class OpenStandInArena(StandInArena):
    """The same, whose blocks tests may look at as if they were the host's."""

    @property
    def blocks(self) -> Bytes:
        """The blocks."""
        return self.device_memory
