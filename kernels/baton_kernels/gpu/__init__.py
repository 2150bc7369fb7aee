"""Operators as Triton kernels, for GPUs; under ``TRITON_INTERPRET=1`` they run on a CPU, slowly.

Attention is ``baton_kernels.paged_attention.gpu``. Importing anything here imports triton.
"""

import functools
import threading
from typing import Any

import torch
import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: three of tensor cores, whose sum is as exact as one of float32; other dtypes are as they are.

One multiplication of float32 at a time takes so many registers that most of them are spilled.
"""


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, by Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def converts_fp8(device: torch.device) -> bool:
    """Whether Triton reads float8_e4m3fn on a device: on GPUs of compute capability 8.9 and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _interpret_one_at_a_time() -> None:
    """Let the interpreter run one kernel at a time: while one runs, it replaces parts of Triton itself.

    An engine's step and copies of its pool, or the steps of two engines, run in different threads.
    """
    from triton.runtime.interpreter import GridExecutor

    lock = threading.RLock()
    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def launch_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = launch_alone


if is_interpreted():
    _interpret_one_at_a_time()
