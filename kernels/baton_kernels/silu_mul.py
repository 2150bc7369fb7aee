"""SwiGLU's middle: ``silu(gate) * up`` of rows that hold the gates and then the ups."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from baton_kernels.cpu.library import CpuLibrary, RowCall, row_call


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of x [..., 2 dim] in float32, in x's dtype [..., dim]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


class CpuSiluMul:
    """The C++ operator."""

    def __init__(self, library: CpuLibrary, dtype: torch.dtype) -> None:
        self._run = library.silu_mul
        self._call: RowCall = row_call(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Take x, contiguous [rows, 2 dim], -> [rows, dim]."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        call = self._call
        call.x, call.out, call.rows, call.x_stride = x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0)
        call.dim = out.shape[1]
        call.threads = torch.get_num_threads()
        self._run(ctypes.byref(call))
        return out
