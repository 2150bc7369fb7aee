"""Between arrays on the host and tensors on the device, through pinned memory: copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.device.compute import ComputeDevice

_BUFFERS = 8
"""Copies of two steps, up to four of each: a step's numbers are put together while the one before runs."""
_LEAST_BYTES = 1 << 16
_ALIGNED = 16


class HostStaging:
    """Takes arrays to a device in one copy, and tensors back. Not thread safe: one per runner.

    Args:
        device: Where to.
    """

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._pinned = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._next = 0

    def upload(self, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
        """Return tensors on the device with the arrays' shapes and dtypes; the arrays may be changed at once.

        On a CPU that runs its own operators they are the arrays themselves.
        """
        if not self._device.on_gpu:
            return [torch.from_numpy(array) for array in arrays]
        places = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
        flat = torch.empty(places[-1], dtype=torch.uint8, device=self._device.memory)
        self.copy(arrays, places, flat)
        return [
            flat[at : at + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for at, array in zip(places, arrays, strict=False)
        ]

    def copy(self, arrays: tuple[npt.NDArray[np.generic], ...], places: list[int], target: torch.Tensor) -> None:
        """Copy arrays to a tensor on the device.

        Args:
            arrays: Of any shapes and dtypes.
            places: First byte of each in ``target``; what comes after the last ends the copy.
            target: uint8, at least ``places[-1]`` bytes.
        """
        index, self._next = self._next, (self._next + 1) % _BUFFERS
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        if len(self._pinned[index]) < places[-1]:
            size = max(_LEAST_BYTES, 1 << (places[-1] - 1).bit_length())
            self._pinned[index] = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.is_cuda)
        buffer = self._pinned[index].numpy()
        for at, array in zip(places, arrays, strict=False):
            buffer[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[: places[-1]].copy_(self._pinned[index][: places[-1]], non_blocking=True)
        if self._device.is_cuda:
            copied = copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device.memory))
            self._copied[index] = copied

    def download(self, *tensors: torch.Tensor) -> Callable[[], list[npt.NDArray[Any]]]:
        """Queue copies to the host behind what is queued by now.

        Args:
            tensors: They must not be changed by what is queued later.

        Returns:
            What waits for the copies, and for nothing behind them, and returns the arrays.
        """
        if not self._device.is_cuda:
            return lambda: [tensor.numpy() for tensor in tensors]
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._device.memory))

        def read() -> list[npt.NDArray[Any]]:
            copied.synchronize()
            return [copy.numpy() for copy in copies]

        return read
