"""Operators as Triton kernels, for GPUs; under ``TRITON_INTERPRET=1`` they run on a CPU, slowly.

Attention is ``baton_kernels.paged_attention.gpu``. Importing anything here imports triton.
"""

import torch
import triton


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, by Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def converts_fp8(device: torch.device) -> bool:
    """Whether Triton reads float8_e4m3fn on a device: on GPUs of compute capability 8.9 and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
