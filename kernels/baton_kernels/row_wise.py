"""Row-wise operations between the linears, in float32, rounded once: RMS norm, and a gated MLP's product."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from baton_kernels.cpu.library import DTYPE_CODES, BoundCall, CpuLibrary, RowsCall


class RowCall(RowsCall):
    """The C structure ``RowOp`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "x_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads", "activation")),
        *((name, ctypes.c_float) for name in ("eps", "offset", "alpha", "limit")),
    ]

    residual_stride = 0  # the structure has none: a residual is contiguous

    def run(
        self, function: Any, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Call a function of the library for x [rows, ...], with rows of any stride; return ``out``."""
        self.set_tensors(x, out, residual)
        self.rows = x.shape[0]
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

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x [rows, dim], rows of any stride, plus a contiguous residual, contiguous [rows, dim]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._call.run(self._run, x, out, residual)

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        return self._call.bind(self._run, x, out, residual, self._weight)


class ActivationKind(enum.IntEnum):
    """Kinds of activations, as ``csrc/activation.h`` numbers them."""

    SILU = 0
    GELU_TANH = 1
    CLIPPED_SWISH = 2


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation between a gated MLP's linears.

    Attributes:
        kind: ``SILU``: ``silu(gate) * up``; ``GELU_TANH``: with the tanh approximation of GELU; ``CLIPPED_SWISH``:
            ``gate * sigmoid(alpha * gate) * (up + 1)`` of gate at most ``limit`` and up within +-``limit`` (GPT-OSS).
        alpha: Factor within ``CLIPPED_SWISH``; else 0.
        limit: Limit of ``CLIPPED_SWISH``; else 0.
    """

    kind: ActivationKind
    alpha: float = 0.0
    limit: float = 0.0


SILU = Activation(ActivationKind.SILU)
GELU_TANH = Activation(ActivationKind.GELU_TANH)


def gated_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return ``activation(gate) * up`` of x [..., 2 dim], gates first, in float32 or wider, in x's dtype [..., dim]."""
    gate, up = (x if x.dtype is torch.float64 else x.float()).chunk(2, dim=-1)
    if activation.kind is ActivationKind.CLIPPED_SWISH:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        out = gate * torch.sigmoid(gate * activation.alpha) * (up + 1)
    elif activation.kind is ActivationKind.GELU_TANH:
        out = F.gelu(gate, approximate="tanh") * up
    else:
        out = F.silu(gate) * up
    return out.to(x.dtype)


class CpuGatedMul:
    """The C++ operator for a gated product."""

    def __init__(self, library: CpuLibrary, dtype: torch.dtype, activation: Activation = SILU) -> None:
        self._run = library.gated_mul
        self._call = RowCall(
            dtype=DTYPE_CODES[dtype], activation=activation.kind, alpha=activation.alpha, limit=activation.limit
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return :func:`gated_reference` [rows, dim] of contiguous x [rows, 2 dim], gates first."""
        self._call.dim = x.shape[1] // 2
        return self._call.run(self._run, x, x.new_empty(x.shape[0], x.shape[1] // 2))

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        """See :class:`~baton_kernels.cpu.library.BindableOperator`; a residual cannot be bound."""
        if residual is not None:
            return None
        bound = self._call.bind(self._run, x, out, None)
        bound.structure.dim = out.shape[1]
        return bound
