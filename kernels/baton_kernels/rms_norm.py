"""RMS norm: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``, in float32, rounded once."""

from __future__ import annotations

import ctypes

import torch

from baton_kernels.cpu.library import CpuLibrary, RowCall, row_call


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Return the norm of x [..., dim] in float32, in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


class CpuRmsNorm:
    """The C++ operator for one weight [dim] of x's dtype."""

    def __init__(self, library: CpuLibrary, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._run = library.rms_norm
        self._weight = weight.detach().contiguous()
        self._eps, self._offset = eps, offset
        self._call: RowCall = row_call(self._weight.dtype)
        self._call.weight = self._weight.data_ptr()
        self._call.dim = len(weight)
        self._call.eps, self._call.offset = eps, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm x [rows, dim], rows of any stride, -> contiguous [rows, dim]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        call = self._call
        call.x, call.out, call.rows, call.x_stride = x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0)
        call.threads = torch.get_num_threads()
        self._run(ctypes.byref(call))
        return out
