"""Linear layers with bfloat16 weights: ``x W^T + bias + residual``, summed in float32, rounded once.

Implementations, each with weights packed once: C++ ones that multiply in float32, which many processors do faster than
their bfloat16, in pairs of bfloat16, and in AMX's tiles; oneDNN's where these cannot be loaded.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from baton_kernels.cpu.library import BoundCall, CpuLibrary, LinearOperator, RowsCall, address


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x W^T + bias + residual`` computed in float64, in x's dtype."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    if residual is not None:
        out = out + residual.double()
    return out.to(x.dtype)


class PackedLinear(Protocol):
    """A linear layer with packed weights.

    Attributes:
        in_features: Number of inputs.
        out_features: Number of outputs.
    """

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output, plus the residual, [rows, out_features] for x [rows, in_features]."""


class LinearCall(RowsCall):
    """The C structure ``Linear`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("x", "packed", "bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "residual_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("in_features", "out_features", "threads", "unused")),
    ]


class CpuLinear:
    """The C++ operator that multiplies in float32; see the module's docstring."""

    def __init__(self, library: CpuLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"weight must be bfloat16, got {weight.dtype}")
        self.out_features, self.in_features = weight.shape
        operator = self._operator(library)
        self._run = operator.run
        self._packed = library.weights.empty(operator.packed_size(*weight.shape), torch.bfloat16)
        operator.pack(weight.detach().contiguous().data_ptr(), self._packed.data_ptr(), *weight.shape)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._call = LinearCall(
            packed=self._packed.data_ptr(),
            bias=address(self._bias),
            in_features=self.in_features,
            out_features=self.out_features,
            out_stride=self.out_features,
        )

    @staticmethod
    def _operator(library: CpuLibrary) -> LinearOperator:
        return library.linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        call = self._call
        call.set_tensors(x, out, residual)
        call.rows = x.shape[0]
        self._run(ctypes.byref(call))
        return out

    def bind(self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> BoundCall | None:
        return self._call.bind(self._run, x, out, residual, self._packed, self._bias)


class PairsLinear(CpuLinear):
    """The C++ operator that multiplies pairs of bfloat16, in float32 where there is no instruction for that."""

    @staticmethod
    def _operator(library: CpuLibrary) -> LinearOperator:
        return library.linear_pairs


class AmxLinear(CpuLinear):
    """The C++ operator for AMX; see the module's docstring.

    Raises:
        ValueError: The weight is not bfloat16, or the processor has no AMX (``CpuLibrary.amx``).
    """

    @staticmethod
    def _operator(library: CpuLibrary) -> LinearOperator:
        if not library.amx:
            raise ValueError("this process cannot use AMX")
        return library.linear_amx


class OneDnnLinear:
    """oneDNN's operator, with weights packed by oneDNN."""

    PACK_ROWS = 32
    """Number of rows that oneDNN chooses the packing for."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), self.PACK_ROWS)
        self._bias = None if bias is None else bias.detach().to(weight.dtype)
        self._run: Any = torch.ops.mkldnn._linear_pointwise.default
        self._run_binary: Any = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor
        if residual is None:
            out = self._run(x, self._weight, self._bias, "none", [], "")
        else:
            out = self._run_binary(x, residual, self._weight, self._bias, "add")
        return out


class PlainLinear:
    """torch's own operator, for other dtypes and weights that are not packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = F.linear(x, self._weight, self._bias)
        return out if residual is None else out.add_(residual)
