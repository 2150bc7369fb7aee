"""Row-wise operations between the linears, in float32, rounded once: RMS norm, and SwiGLU's ``silu(gate) * up``."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary


class RowCall(ctypes.Structure):
    """The C structure ``RowOp``; see ``csrc/row_wise.cpp``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "x_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    ]

    def run(self, function: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Call a function of the library for x [rows, ...], with rows of any stride; returns ``out``."""
        self.x, self.out, self.rows, self.x_stride = x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0)
        self.threads = torch.get_num_threads()
        function(ctypes.byref(self))
        return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)`` of x [..., dim] in float32, in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


class CpuRmsNorm:
    """The C++ operator for one weight [dim] of x's dtype."""

    def __init__(self, library: CpuLibrary, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._run = library.rms_norm
        self._weight = weight.detach().contiguous()
        self._call = RowCall(
            weight=self._weight.data_ptr(),
            dim=len(weight),
            dtype=DTYPE_CODES[self._weight.dtype],
            eps=eps,
            offset=offset,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm x [rows, dim], rows of any stride, -> contiguous [rows, dim]."""
        return self._call.run(self._run, x, torch.empty_like(x, memory_format=torch.contiguous_format))


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` of x [..., 2 dim], gates first, in float32, in x's dtype [..., dim]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


class CpuSiluMul:
    """The C++ operator."""

    def __init__(self, library: CpuLibrary, dtype: torch.dtype) -> None:
        self._run = library.silu_mul
        self._call = RowCall(dtype=DTYPE_CODES[dtype])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Take x, contiguous [rows, 2 dim], -> [rows, dim]."""
        self._call.dim = x.shape[1] // 2
        return self._call.run(self._run, x, x.new_empty(x.shape[0], x.shape[1] // 2))
