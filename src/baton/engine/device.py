"""Where a model is computed: a CPU, a GPU, or a CPU on which Triton's interpreter runs what runs on GPUs.

``interpret`` is for tests, and for trying commands where there is no GPU: the same orchestration as on a GPU (fused
decoder and modules over the Triton kernels, staging, captured steps, sampling, pools that the host reaches by copies
alone), thousands of times slower.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError

INTERPRET = "interpret"
LEAST_CAPABILITY = (8, 0)
"""Of a GPU: Ampere, the first with bfloat16."""
_LOST = ("CUDA error", "Triton Error [CUDA]", "cuBLAS error", "CUBLAS_STATUS")


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """A device.

    Attributes:
        memory: Where tensors lie.
        on_gpu: Whether the operators of GPUs run the model, on a GPU or in Triton's interpreter.
    """

    memory: torch.device
    on_gpu: bool

    @property
    def is_cuda(self) -> bool:
        """Whether there are streams, graphs and memory of a GPU."""
        return self.memory.type == "cuda"

    def enter(self) -> None:
        """Have what this thread launches go to the device: Triton launches where the thread is."""
        if self.is_cuda:
            torch.cuda.set_device(self.memory)

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the operators of GPUs."""
        return self.on_gpu and not self.is_cuda


def compute_device(name: str) -> ComputeDevice:
    """Return the device of a name: ``cpu``, ``cuda``, ``cuda:1``, or ``interpret``.

    Raises:
        ConfigError: There is no such device, it cannot run the operators, or nothing runs them here; names ``device``.
    """
    if name == INTERPRET:
        _require_triton(name)
        from baton_kernels.gpu import is_interpreted

        if not is_interpreted():
            raise ConfigError("device interpret needs TRITON_INTERPRET=1 in the environment", field="device")
        return ComputeDevice(torch.device("cpu"), on_gpu=True)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not one that torch knows", field="device") from error
    if device.type == "cpu":
        return ComputeDevice(device, on_gpu=False)
    if device.type != "cuda":
        raise ConfigError(f"device {name!r}: only cpu, cuda and interpret are supported", field="device")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"device {name!r}: torch sees {count} CUDA devices", field="device")
    _require_triton(name)
    return ComputeDevice(_usable(torch.device("cuda", device.index or 0), name), on_gpu=True)


def rank_device(name: str, rank: int, ranks: int) -> ComputeDevice:
    """Return the device of one rank of an instance.

    Args:
        name: As :func:`compute_device` takes it: of the first rank, after which the others have the GPUs that follow;
            or one for each rank, separated by commas.
        rank: From 0 on.
        ranks: How many there are.

    Raises:
        ConfigError: As :func:`compute_device`, or there are fewer GPUs than ranks; names ``device`` or ``tp``.
    """
    names = name.split(",")
    if len(names) > 1:
        return compute_device(names[rank])
    if ranks == 1 or not name.startswith("cuda"):
        return compute_device(name)
    first = torch.device(name).index or 0
    count = torch.cuda.device_count()
    if first + ranks > count:
        which = f"cuda:{first} to cuda:{first + ranks - 1}"
        raise ConfigError(
            f"tp and pp make {ranks} ranks, which need {which}: torch sees {count} CUDA devices", field="tp"
        )
    return compute_device(f"cuda:{first + rank}")


def _usable(device: torch.device, name: str) -> torch.device:
    """Refuse a GPU that is too old, or that another process has for itself alone."""
    try:
        capability = torch.cuda.get_device_capability(device)
        torch.empty(1, device=device)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}", field="device") from error
    if capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise ConfigError(
            f"device {name!r} is a {torch.cuda.get_device_name(device)} of compute capability {has}: at least {needs} "
            "is needed",
            field="device",
        )
    return device


def _require_triton(name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"device {name!r} needs triton: pip install 'baton-serve[gpu]'", field="device")


def device_failure(error: BaseException) -> str:
    """Say what has become of the device in a step that failed; empty: nothing, the next step may go well.

    After an error of CUDA's own every later call of the process fails alike. Too little memory is no such error.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return ""
    text = str(error)
    if isinstance(error, torch.cuda.AcceleratorError) or any(mark in text for mark in _LOST):
        return text.strip().partition("\n")[0]
    return ""


_BUFFERS = 8
"""Copies of two steps, up to four of each: a step's numbers are put together while the one before runs."""
_LEAST_BYTES = 1 << 16
_ALIGNED = 16


class HostStaging:
    """Takes arrays to a device in one copy, and tensors back. Not thread safe: one per runner.

    Args:
        device: Target device.
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
            arrays: Arrays to copy, of any shapes and dtypes.
            places: First byte of each in ``target``; what comes after the last ends the copy.
            target: uint8, at least ``places[-1]`` bytes.
        """
        index = self._next
        self._next = (self._next + 1) % _BUFFERS
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
